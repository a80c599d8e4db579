"""The host tier's books: which chunks of the arena hold which images, and which of them may go.

The arena is cut into chunks of one block image each; a state's image takes as many as it needs, wherever they are. A
copy may go when nothing uses or pins it and the prefix stays whole without it: its block is elsewhere too, or nothing
hangs below it here. Bytes are moved by tiers/transfer.py, ids are all that is known here.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast

from tiers.copies import HostCopy
from tiers.id_pool import IdPool
from tiers.resources import Resources
from tiers.tree import Node, PrefixTree


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

    def __init__(self, tree: PrefixTree, *, num_chunks: int, chunk_bytes: int) -> None:
        self.tree = tree
        self.chunk_bytes = chunk_bytes
        self.chunks = IdPool(num_chunks)
        self.stats = HostStats()
        self._by_use: OrderedDict[HostCopy, tuple[Node, bool]] = OrderedDict()  # oldest use first; bool: of the state

    @property
    def num_cached_chunks(self) -> int:
        """Chunks of the tree's copies."""
        return sum(len(copy.chunks) for copy in self._by_use)

    @property
    def num_pinned_chunks(self) -> int:
        """Of those, the ones that pins bind here."""
        return sum(len(copy.chunks) for copy, (node, _) in self._by_use.items() if node.pins)

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
        assert isinstance(chunks, tuple)
        return len(cast("tuple[int, ...]", chunks))

    def set_block(self, node: Node, chunks: tuple[int, ...]) -> None:
        """The tree has the node's block here from now on; whoever took the chunks has given them to it."""
        assert node.host_block is None
        assert node.parent is not None
        node.host_block = HostCopy(chunks)
        node.parent.host_children += 1
        self._by_use[node.host_block] = (node, False)
        self.tree.charge(node, len(chunks) * self.chunk_bytes)

    def set_state(self, node: Node, chunks: tuple[int, ...]) -> None:
        """The same for the node's checkpoint."""
        assert node.host_state is None
        node.host_state = HostCopy(chunks)
        self._by_use[node.host_state] = (node, True)
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
        resources.hold("host copy", copy.chunks, lambda: self._unhold(copy))

    def use(self, copy: HostCopy) -> None:
        """A hit read it."""
        if copy in self._by_use:
            self._by_use.move_to_end(copy)

    def drop_block(self, node: Node) -> None:
        """Forgets the node's block here. The caller looks after what hangs below."""
        copy = node.host_block
        assert copy is not None
        node.host_block = None
        if node.parent is not None:  # else it is out of the tree already
            node.parent.host_children -= 1
        self._forget(node, copy)

    def drop_state(self, node: Node) -> None:
        """Forgets the node's checkpoint here."""
        copy = node.host_state
        assert copy is not None
        node.host_state = None
        self._forget(node, copy)

    def check(self) -> None:
        """Raises AssertionError where the arena's chunks do not add up."""
        self.chunks.check()
        seen: set[int] = set()
        for node in self.tree.nodes():
            for copy, is_state in ((node.host_block, False), (node.host_state, True)):
                if copy is not None:
                    assert self._by_use[copy] == (node, is_state), "a copy with another owner"
                    assert not seen.intersection(copy.chunks), "two copies share a chunk"
                    seen.update(copy.chunks)
        assert sum(len(copy.chunks) for copy in self._by_use) == len(seen), "a copy that no node has"
        assert all(self.chunks.refs(chunk) > 0 for chunk in seen)

    def _evict_one(self) -> bool:
        for copy, (node, is_state) in self._by_use.items():
            if copy.is_busy or not self._may_go(node, is_state=is_state):
                continue
            if is_state:
                self.drop_state(node)
            else:
                self.drop_block(node)
                if not node.has_block:
                    self.tree.prune(node)
            self.stats.evicted_copies += 1
            return True
        return False

    def _may_go(self, node: Node, *, is_state: bool) -> bool:
        if is_state:
            return node.pins == 0 or node.disk_state is not None
        if node.disk_block is not None:
            return True
        if node.pins:
            return False
        return node.block_id is not None or (not node.children and not node.has_state)

    def _forget(self, node: Node, copy: HostCopy) -> None:
        self.tree.charge(node, -len(copy.chunks) * self.chunk_bytes)
        del self._by_use[copy]
        if not copy.is_busy:
            self._free(copy.chunks)

    def _unhold(self, copy: HostCopy) -> None:
        copy.users -= 1
        if not copy.is_busy and copy not in self._by_use:  # forgotten by the tree while in use
            self._free(copy.chunks)

    def _free(self, chunks: tuple[int, ...]) -> None:
        for chunk in chunks:
            self.chunks.release(chunk)
