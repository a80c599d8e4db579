"""What the idle proof must see: whatever somebody took and nobody will return."""

from pathlib import Path

from tests.engine.harness import GRID, Harness
from tests.engine.test_longctx import small
from tests.engine.test_tiers import prompt_of, serve
from tiers.resources import Resources


def test_a_copy_of_the_tree_that_an_unknown_owner_uses_is_astray() -> None:
    """It would never make room, and every chunk of it has an owner: the tree."""
    harness = Harness(num_chunks=40)
    serve(harness, "first", prompt := prompt_of(2 * GRID + 1))
    node = harness.device.walk(prompt, "")[0]
    assert node.host_block is not None
    assert not harness.engine.astray()
    lost = Resources("lost")
    harness.host.hold(lost, node.host_block)
    (finding,) = harness.engine.astray()
    assert "1 users, 0 known" in finding
    assert not harness.host.astray([lost])


def test_an_extent_that_is_held_once_more_than_its_owners_know_is_astray(tmp_path: Path) -> None:
    residency = small(0, tmp_path).engine.cache.residency
    assert residency is not None
    assert residency.spill is not None
    known, lost = Resources("known"), Resources("lost")
    extent = residency.spill.take(known)
    assert extent is not None
    assert not residency.spill.astray([known])
    residency.spill.hold(lost, extent)
    assert residency.spill.astray([known]) == ["spill extent 0: 2 owners, 1 known"]
    assert not residency.spill.astray([known, lost])
