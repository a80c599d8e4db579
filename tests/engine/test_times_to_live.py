"""A prefix that is to be forgotten after a time is forgotten, if not at once then when nothing holds it any more."""

from array import array

import pytest

from daemon.cache_messages import Selector, TierName, UnpinPrefix, Warm
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import prompt_of
from tiers.prefixes import EXPIRE_AGAIN_S

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


def test_a_prefix_that_is_in_use_when_its_time_is_over_is_forgotten_after_that() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    harness.submit("uses it", PROMPT, 40, ignore_eos=True)
    while not harness.tokens[("uses it", 0)]:
        harness.step()
    assert harness.usage["uses it"].cached_device == 3 * GRID
    harness.now += 61.0
    harness.run()
    harness.now += EXPIRE_AGAIN_S
    harness.engine.keep_time()
    harness.run()
    assert harness.device.tree.num_nodes == store.num_records == 0
    assert not harness.engine.prefixes.times_to_live
    harness.assert_idle_books()


def test_a_prefix_that_a_pinned_one_continues_is_forgotten_when_that_is_unpinned() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    harness.submit("longer", longer := PROMPT[: 3 * GRID] + prompt_of(GRID + 1, 6), 1, ignore_eos=True)
    harness.run()
    pinned = harness.engine.prefixes.by_prompt("", longer)
    assert pinned is not None
    harness.engine.prefixes.pin(pinned, None)
    harness.now += 61.0
    harness.engine.keep_time()
    harness.run()
    assert all(node.has_block for node in pinned.path())
    harness.engine.handle(UnpinPrefix(1, "", Selector(key=pinned.key.hex())))
    harness.now += EXPIRE_AGAIN_S
    harness.engine.keep_time()
    harness.run()
    assert harness.device.tree.num_nodes == store.num_records == 0
    harness.assert_idle_books()
