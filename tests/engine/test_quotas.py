"""A quota of cached bytes: kept as soon as it can be, and not looked for in vain with every step."""

import pytest

from daemon.cache_messages import ListQuotas, QuotaList, SetQuota
from daemon.engine.quotas import SHRINK_AGAIN_S
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_engine import prompt_of
from tiers.index import Quota
from tiers.meters import EvictionReason


def test_what_exceeds_a_quota_while_it_is_held_is_not_looked_for_with_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(num_blocks=128)
    prefixes, tree = harness.engine.prefixes, harness.device.tree
    limit = 4 * harness.device.layout.block_bytes
    harness.engine.handle(SetQuota(1, "a", cached_bytes=limit, pinned_bytes=None))
    harness.submit("old", prompt_of(GRID + 1, 1), 2, namespace="a")
    harness.run()
    tried: list[int] = []
    shrink = prefixes.shrink

    def counted(namespace: str, limit_bytes: int) -> bool:
        tried.append(tree.num_nodes)
        return shrink(namespace, limit_bytes)

    monkeypatch.setattr(prefixes, "shrink", counted)
    harness.submit("r", prompt_of(8 * GRID + 1), 60, namespace="a", ignore_eos=True)
    while "r" not in harness.usage:
        harness.step()
    assert tried, "the prompt exceeds the quota"
    assert tree.charged["a"] > limit
    tried.clear()
    harness.step(40)
    assert len(tried) <= 1
    harness.run()
    harness.now += SHRINK_AGAIN_S
    harness.engine.keep_time()
    assert tree.charged["a"] <= limit
    harness.assert_idle_books()


@pytest.mark.parametrize("kept_state", [None, GRID])
def test_blocks_whose_state_is_gone_count_against_a_quota_and_go_for_it(kept_state: int | None) -> None:
    harness = Harness(num_blocks=128)
    device = harness.device
    for length in (GRID + 1, 4 * GRID + 1):
        harness.submit(f"r{length}", prompt_of(length), 2, namespace="a")
        harness.run()
    for node in [node for node in device.tree.nodes("a") if node.checkpoint is not None]:
        if node.depth * device.layout.block_size != kept_state:
            device.drop_checkpoint(node, EvictionReason.ROOM)
    limit = device.layout.block_bytes
    assert device.tree.charged["a"] > limit
    harness.engine.handle(SetQuota(1, "a", cached_bytes=limit, pinned_bytes=None))
    assert device.tree.charged["a"] <= limit
    harness.assert_idle_books()


class Forgetful(MemoryStore):
    """Cannot keep quotas while it `fails_quotas`."""

    fails_quotas = False

    def set_quota(self, quota: Quota) -> None:
        if self.fails_quotas:
            raise OSError("read-only file system")
        super().set_quota(quota)


@pytest.mark.parametrize("fails", [False, True])
def test_a_quota_is_durable_when_the_disk_has_it_and_not_before(fails: bool) -> None:
    harness = Harness(store=(store := Forgetful()))

    def is_durable(query_id: int) -> bool:
        answer = harness.other[-1]
        assert isinstance(answer, QuotaList)
        assert answer.query_id == query_id
        (row,) = answer.rows
        assert row.durable <= ("a" in store.limits)
        return row.durable

    store.fails_quotas = fails
    harness.mover.is_stalled = True
    harness.engine.handle(SetQuota(1, "a", cached_bytes=1 << 20, pinned_bytes=None))
    harness.engine.handle(ListQuotas(2))
    assert not is_durable(2)
    harness.mover.is_stalled = False
    harness.run()
    assert is_durable(1) is not fails
    harness.engine.handle(ListQuotas(3))
    assert is_durable(3) is not fails
    harness.assert_idle_books()
