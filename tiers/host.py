"""The host tier's books: which chunks of the arena hold which images, and which of them may go.

The arena is cut into chunks of one block image each; a state's image takes as many as it needs, wherever they are. A
copy may go when nothing uses or pins it and the prefix stays whole without it: its block is elsewhere too, or nothing
hangs below it here. Bytes are moved by tiers/transfer.py, ids are all that is known here.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from tiers.copies import HostCopy
from tiers.device import DeviceTier
from tiers.eviction import EvictionOrder
from tiers.id_pool import IdPool
from tiers.meters import EvictionReason, TierMeters
from tiers.resources import Resources
from tiers.tree import Node
from tiers.worth import HOST


@dataclass(slots=True)
class HostStats:
    """Counters since start-up."""

    hit_tokens: int = 0
    evicted_copies: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    write_s: float = 0.0


class HostTier:
    """Owns the chunks. Every copy is reached from a node, or from the resources of a swapped-out sequence."""

    def __init__(self, device: DeviceTier, *, num_chunks: int, chunk_bytes: int) -> None:
        self.tree = device.tree
        self.chunk_bytes = chunk_bytes
        self.chunks = IdPool(num_chunks)
        self.stats = HostStats()
        self.meters = TierMeters()
        self.appraiser = device.appraiser
        self.order = EvictionOrder[Node](device.weights)  # stops, as tiers/eviction.py calls them
        self.forget: Callable[[list[Node]], None] = _has_no_other_tier
        self._copies: dict[HostCopy, tuple[Node, bool]] = {}  # bool: of the checkpoint

    @property
    def num_cached_chunks(self) -> int:
        """Chunks of the tree's copies."""
        return sum(len(copy.chunks) for copy in self._copies)

    @property
    def num_pinned_chunks(self) -> int:
        """Of those, the ones that pins bind here."""
        return sum(len(copy.chunks) for copy, (node, _) in self._copies.items() if node.pins)

    def chunks_for(self, num_bytes: int) -> int:
        return -(-num_bytes // self.chunk_bytes)

    def take(self, num_chunks: int) -> tuple[int, ...] | None:
        """Free chunks, evicting the least recently used copies as needed; None where that does not make room."""
        while self.chunks.num_free < num_chunks:
            if not self._evict_one():
                return None
        return tuple(self.chunks.take(num_chunks))

    def take_for(self, resources: Resources, num_chunks: int) -> tuple[int, ...] | None:
        """Chunks that belong to one owner, not to the tree."""
        chunks = self.take(num_chunks)
        if chunks is not None:
            resources.hold("host chunks", chunks, lambda: self._free(chunks))
        return chunks

    def size_of(self, chunks: Hashable) -> int:
        """How many chunks an owner's resources name by this id."""
        return len(self._chunks(chunks))

    def set_block(self, node: Node, chunks: tuple[int, ...]) -> None:
        """The tree has the node's block here from now on; whoever took the chunks has given them to it."""
        self.keep_block(node, HostCopy(chunks))

    def keep_block(self, node: Node, copy: HostCopy) -> None:
        """The same of a copy that somebody may be using."""
        assert node.host_block is None
        assert node.parent is not None
        node.host_block, chunks = copy, copy.chunks
        node.host_since_s = self.tree.time_s
        node.parent.host_children += 1
        self._copies[node.host_block] = (node, False)
        self.settle(node)
        self.settle(node.parent)
        self.tree.charge(node, len(chunks) * self.chunk_bytes)
        self.tree.tell(node, "host", came=True)

    def set_state(self, node: Node, chunks: tuple[int, ...]) -> None:
        """The same for the node's checkpoint."""
        self.keep_state(node, HostCopy(chunks))

    def keep_state(self, node: Node, copy: HostCopy) -> None:
        """The same of a copy that somebody may be using."""
        assert node.host_state is None
        node.host_state, chunks = copy, copy.chunks
        self._copies[node.host_state] = (node, True)
        self.settle(node)
        self.tree.charge(node, len(chunks) * self.chunk_bytes)

    def give(self, resources: Resources, node: Node, chunks: tuple[int, ...], *, is_state: bool) -> None:
        """Chunks that `resources` took become the node's copy."""
        for chunk in chunks:
            self.chunks.share(chunk)
        resources.drop("host chunks", chunks)
        if is_state:
            self.set_state(node, chunks)
        else:
            self.set_block(node, chunks)

    def hold(self, resources: Resources, copy: HostCopy) -> None:
        """Keeps a copy where it is for one more user."""
        copy.users += 1
        if copy in self._copies:
            self.settle(self._copies[copy][0])
        resources.hold("host copy", copy.chunks, lambda: self._unhold(copy))

    def drop_block(self, node: Node, reason: EvictionReason) -> None:
        """Forgets the node's block here. The caller looks after what hangs below."""
        copy = node.host_block
        assert copy is not None
        node.host_block = None
        if node.parent is not None:  # else it is out of the tree already
            node.parent.host_children -= 1
            self.settle(node.parent)
        self.settle(node)
        self._forget(node, copy)
        self.meters.block_left(reason, node.host_since_s, self.tree.time_s)
        self.tree.tell(node, "host", came=False)

    def drop_state(self, node: Node, reason: EvictionReason) -> None:
        """Forgets the node's checkpoint here."""
        copy = node.host_state
        assert copy is not None
        node.host_state = None
        self.settle(node)
        self._forget(node, copy)
        self.meters.checkpoint_left(reason)

    def private_chunks(self, owners: Sequence[Resources]) -> list[tuple[int, str]]:
        """Chunks that owners hold as copies which are not the tree's, each with an owner's name."""
        cached = {chunk for copy in self._copies for chunk in copy.chunks}
        held = [(chunk, r.owner) for r in owners for id_ in r.ids("host copy") for chunk in self._chunks(id_)]
        return [(chunk, owner) for chunk, owner in held if chunk not in cached]

    def astray(self, owners: Sequence[Resources]) -> list[str]:
        """Chunks that are held, but by no copy of the tree and by none of the owners; and copies of the tree that more
        or fewer use than the owners know of: they would never make room, or too soon."""
        users = Counter(self._chunks(chunks) for resources in owners for chunks in resources.ids("host copy"))
        known = {chunk for copy in self._copies for chunk in copy.chunks} | {chunk for held in users for chunk in held}
        for resources in owners:
            for chunks in resources.ids("host chunks"):
                known.update(self._chunks(chunks))
        held = (chunk for chunk in range(self.chunks.size) if self.chunks.refs(chunk))
        return [f"host chunk {chunk} has no owner" for chunk in held if chunk not in known] + [
            f"host chunk {copy.chunks[0]}: its copy has {copy.users} users, {users[copy.chunks]} known"
            for copy in self._copies
            if copy.users != users[copy.chunks]
        ]

    def check(self) -> None:
        """Raises AssertionError where the arena's chunks do not add up."""
        self.chunks.check()
        seen: set[int] = set()
        for node in self.tree.nodes():
            for copy, is_state in ((node.host_block, False), (node.host_state, True)):
                if copy is not None:
                    assert self._copies[copy] == (node, is_state), "a copy with another owner"
                    assert not seen.intersection(copy.chunks), "two copies share a chunk"
                    seen.update(copy.chunks)
            assert (node in self.order) is self._may_go(node)
        assert sum(len(copy.chunks) for copy in self._copies) == len(seen), "a copy that no node has"
        assert all(self.chunks.refs(chunk) > 0 for chunk in seen)

    def settle(self, node: Node) -> None:
        """Offers a stop for eviction, or takes it back, as it is now."""
        if node.parent is not None and self._may_go(node):
            self.order.offer(node, self.appraiser.stop(node, HOST))
        else:
            self.order.discard(node)

    def _evict_one(self) -> bool:
        """The least worthwhile checkpoint, and at a leaf the blocks that only it needs, of one grid chunk."""
        node = self.order.pop(self.tree.time_s)
        if node is None:
            return False
        if node.host_state is not None:
            self.drop_state(node, EvictionReason.ROOM)
            self.stats.evicted_copies += 1
        for _ in range(self.appraiser.chunk_blocks):
            above = node.parent
            if above is None or node.host_block is None or not self._may_go(node) or node.host_state is not None:
                break
            self.drop_block(node, EvictionReason.ROOM)
            self.stats.evicted_copies += 1
            if not node.has_block:
                self.forget(self.tree.prune(node))
            node = above
        return True

    def _may_go(self, node: Node) -> bool:
        """A leaf here, or a checkpoint, that nothing uses, and that no pin binds here for want of a record on disk."""
        is_bound = node.disk_block is None or (node.host_state is not None and node.disk_state is None)
        if node.pins and is_bound:
            return False
        if any(copy is not None and copy.is_busy for copy in (node.host_block, node.host_state)):
            return False
        return node.host_state is not None or (node.host_block is not None and node.host_children == 0)

    def _forget(self, node: Node, copy: HostCopy) -> None:
        self.tree.charge(node, -len(copy.chunks) * self.chunk_bytes)
        del self._copies[copy]
        if not copy.is_busy:
            self._free(copy.chunks)

    def _unhold(self, copy: HostCopy) -> None:
        copy.users -= 1
        if not copy.is_busy and copy in self._copies:
            self.settle(self._copies[copy][0])
        if not copy.is_busy and copy not in self._copies:  # forgotten by the tree while in use
            self._free(copy.chunks)

    def _chunks(self, id_: Hashable) -> tuple[int, ...]:
        assert isinstance(id_, tuple)
        return cast("tuple[int, ...]", id_)

    def _free(self, chunks: tuple[int, ...]) -> None:
        for chunk in chunks:
            self.chunks.release(chunk)


def _has_no_other_tier(nodes: list[Node]) -> None:
    assert not any(node.has_block or node.has_state for node in nodes), "nobody looks after other tiers"
