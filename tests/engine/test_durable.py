"""What is called durable is found by a restart, also where a record in the middle of its path was set aside."""

import pytest

from daemon.cache_messages import Flush, Flushed, TierName
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of, serve
from tiers.meters import EvictionReason

PROMPT = prompt_of(4 * GRID + 1)


def flush(harness: Harness) -> bool:
    """Whether all is durable, as an operator is told."""
    harness.engine.handle(Flush(1, TierName.DISK))
    harness.step()
    harness.run()
    answer = harness.other[-1]
    assert isinstance(answer, Flushed)
    return answer.durable


def found_by_a_restart(store: MemoryStore) -> int:
    restarted = Harness(store=store)
    serve(restarted, "from disk", PROMPT)
    restarted.assert_idle_books()
    return restarted.usage["from disk"].cached_disk


@pytest.mark.parametrize("has_other_copies", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_what_hangs_below_a_record_that_was_written_again_is_not_durable_before_it_is(
    depth: int, has_other_copies: bool
) -> None:
    """A restart takes no record that is older than the one above it."""
    harness = Harness(store=(store := MemoryStore()), num_chunks=40)
    serve(harness, "all of it", PROMPT)
    path = harness.device.walk(PROMPT, "")
    assert flush(harness)
    forget_device(harness)
    for node in path[depth:] if not has_other_copies else []:
        for is_there, drop in ((node.host_state, harness.host.drop_state), (node.host_block, harness.host.drop_block)):
            if is_there is not None:
                drop(node, EvictionReason.ROOM)
    damaged = path[depth - 1]
    assert damaged.disk_block is not None
    assert harness.engine.cache.restorer.set_aside(damaged, damaged.disk_block, OSError("damaged"))
    durable = flush(harness)
    assert damaged.disk_block is not None, "it was written again"
    assert durable is (has_other_copies or depth == len(path))
    harness.assert_idle_books()
    assert (found_by_a_restart(store) == 4 * GRID) is durable
