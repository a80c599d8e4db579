"""Block keys as a tree: which prefixes are known, where their bytes are, and which may be forgotten first.

A node is one canonical block of the device tier and, where the model has slots, possibly the checkpoint of the state
after it. The tree owns the nodes; a node's block and checkpoint ids belong to the pools of tiers/device.py. Time is a
counter that the tree moves itself: no clock, no torch.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from tiers.keys import block_key


@dataclass(slots=True, eq=False)
class Node:
    """One block under its parent; `depth` counts from the root, so the block covers positions up to depth * size."""

    key: bytes
    tokens: bytes  # as keys.token_bytes makes them: compared on every match
    parent: "Node | None"
    depth: int
    block_id: int | None  # None only in a root
    checkpoint: int | None = None  # slot id of the state after this block's last token
    children: dict[bytes, "Node"] = field(default_factory=dict["bytes", "Node"])
    holders: int = 0  # sequences whose block table runs through this node
    pins: int = 0
    last_use: int = 0

    @property
    def is_cached(self) -> bool:
        """Nothing holds it: neither a sequence nor a pin."""
        return self.holders == 0 and self.pins == 0

    @property
    def is_evictable(self) -> bool:
        """Nothing holds it and nothing hangs below it."""
        return self.is_cached and not self.children and self.block_id is not None


class PrefixTree:
    """A forest: one root for every root key, made for its first block and dropped with its last.

    Who holds or pins a node holds or pins all nodes above it, so whatever is cached can be evicted from the leaves up.
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        self._by_use: list[tuple[int, int, Node]] = []  # heap of (last_use, serial, node); entries may be stale
        self._serial = 0
        self.num_nodes = 0  # roots not counted
        self.num_cached = 0  # nodes that nothing holds
        self.num_pinned = 0
        self.num_checkpoints = 0

    def root(self, key: bytes) -> Node:
        """The node above a namespace's first blocks; one that is not known yet is kept only by `insert`."""
        return self._roots.get(key) or Node(key=key, tokens=b"", parent=None, depth=0, block_id=None)

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child that holds exactly these tokens, or None. A key that matches with other tokens is no match."""
        node = parent.children.get(block_key(parent.key, tokens))
        return node if node is not None and node.tokens == tokens else None

    def walk(self, root: Node, blocks: Iterator[bytes]) -> list[Node]:
        """The longest known path below `root` along these blocks' tokens."""
        path: list[Node] = []
        node = root
        for tokens in blocks:
            found = self.child(node, tokens)
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def insert(self, parent: Node, tokens: bytes, block_id: int) -> Node | None:
        """A new node, held by its maker; None where a node with another block's tokens owns the same key."""
        key = block_key(parent.key, tokens)
        if key in parent.children:
            return None
        node = Node(key=key, tokens=tokens, parent=parent, depth=parent.depth + 1, block_id=block_id, holders=1)
        parent.children[key] = node
        if parent.block_id is None:
            assert self._roots.setdefault(parent.key, parent) is parent, "two roots with one key"
        self.num_nodes += 1
        self._touch(node)
        return node

    def hold(self, node: Node) -> None:
        """One more sequence runs through the node."""
        self.num_cached -= node.is_cached
        node.holders += 1
        self._touch(node)

    def unhold(self, node: Node) -> None:
        """One sequence less."""
        assert node.holders > 0
        node.holders -= 1
        self.num_cached += node.is_cached
        self._offer(node)

    def pin(self, node: Node) -> None:
        """Keeps a node from eviction until unpinned."""
        self.num_cached -= node.is_cached
        node.pins += 1
        self.num_pinned += node.pins == 1

    def unpin(self, node: Node) -> None:
        assert node.pins > 0
        node.pins -= 1
        self.num_pinned -= node.pins == 0
        self.num_cached += node.is_cached
        self._offer(node)

    def use(self, node: Node) -> None:
        """A hit resumed at this node: it alone becomes recent."""
        self._touch(node)

    def set_checkpoint(self, node: Node, slot_id: int) -> None:
        assert node.checkpoint is None
        node.checkpoint = slot_id
        self.num_checkpoints += 1

    def clear_checkpoint(self, node: Node) -> int:
        """Forgets a node's checkpoint and returns its slot id."""
        slot_id = node.checkpoint
        assert slot_id is not None
        node.checkpoint = None
        self.num_checkpoints -= 1
        return slot_id

    def pop_oldest(self) -> Node | None:
        """Takes the least recently used evictable node out of the tree; None where there is none."""
        while self._by_use:
            last_use, _, node = heapq.heappop(self._by_use)
            if node.last_use == last_use and node.is_evictable and self._is_linked(node):
                self._unlink(node)
                return node
        return None

    def oldest_checkpoint(self, keep: Node | None = None) -> Node | None:
        """The least recently used node with a checkpoint, pinned ones last, `keep` never."""
        nodes = (node for node in self.nodes() if node.checkpoint is not None and node is not keep)
        return min(nodes, key=lambda node: (node.pins > 0, node.last_use), default=None)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.block_id is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises AssertionError where links or counts are broken."""
        nodes = list(self.nodes())
        assert len(nodes) == self.num_nodes
        assert sum(node.is_cached for node in nodes) == self.num_cached
        assert sum(node.pins > 0 for node in nodes) == self.num_pinned
        assert sum(node.checkpoint is not None for node in nodes) == self.num_checkpoints
        assert len({node.block_id for node in nodes}) == len(nodes), "two nodes share a block"
        offered = {id(node) for last_use, _, node in self._by_use if node.last_use == last_use}
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.key] is node
            assert node.is_cached or node.parent.block_id is None or not node.parent.is_cached
            assert not node.is_evictable or id(node) in offered, "an evictable node would never be evicted"

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        if not node.is_evictable:
            return
        self._serial += 1
        heapq.heappush(self._by_use, (node.last_use, self._serial, node))
        if len(self._by_use) > 4 * self.num_nodes + 64:  # stale entries are dropped before they outgrow the tree
            self._by_use = [
                (node.last_use, serial, node) for serial, node in enumerate(self.nodes()) if node.is_evictable
            ]
            heapq.heapify(self._by_use)
            self._serial = self.num_nodes

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self.num_nodes -= 1
        self.num_cached -= 1
        if parent.block_id is None:
            if not parent.children:
                self._roots.pop(parent.key, None)
        else:
            self._offer(parent)

    def _is_linked(self, node: Node) -> bool:
        return node.parent is not None and node.parent.children.get(node.key) is node
