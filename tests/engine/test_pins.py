"""A pin binds all that a prompt needs to resume, and can be taken back whatever became of it."""

from array import array

from daemon.cache_messages import PinPrefix, Selector
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of, serve

PROMPT = prompt_of(2 * GRID + 1, 1)
SELECTOR = Selector(prompt_ids=array("i", PROMPT).tobytes())


def test_a_pinned_state_stays_in_the_host_tier_while_the_disk_lacks_its_record() -> None:
    """Without the state a prompt of this model resumes nowhere, whatever blocks are kept."""
    harness = Harness(num_chunks=32, store=MemoryStore())
    serve(harness, "kept", PROMPT)
    harness.engine.handle(PinPrefix(1, "", SELECTOR))
    harness.run()
    (pinned,) = harness.engine.prefixes.pins
    assert pinned.host_state is not None
    assert pinned.disk_state is not None
    assert harness.engine.cache.restorer.set_aside(pinned, pinned.disk_state, OSError("damaged"))
    before = harness.host.stats.evicted_copies
    for seed in range(2, 12):
        serve(harness, f"other {seed}", prompt_of(4 * GRID + 1, seed))
    assert harness.host.stats.evicted_copies > before
    forget_device(harness)
    serve(harness, "hit", PROMPT)
    usage = harness.usage["hit"]
    assert usage.cached_host + usage.cached_disk == 2 * GRID
    harness.assert_idle_books()
