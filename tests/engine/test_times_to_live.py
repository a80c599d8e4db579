"""A prefix that is to be forgotten after a time is forgotten, if not at once then when nothing holds it any more."""

from array import array

import pytest

from daemon.cache_messages import TierName, Warm
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import prompt_of

PROMPT = prompt_of(3 * GRID + 2, 5)


def warm(harness: Harness, prompt: list[int] = PROMPT) -> None:
    """To be forgotten a minute later."""
    ids = array("i", prompt).tobytes()
    harness.engine.handle(Warm(f"w{len(prompt)}", ids, "", TierName.DISK, pin=False, durable=True, ttl_s=60.0))
    while harness.engine.has_work:
        harness.step()
    assert harness.engine.prefixes.times_to_live


@pytest.mark.parametrize("lengths", [(GRID, 3 * GRID), (3 * GRID, GRID)])
def test_prefixes_that_continue_each_other_can_end_at_the_same_time(lengths: tuple[int, int]) -> None:
    harness = Harness(store=(store := MemoryStore()))
    for length in lengths:
        warm(harness, PROMPT[:length])
    assert len(harness.engine.prefixes.times_to_live) == 2
    harness.now += 61.0
    harness.engine.keep_time()
    harness.run()
    assert harness.device.tree.num_nodes == store.num_records == 0
    harness.assert_idle_books()
