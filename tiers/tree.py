"""Block keys as a tree: which prefixes are known, in which tiers their bytes are, and which may be forgotten first.

A node is one canonical block and, where the model has slots, possibly the checkpoint of the state after it. Each of the
two may be on the device, in the host tier, on disk, in several of them, and the block in at least one. The tree owns
the nodes; ids, chunks and records belong to the tiers' own books. Time is passed in: no clock, no torch.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiers.copies import HostCopy
from tiers.keys import block_key
from tiers.records import RecordRef


@dataclass(slots=True, eq=False)
class Node:
    """One block under its parent; `depth` counts from the root, so the block covers positions up to depth * size."""

    key: bytes
    tokens: bytes  # as keys.token_bytes makes them: compared on every match
    parent: "Node | None"  # None only in a root
    depth: int
    namespace: str
    block_id: int | None = None  # on the device
    checkpoint: int | None = None  # device slot of the state after this block's last token
    host_block: HostCopy | None = None
    host_state: HostCopy | None = None
    disk_block: RecordRef | None = None
    disk_state: RecordRef | None = None
    children: dict[bytes, "Node"] = field(default_factory=dict["bytes", "Node"])
    device_children: int = 0  # of them, those on the device
    host_children: int = 0
    disk_children: int = 0
    holders: int = 0  # sequences and transfers whose path runs through this node; held nodes are on the device
    state_holders: int = 0  # transfers that read the device's checkpoint
    pins: int = 0  # keep its records in the host or disk tier
    used_s: float = 0.0  # last use, seconds since the epoch; of two uses the later one's is larger
    gap_s: float = 1.0  # usual time between uses, as tiers/history.py says
    device_since_s: float = 0.0  # when its block came to each tier; 0 before the first
    host_since_s: float = 0.0
    disk_since_s: float = 0.0
    hits: int = 0

    @property
    def is_cached(self) -> bool:
        """On the device, and nothing holds it there."""
        return self.block_id is not None and self.holders == 0

    @property
    def is_evictable(self) -> bool:
        """On the device, and nothing there holds it or hangs below it."""
        return self.is_cached and self.device_children == 0

    @property
    def has_lower_block(self) -> bool:
        """The block is in the host tier or on disk."""
        return self.host_block is not None or self.disk_block is not None

    @property
    def has_lower_state(self) -> bool:
        return self.host_state is not None or self.disk_state is not None

    @property
    def has_block(self) -> bool:
        """The block is in some tier."""
        return self.block_id is not None or self.has_lower_block

    @property
    def has_state(self) -> bool:
        """The checkpoint is in some tier."""
        return self.checkpoint is not None or self.has_lower_state

    def path(self) -> list["Node"]:
        """From the first block down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def with_those_above(namespace: str) -> list[str]:
    """A namespace after those that it is a part of: "a", "a/b" and "a/b/c" for the last."""
    names = namespace.split("/")
    return ["/".join(names[: count + 1]) for count in range(len(names))]


class PrefixTree:
    """A forest: one root for every root key, made for its first block and dropped with its last.

    What is on the device reaches up to the root, and so does what is held there: whatever is cached can be evicted from
    the leaves up.
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._by_key: dict[bytes, Node] = {}
        self.time_s = 0.0  # seconds since the epoch, as the owner of the tree last said
        self.charged: Counter[str] = Counter()  # bytes of each namespace and those below it, of all tiers
        self.watcher: Callable[[Node, str, bool], None] | None = None  # told of blocks that come and go
        self._last_s = 0.0
        self.num_nodes = 0  # roots not counted
        self.num_on_device = 0
        self.num_cached = 0  # of those, the ones that nothing holds
        self.num_pinned = 0
        self.num_checkpoints = 0  # on the device
        self.num_held_checkpoints = 0  # of those, the ones that a transfer reads
        self.num_gains = 0  # since start-up, of nodes and of what they have on the device: a match may be longer

    def root(self, key: bytes, namespace: str) -> Node:
        """The node above a namespace's first blocks; one that is not known yet is kept only by `add`."""
        return self._roots.get(key) or Node(key=key, tokens=b"", parent=None, depth=0, namespace=namespace)

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

    def add(self, parent: Node, tokens: bytes) -> Node | None:
        """A new node with its bytes nowhere yet; None where a node with another block's tokens owns the same key."""
        key = block_key(parent.key, tokens)
        if key in parent.children:
            return None
        node = Node(key=key, tokens=tokens, parent=parent, depth=parent.depth + 1, namespace=parent.namespace)
        parent.children[key] = node
        if parent.parent is None:
            assert self._roots.setdefault(parent.key, parent) is parent, "two roots with one key"
        self.num_nodes += 1
        self.num_gains += 1
        self._by_key.setdefault(key, node)  # where a key is not unique, one of its nodes cannot be named, no more
        self._tick(node)
        return node

    def find(self, key: bytes) -> Node | None:
        """The node of this key, for those who name a prefix by it. Whoever matches a prompt compares tokens instead."""
        return self._by_key.get(key)

    def attach(self, node: Node, block_id: int) -> None:
        """The node's block is on the device from now on; its parent's already is."""
        assert node.block_id is None
        assert node.parent is not None
        assert node.parent.parent is None or node.parent.block_id is not None, "a gap on the device"
        node.block_id = block_id
        node.parent.device_children += 1
        self.num_on_device += 1
        self.num_gains += 1
        self.num_cached += node.is_cached
        self._tick(node)
        self.tell(node, "device", came=True)

    def detach(self, node: Node) -> int:
        """The node's block leaves the device; returns its id. Its checkpoint is gone already."""
        assert node.is_evictable, "held, or something hangs below it"
        assert node.checkpoint is None
        assert node.parent is not None
        assert node.block_id is not None
        block_id, node.block_id = node.block_id, None
        node.parent.device_children -= 1
        self.num_on_device -= 1
        self.num_cached -= 1
        self.tell(node, "device", came=False)
        return block_id

    def tell(self, node: Node, tier: str, *, came: bool) -> None:
        """A tier has the node's block from now on, or has it no more."""
        if self.watcher is not None:
            self.watcher(node, tier, came)

    def prune(self, node: Node) -> list[Node]:
        """Unlinks a node that is not on the device, with all below; the caller gives back what they have elsewhere."""
        pruned: list[Node] = []
        stack = [node]
        while stack:
            below = stack.pop()
            assert below.block_id is None, "on the device under a gap"
            assert below.holders == 0
            pruned.append(below)
            stack.extend(below.children.values())
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        for below in pruned:
            self.num_pinned -= below.pins > 0
            if self._by_key.get(below.key) is below:
                del self._by_key[below.key]
            below.children = {}
            below.parent = None
        self.num_nodes -= len(pruned)
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key, None)
        return pruned

    def hold(self, node: Node) -> None:
        """One more sequence runs through the node."""
        self.num_cached -= node.is_cached
        node.holders += 1
        self._tick(node)

    def unhold(self, node: Node) -> None:
        """One sequence less."""
        assert node.holders > 0
        node.holders -= 1
        self.num_cached += node.is_cached

    def pin(self, node: Node) -> None:
        """Keeps a node's records in the lower tiers until unpinned."""
        node.pins += 1
        self.num_pinned += node.pins == 1

    def unpin(self, node: Node) -> None:
        assert node.pins > 0
        node.pins -= 1
        self.num_pinned -= node.pins == 0

    def use(self, node: Node) -> None:
        """A hit resumed at this node: it alone becomes recent."""
        node.hits += 1
        self._tick(node)

    def set_checkpoint(self, node: Node, slot_id: int) -> None:
        assert node.checkpoint is None
        assert node.block_id is not None
        node.checkpoint = slot_id
        self.num_checkpoints += 1
        self.num_gains += 1

    def clear_checkpoint(self, node: Node) -> int:
        """Forgets a node's checkpoint on the device and returns its slot id."""
        slot_id = node.checkpoint
        assert slot_id is not None
        assert node.state_holders == 0, "a transfer reads it"
        node.checkpoint = None
        self.num_checkpoints -= 1
        return slot_id

    def hold_state(self, node: Node) -> None:
        """One more transfer reads the device's checkpoint."""
        assert node.checkpoint is not None
        node.state_holders += 1
        self.num_held_checkpoints += node.state_holders == 1

    def unhold_state(self, node: Node) -> None:
        assert node.state_holders > 0
        node.state_holders -= 1
        self.num_held_checkpoints -= node.state_holders == 0

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """Every node but the roots, of one namespace or of all, parents before children."""
        stack = [root for root in self._roots.values() if namespace in (None, root.namespace)]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises AssertionError where links or counts are broken."""
        nodes = list(self.nodes())
        resident = [node for node in nodes if node.block_id is not None]
        assert len(nodes) == self.num_nodes
        assert len(resident) == self.num_on_device
        assert sum(node.is_cached for node in nodes) == self.num_cached
        assert sum(node.pins > 0 for node in nodes) == self.num_pinned
        assert sum(node.checkpoint is not None for node in nodes) == self.num_checkpoints
        assert sum(node.state_holders > 0 for node in nodes) == self.num_held_checkpoints
        assert len({node.block_id for node in resident}) == len(resident), "two nodes share a block"
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert parent.children[node.key] is node
            assert node.has_block, "a node without bytes"
            assert node.device_children == sum(child.block_id is not None for child in node.children.values())
            assert node.block_id is None or parent.parent is None or parent.block_id is not None, "a gap on the device"
            assert node.host_children == sum(child.host_block is not None for child in node.children.values())
            assert node.disk_children == sum(child.disk_block is not None for child in node.children.values())
            assert node.holders == 0 or node.block_id is not None
            assert node.state_holders == 0 or node.holders > 0, "whoever reads a state holds the path to it"
            assert not node.is_cached or not any(child.holders for child in node.children.values())

    def charge(self, node: Node, num_bytes: int) -> None:
        """A tier has so many bytes more of the node, or fewer."""
        for namespace in with_those_above(node.namespace):
            self.charged[namespace] += num_bytes
            if not self.charged[namespace]:
                del self.charged[namespace]

    def _tick(self, node: Node) -> None:
        self._last_s = max(self.time_s, self._last_s + 1e-6)
        node.used_s = self._last_s
