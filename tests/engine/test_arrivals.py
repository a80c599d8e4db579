"""A restore in several jobs: what has arrived is the tree's while the rest comes, and the books hold then too."""

import pytest

from tests.engine.harness import BLOCK, GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import cached, forget_device, prompt_of, serve
from tiers.keys import token_bytes
from tiers.resources import Resources


@pytest.fixture(autouse=True)
def a_block_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.restore.HOST_JOB_BYTES", 1)
    monkeypatch.setattr("tiers.restore.JOB_BYTES", 1)


def on_its_way(prompt: list[int]) -> Harness:
    """The prompt's prefix comes from the lower tiers, and nothing of it has come yet."""
    harness = Harness(num_chunks=200, store=MemoryStore())
    serve(harness, "first", prompt)
    forget_device(harness)
    harness.mover.is_stalled = True
    harness.submit("second", prompt, 4, ignore_eos=True)
    while not harness.mover.waiting:
        harness.step()
    return harness


def test_what_has_arrived_is_cached_while_the_rest_comes() -> None:
    prompt = prompt_of(3 * GRID + 1)
    harness = on_its_way(prompt)
    num_jobs = len(harness.mover.waiting)
    assert num_jobs == 3 * GRID // BLOCK + 1
    for arrived in range(1, num_jobs):
        harness.mover.run_next()
        harness.step()
        assert harness.device.tree.num_on_device == arrived
    harness.mover.is_stalled = False
    harness.run()
    assert cached(harness, "second") == (0, 3 * GRID, 0)
    harness.assert_idle_books()


def test_a_block_that_was_computed_meanwhile_stays_as_long_as_what_comes_after_it() -> None:
    prompt = prompt_of(2 * GRID + 1)
    harness = on_its_way(prompt)
    device, other = harness.device, Resources("other")
    (block,) = device.take_blocks(other, 1)
    node = device.publish(other, parent=None, namespace="", tokens=token_bytes(prompt[:BLOCK]), block_id=block)
    assert node is not None
    other.release()
    assert node.is_cached
    for _ in range(2):
        harness.mover.run_next()
        harness.mover.poll()
    assert device.tree.num_on_device == 2
    assert not node.is_cached, "it counts as room that nobody can have"
    device.check()
    device.drop_cache()
    assert node.block_id == block
    harness.mover.is_stalled = False
    harness.run()
    harness.assert_idle_books()
