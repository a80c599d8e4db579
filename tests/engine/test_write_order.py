"""Writes of one path that overlap: whatever the disk finishes first, the tree's records are those that it has."""

import pytest

from daemon.cache_messages import Flush, Flushed, TierName
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of, serve
from tiers.meters import EvictionReason
from tiers.mover import Job, Priority


class Recovering(MemoryStore):
    """Takes writes again after it has been asked so many more times."""

    num_refusals = 0

    @property
    def takes_writes(self) -> bool:
        self.num_refusals -= 1
        return self.num_refusals < 0

    @takes_writes.setter
    def takes_writes(self, takes: bool) -> None: ...


PROMPT = prompt_of(4 * GRID + 1)


def writes(harness: Harness) -> list[Job]:
    """On their way to the disk, oldest first."""
    return [job for job in harness.mover.waiting if job.priority is Priority.WRITE_DOWN]


def finish_in_order(harness: Harness, jobs: list[Job]) -> None:
    """What waits is done at last, these of it behind all else and one after the other."""
    harness.mover.waiting = [job for job in harness.mover.waiting if job not in jobs] + jobs
    harness.mover.is_stalled = False
    harness.run()
    harness.assert_idle_books()


def assert_all_of_it_is_on_disk(store: MemoryStore) -> None:
    """For the next engine too, which asks the store alone."""
    restarted = Harness(store=store)
    serve(restarted, "from disk", PROMPT)
    assert restarted.usage["from disk"].cached_disk == 4 * GRID
    restarted.run()
    restarted.assert_idle_books()


def test_a_key_on_its_way_is_not_written_beside_it() -> None:
    """A path left the tree while a part of it was written, and was computed again: of two writes at once the later
    would replace the record of the earlier, which may be the one that the tree knows."""
    store = MemoryStore()
    harness = Harness(store=store, num_chunks=40)
    serve(harness, "beginning", PROMPT[: GRID + 1])
    store.takes_writes = False
    serve(harness, "all of it", PROMPT)
    forget_device(harness)
    path = harness.device.walk(PROMPT, "")
    for node in path[:2]:
        harness.host.drop_block(node, EvictionReason.ROOM)
    store.takes_writes = harness.mover.is_stalled = True
    harness.engine.cache.offer(path[-1])
    harness.step()
    (old,) = writes(harness)
    assert path[0].disk_block is not None
    assert harness.engine.cache.restorer.set_aside(path[0], path[0].disk_block, "damaged")
    assert path[-1].parent is None, "nothing of it is in the tree any more"
    harness.submit("computed again", PROMPT, 1, ignore_eos=True)
    while ("computed again", 0) not in harness.finished:
        harness.step()
    finish_in_order(harness, [old])
    assert_all_of_it_is_on_disk(store)


def test_a_record_that_is_committed_before_the_one_above_it_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be garbage at the next start: what hangs below a record is looked for behind it."""
    harness = Harness(store=(store := MemoryStore()))
    monkeypatch.setattr("tiers.writedown.BATCH_BYTES", 2 * harness.device.layout.block_bytes)
    harness.mover.is_stalled = True
    harness.submit("all of it", PROMPT, 1, ignore_eos=True)
    while ("all of it", 0) not in harness.finished:
        harness.step()
    jobs = writes(harness)
    assert len(jobs) > 2
    finish_in_order(harness, jobs[::-1])
    assert_all_of_it_is_on_disk(store)


@pytest.mark.parametrize("num_refusals", range(12))
def test_a_disk_that_recovers_while_a_write_is_planned_is_not_given_what_it_has(num_refusals: int) -> None:
    """What the host tier lacks and the disk has was taken for what both lack; the new record replaced the old one."""
    harness = Harness(store=(store := Recovering()), num_chunks=40)
    serve(harness, "all of it", PROMPT)
    path = harness.device.walk(PROMPT, "")
    assert all(node.disk_block is not None and node.block_id is not None for node in path)
    for node in path:
        harness.host.drop_block(node, EvictionReason.ROOM)
    before = set(store.records)
    harness.engine.cache.offer(path[-1])
    store.num_refusals = num_refusals
    harness.run()
    assert set(store.records) == before
    harness.assert_idle_books()
    assert_all_of_it_is_on_disk(store)


def test_a_flush_is_durable_where_the_disk_has_every_prefix_and_not_where_a_write_failed() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    store.takes_writes = False
    serve(harness, "first", PROMPT)
    store.takes_writes = True
    for query_id, fails in enumerate((True, False)):
        error = OSError("no space left") if fails else None
        store.fails = lambda what, head, error=error: error if what == "write" else None
        harness.engine.handle(Flush(query_id, TierName.DISK))
        harness.run()
        answer = harness.other[-1]
        assert isinstance(answer, Flushed)
        assert (answer.query_id, answer.durable, bool(answer.records)) == (query_id, not fails, not fails)
    assert_all_of_it_is_on_disk(store)
