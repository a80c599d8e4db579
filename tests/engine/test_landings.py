"""What a landing finds out about records holds, whether or not somebody still waits for it."""

from pathlib import Path

from daemon.messages import Abort
from tests.engine.harness import Harness
from tests.engine.test_longctx import LONG, prompt_of, small, written_store
from tiers.tree import Node

PROMPT = prompt_of(LONG + 3, 5)


def begin_to_land(harness: Harness) -> list[Node]:
    """The prompt's path, of which nothing has been read yet."""
    harness.mover.is_stalled = True
    harness.submit("r", PROMPT, 4, ignore_eos=True)
    lander = harness.engine.cache.lander
    assert lander is not None
    while not lander.in_flight:
        harness.step()
    return harness.device.walk(PROMPT, "")


def test_a_record_that_failed_a_landing_is_set_aside_although_its_sequence_has_gone(tmp_path: Path) -> None:
    """The store deletes it soon: what the tree went on calling a record would be none."""
    harness = small(0, tmp_path, store=(store := written_store(PROMPT)))
    path = begin_to_land(harness)
    store.fails = lambda what, head: OSError("damaged") if what == "read" and head.key == path[0].key else None
    harness.mover.run_next()
    harness.step()
    harness.engine.handle(Abort("r"))
    store.fails = lambda what, head: None
    harness.mover.is_stalled = False
    harness.run()
    assert harness.disk.stats.verify_failures == 1
    assert path[0].disk_block is None
    harness.assert_idle_books()
