"""The cache as people see it: prefixes that a prompt can resume after, their pins and times to live, their eviction.

A prefix ends at a checkpoint; for a model without slots at a leaf, or where paths part. What it lists as its own are
the blocks past the prefix before it on its path. A pin keeps the records of a whole path in the lower tiers. What
has a time to live is forgotten after it, also by an engine that starts later.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiers.cache import TieredCache
from tiers.index import Pin, TimeToLive
from tiers.meters import EvictionReason
from tiers.tree import Node, with_those_above

EXPIRE_AGAIN_S = 1.0  # after which a prefix whose time is over, and that could not go, is tried again


@dataclass(frozen=True, slots=True)
class Bytes:
    """How much lies in each tier; what is in two counts in both."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)


@dataclass(frozen=True, slots=True)
class Eviction:
    """What is gone, and how many blocks of the path stay because something else needs them."""

    num_prefixes: int
    num_blocks: int
    num_checkpoints: int
    num_kept: int
    num_bytes: Bytes


class PinnedError(Exception):
    """The prefix, or one that continues it, is pinned."""


class Prefixes:
    """Owns pins and times to live; everything else is read from the tree."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.tree = cache.device.tree
        self.pins: dict[Node, float | None] = {}  # until when, seconds since the epoch
        self._pinned_paths: dict[Node, list[Node]] = {}
        cache.forgotten = self._forgotten
        self.times_to_live: dict[Node, float] = {}
        self._over: set[tuple[str, bytes]] = set()  # of prefixes that are gone: the disk has their times, and need not
        if cache.disk is not None:
            for pin in cache.disk.store.pins():
                node = self.by_key(pin.namespace, pin.key)
                if node is not None:
                    self._pin(node, pin.expires_at)
            for time in cache.disk.store.times_to_live():
                node = self.tree.find(time.key)
                if node is not None and node.namespace == time.namespace and time.expires_at is not None:
                    self.times_to_live[node] = time.expires_at

    @property
    def can_pin(self) -> bool:
        """There is a tier that pins bind: the device evicts what is pinned as well."""
        return self.cache.host is not None or self.cache.disk is not None

    def is_prefix(self, node: Node) -> bool:
        """A prompt can resume after it, and it is worth a line of its own; or a pin binds what is left of it."""
        layout = self.cache.device.layout
        if node.depth * layout.block_size % self.cache.device.grid:
            return False
        return node in self.pins or (node.has_state if layout.slots else len(node.children) != 1)

    def unwritten(self) -> list[Node]:
        """Prefixes that the lowest tier lacks, or lacks a part of."""
        return [n for n in self.tree.nodes() if self.is_prefix(n) and not self.cache.writedown.is_written(n)]

    def offer_unwritten(self) -> int:
        """Offers the lower tiers all that they lack. Returns: how many prefixes that is about."""
        lacking = self.unwritten()
        for node in lacking:
            self.cache.offer(node)
        return len(lacking)

    def all(self, namespace: str) -> Iterator[Node]:
        """The prefixes of a namespace."""
        return (node for node in self.tree.nodes() if node.namespace == namespace and self.is_prefix(node))

    def by_key(self, namespace: str, key: bytes) -> Node | None:
        """The prefix that ends at the block of this key, also where a pin binds it and its state is gone."""
        node = self.tree.find(key)
        if node is None or node.namespace != namespace or not (node in self.pins or self.can_resume(node)):
            return None
        return node

    def by_prompt(self, namespace: str, token_ids: Sequence[int]) -> Node | None:
        """The deepest prefix of a prompt, wherever its bytes are; the same of pins."""
        path = self.cache.device.walk(token_ids, namespace)
        return next((node for node in reversed(path) if node in self.pins or self.can_resume(node)), None)

    def chain(self, node: Node) -> list[Node]:
        """The prefix's own blocks: up to the next shorter prefix, or to where paths part; deepest first."""
        chain = [node]
        above = node.parent
        while above is not None and above.parent is not None and len(above.children) == 1 and not self.is_prefix(above):
            chain.append(above)
            above = above.parent
        return chain

    def parent(self, node: Node) -> Node | None:
        """The next shorter prefix on the path."""
        above = node.parent
        while above is not None and above.parent is not None:
            if self.is_prefix(above):
                return above
            above = above.parent
        return None

    def bytes_of(self, nodes: Sequence[Node]) -> Bytes:
        """Blocks and checkpoints of these nodes, by tier."""
        return sum((self._bytes(node) for node in nodes), Bytes())

    def pin(self, node: Node, until_s: float | None, told: Callable[[bool], None] | None = None) -> None:
        """Keeps a whole path in the lower tiers; a second pin replaces the first one's time. `told`: of `remember`."""
        self._pin(node, until_s)
        self.times_to_live.pop(node, None)
        pin = Pin(node.namespace, node.key, None if until_s is None else int(until_s))
        self.cache.remember(lambda store: store.set_pin(pin), told)

    def keep_until(self, node: Node, until_s: float | None, told: Callable[[bool], None] | None = None) -> None:
        """Has a prefix forgotten then, and not before its pin ends; None: by no time. `told`: of `remember`."""
        had_time = self.times_to_live.pop(node, None) is not None or (node.namespace, node.key) in self._over
        if until_s is not None:
            self.times_to_live[node] = until_s
        elif not had_time:
            if told is not None:
                told(True)
            return
        self._over.discard((node.namespace, node.key))
        time = TimeToLive(node.namespace, node.key, None if until_s is None else math.ceil(until_s))
        self.cache.remember(lambda store: store.set_times_to_live([time]), told)

    def unpin(self, node: Node, told: Callable[[bool], None] | None = None) -> None:
        """Takes the pin back, if there is one; on disk one that damaged records took along, too: it would come back."""
        if node in self.pins:
            self._release(node)
        namespace, key = node.namespace, node.key
        self.cache.remember(lambda store: store.remove_pin(namespace, key), told)

    def pinned_bytes(self, namespace: str) -> int:
        """What pins of this namespace and those below it keep in the lower tiers."""
        mine = [node for node in self.pins if namespace in with_those_above(node.namespace)]
        nodes = {above for node in mine for above in node.path()}
        kept = self.bytes_of(list(nodes))
        return kept.host + kept.disk

    def astray(self) -> list[str]:
        """Nodes with more or fewer pins than there are pinned prefixes through them."""
        expected = Counter(above for path in self._pinned_paths.values() for above in path)
        return [
            f"pin of block {node.key.hex()[:16]}: {node.pins} taken, {expected[node]} known"
            for node in self.tree.nodes()
            if node.pins != expected[node]
        ]

    def expire(self, unix_s: float) -> None:
        """Ends pins and forgets prefixes whose time is over."""
        for node in [node for node, until_s in self.pins.items() if until_s is not None and until_s <= unix_s]:
            self.unpin(node)
        for node in [node for node, until_s in self.times_to_live.items() if until_s <= unix_s]:
            is_there = node in self.times_to_live  # else it went with one that it continues
            if is_there and not self._is_pinned_below(node):
                self.evict(node, EvictionReason.EXPIRED)
            if node in self.times_to_live:  # something holds it, or pins what continues it
                self.times_to_live[node] = unix_s + EXPIRE_AGAIN_S
        self._clear_over()

    def evict(self, node: Node, reason: EvictionReason = EvictionReason.ASKED) -> Eviction:
        """Forgets a prefix in every tier, with all that continues it.

        Raises:
            PinnedError: it, or one that continues it, is pinned.
        """
        if self._is_pinned_below(node):
            raise PinnedError
        below = self._below(node)
        gone = below + self.chain(node)[1:]
        num_prefixes = sum(self.is_prefix(each) for each in below)
        num_checkpoints = sum(each.has_state for each in below)
        before = self.bytes_of(gone)
        path = node.path()
        for each in gone:
            self._drop(each, reason)
        kept = [each for each in dict.fromkeys(below + path) if each.has_block]
        return Eviction(
            num_prefixes,
            sum(not each.has_block for each in gone),
            num_checkpoints - sum(each.has_state for each in below),
            len(kept),
            _less(before, self.bytes_of([each for each in gone if each.has_block or each.has_state])),
        )

    def shrink(self, namespace: str, limit_bytes: int) -> bool:
        """Evicts what ends paths of a namespace and those below, least recently used first; False where too much stays.

        Blocks behind the last state of a path are charged too, and end it although nobody can resume after them.
        """
        while self.tree.charged[namespace] > limit_bytes:
            leaves = (node for node in self.tree.nodes() if not node.children)
            mine = (node for node in leaves if namespace in with_those_above(node.namespace))
            ends = sorted(mine, key=lambda node: node.used_s)
            progress = False
            for node in ends:
                if self.tree.charged[namespace] <= limit_bytes:
                    return True
                if node.parent is not None and not node.pins:
                    progress |= self.evict(node, EvictionReason.QUOTA).num_blocks > 0
            if not progress:
                return False
        return True

    def _pin(self, node: Node, until_s: float | None) -> None:
        if node not in self.pins:
            self._pinned_paths[node] = node.path()
            for above in self._pinned_paths[node]:
                self.tree.pin(above)
                self.cache.settle(above)
        self.pins[node] = until_s

    def _release(self, node: Node) -> None:
        del self.pins[node]
        for above in self._pinned_paths.pop(node):
            if above.parent is not None:
                self.tree.unpin(above)
                self.cache.settle(above)

    def _forgotten(self, nodes: list[Node]) -> None:
        """Nodes are out of the tree, evicted or damaged: nothing is left that a pin could keep, or a time could end."""
        for node in nodes:
            if self.times_to_live.pop(node, None) is not None and self.cache.disk is not None:
                self._over.add((node.namespace, node.key))
            if node in self.pins:
                self._release(node)

    def _clear_over(self) -> None:
        """The disk forgets times to live of prefixes that are gone: after their records, which a restart would find."""
        disk = self.cache.disk
        if self._over and disk is not None and not disk.garbage:
            times = [TimeToLive(namespace, key, None) for namespace, key in self._over]
            self._over.clear()
            self.cache.remember(lambda store: store.set_times_to_live(times))

    def can_resume(self, node: Node) -> bool:
        """A prompt can: it ends where a grid chunk does, and its state is in some tier."""
        layout = self.cache.device.layout
        return node.depth * layout.block_size % self.cache.device.grid == 0 and (node.has_state or not layout.slots)

    def _is_pinned_below(self, node: Node) -> bool:
        return any(each in self.pins for each in self._below(node))

    def _below(self, node: Node) -> list[Node]:
        """The node and everything that continues it, children before parents."""
        found: list[Node] = []
        stack = [node]
        while stack:
            each = stack.pop()
            found.append(each)
            stack.extend(each.children.values())
        return found[::-1]

    def _drop(self, node: Node, reason: EvictionReason) -> None:
        """Whatever nothing holds of a node; it leaves the tree when it has no bytes and nothing hangs below it."""
        cache = self.cache
        if node.children:
            return  # something below it is in use, and needs it
        if node.is_evictable:
            cache.device.drop_block(node, reason)
        if node.block_id is None and cache.host is not None:
            if node.host_block is not None and not node.host_block.is_busy:
                cache.host.drop_block(node, reason)
            if node.host_state is not None and not node.host_state.is_busy:
                cache.host.drop_state(node, reason)
        if node.block_id is None and cache.disk is not None:
            if node.disk_block is not None:
                cache.disk.drop_block(node, reason)
            if node.disk_state is not None:
                cache.disk.drop_state(node, reason)
        if node.parent is not None and not node.has_block and not node.children:
            cache.forget(self.tree.prune(node))

    def _bytes(self, node: Node) -> Bytes:
        layout, host = self.cache.device.layout, self.cache.host
        chunk_bytes = host.chunk_bytes if host is not None else 0
        copies = [copy for copy in (node.host_block, node.host_state) if copy is not None]
        records = [ref for ref in (node.disk_block, node.disk_state) if ref is not None]
        return Bytes(
            layout.block_bytes * (node.block_id is not None) + layout.slot_bytes * (node.checkpoint is not None),
            sum(len(copy.chunks) for copy in copies) * chunk_bytes,
            sum(ref.stored_bytes for ref in records),
        )


def _less(more: Bytes, less: Bytes) -> Bytes:
    return Bytes(more.device - less.device, more.host - less.host, more.disk - less.disk)
