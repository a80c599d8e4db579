"""Writes that meet a disk which recovers, fails, or has the same keys already: the tree's records are those it has."""

import pytest

from daemon.cache_messages import Flush, Flushed, TierName
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of, serve
from tiers.meters import EvictionReason
from tiers.mover import Priority
from tiers.tree import Node


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


def assert_all_of_it_is_on_disk(store: MemoryStore) -> None:
    """For the next engine too, which asks the store alone."""
    restarted = Harness(store=store)
    serve(restarted, "from disk", PROMPT)
    assert restarted.usage["from disk"].cached_disk == 4 * GRID
    restarted.run()
    restarted.assert_idle_books()


def test_a_copy_that_another_writes_is_waited_for_and_not_written_beside_it() -> None:
    """The store would keep the later record, the tree the earlier. Nobody is told meanwhile that all is written."""
    harness = Harness(store=(store := MemoryStore()))
    writedown = harness.engine.cache.writedown
    store.takes_writes = False
    serve(harness, "all of it", PROMPT)
    store.takes_writes = True
    path = harness.device.walk(PROMPT, "")
    others = {(path[1].key, False): Node(path[1].key, path[1].tokens, None, 2, "")}
    assert writedown.begin(others)
    assert not writedown.begin(others)
    harness.engine.cache.offer(path[-1])
    harness.step(5)
    assert [node.disk_block is not None for node in path] == [True] + [False] * (len(path) - 1)
    assert not writedown.is_idle
    writedown.end(others)
    harness.run()
    harness.assert_idle_books()
    assert_all_of_it_is_on_disk(store)


def test_a_path_that_leaves_the_tree_while_it_is_written_and_comes_again_is_written_again() -> None:
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
    assert any(job.priority is Priority.WRITE_DOWN for job in harness.mover.waiting)
    assert path[0].disk_block is not None
    assert harness.engine.cache.restorer.set_aside(path[0], path[0].disk_block, OSError("damaged"))
    assert path[-1].parent is None, "nothing of it is in the tree any more"
    harness.submit("computed again", PROMPT, 1, ignore_eos=True)
    while ("computed again", 0) not in harness.finished:
        harness.step()
    harness.mover.is_stalled = False
    harness.run()
    harness.assert_idle_books()
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
