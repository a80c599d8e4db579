"""What namespaces may keep: quotas are kept with the records on disk, and what exceeds one is evicted.

A quota holds for its namespace and for all below it, over all tiers.
"""

from collections.abc import Callable

from daemon.cache_messages import QuotaRow
from tiers.index import Quota
from tiers.prefixes import Prefixes
from tiers.tree import Node, with_those_above

SHRINK_AGAIN_S = 1.0  # after which what exceeds a quota, and is held, is looked for again


class Quotas:
    """Owns the limits; what is used of them is in the tree's books."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        disk = prefixes.cache.disk
        self.limits = {quota.namespace: quota for quota in disk.store.quotas()} if disk is not None else {}
        self._shrunk_in_vain: dict[str, float] = {}  # when, of namespaces that exceed their quota by what is held
        self._unkept: dict[str, object] = {}  # by namespace, its last change that no store has yet

    def set(self, quota: Quota, unix_s: float, told: Callable[[bool], None]) -> None:
        """Puts a quota in force, then has it kept. `told`: of `TieredCache.remember`."""
        namespace = quota.namespace
        self.limits[namespace] = quota
        self._shrunk_in_vain.pop(namespace, None)
        self.keep(unix_s)
        change = self._unkept[namespace] = object()

        def kept(is_kept: bool) -> None:
            if is_kept and self._unkept.get(namespace) is change:
                del self._unkept[namespace]
            told(is_kept)

        self.prefixes.cache.remember(lambda store: store.set_quota(quota), kept)

    def remove(self, namespace: str, told: Callable[[bool], None]) -> bool:
        """Whether there was one; if not, nobody is told anything."""
        if self.limits.pop(namespace, None) is None:
            return False
        self._shrunk_in_vain.pop(namespace, None)
        self._unkept.pop(namespace, None)
        self.prefixes.cache.remember(lambda store: store.remove_quota(namespace), told)
        return True

    def keep(self, unix_s: float) -> None:
        """Evicts what exceeds a quota. To find that too much is held takes a look at the whole tree: not every step."""
        for namespace, quota in self.limits.items():
            limit = quota.cached_bytes
            if limit is None or self.prefixes.tree.charged[namespace] <= limit:
                continue
            tried = self._shrunk_in_vain.get(namespace)
            if tried is not None and 0 <= unix_s - tried < SHRINK_AGAIN_S:
                continue
            if self.prefixes.shrink(namespace, limit):
                self._shrunk_in_vain.pop(namespace, None)
            else:
                self._shrunk_in_vain[namespace] = unix_s

    def pin_refusal(self, node: Node) -> str | None:
        """Why a pin of this prefix would exceed a quota of its namespace, or of one above; None where it would not."""
        if node in self.prefixes.pins:
            return None
        fresh = self.prefixes.bytes_of([above for above in node.path() if not above.pins])
        for namespace in with_those_above(node.namespace):
            quota = self.limits.get(namespace)
            if quota is not None and quota.pinned_bytes is not None:
                wanted = self.prefixes.pinned_bytes(namespace) + max(fresh.host + fresh.disk, fresh.device)
                if wanted > quota.pinned_bytes:
                    return f"{wanted} bytes would be pinned"
        return None

    def row(self, namespace: str) -> QuotaRow:
        """A namespace's quota, and what it uses."""
        quota = self.limits.get(namespace, Quota(namespace, None, None))
        return QuotaRow(
            namespace,
            quota.cached_bytes,
            quota.pinned_bytes,
            self.prefixes.tree.charged[namespace],
            self.prefixes.pinned_bytes(namespace),
            durable=self.prefixes.cache.disk is not None and namespace not in self._unkept,
        )

    def rows(self) -> tuple[QuotaRow, ...]:
        """Of every namespace that has a quota, or keeps something."""
        return tuple(self.row(name) for name in sorted(set(self.limits) | set(self.prefixes.tree.charged)))
