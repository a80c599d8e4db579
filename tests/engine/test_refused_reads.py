"""A disk that is left alone for a while says nothing against its records: nobody sets them aside for that."""

import pytest

from daemon.cache_messages import Refused, TierName, Verify, VerifyDone
from daemon.errors import ErrorReason
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of, serve
from tiers.records import Flaw, RecordFlaw, RecordHead

PROMPT = prompt_of(4 * GRID + 1)


def refusing(what: str, head: RecordHead) -> Exception | None:
    """Lets a try through, and refuses what is asked for beside it."""
    is_refused = what == "read" and head.depth > 1
    return RecordFlaw(Flaw.REFUSED, "the disk failed lately") if is_refused else None


@pytest.mark.parametrize("num_chunks", [0, 64])
def test_records_that_the_disk_was_not_asked_for_are_kept(num_chunks: int) -> None:
    """The gate closes, or lets one read through, between the plan of a restore and its last read."""
    store = MemoryStore()
    serve(Harness(store=store), "first", PROMPT)
    harness = Harness(store=store, num_chunks=num_chunks)
    before = set(store.records)
    store.fails = refusing
    serve(harness, "while it refuses", PROMPT[: GRID + 1])
    assert harness.usage["while it refuses"].cached_disk == 0
    forget_device(harness)
    assert before <= set(store.records)
    assert harness.disk.stats.verify_failures == 0
    store.fails = lambda what, head: None
    serve(harness, "loaded", PROMPT)
    assert harness.usage["loaded"].cached_disk + harness.usage["loaded"].cached_host == 4 * GRID
    assert harness.usage["loaded"].cached_disk
    harness.assert_idle_books()


def test_a_scrub_that_the_disk_refuses_deletes_nothing_and_does_not_call_it_sound() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    serve(harness, "first", PROMPT)
    before = set(store.records)
    store.fails = refusing
    harness.engine.handle(Verify(1, TierName.DISK))
    harness.run()
    assert not any(isinstance(answer, VerifyDone) for answer in harness.other)
    answer = harness.other[-1]
    assert isinstance(answer, Refused)
    assert answer.reason is ErrorReason.TIER_UNAVAILABLE
    assert set(store.records) == before
    harness.assert_idle_books()
