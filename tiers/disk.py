"""The disk tier's books: which nodes have records, which records go when room is wanted, which are garbage.

The bytes are the store's (tiers/store.py), which is asked on I/O threads only; here are references. A prefix on disk
stays whole: a block's record may go when no block below it has one, a state's at any time.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiers.keys import Provenance, block_key, root_key
from tiers.records import RecordHead, RecordKind, RecordRef, StoredRecord
from tiers.tree import Node, PrefixTree

RECORD_OVERHEAD_BYTES = 16 << 10  # header, alignment and row of the index, at the most

log = logging.getLogger("downcore.tiers")


class RecordStore(Protocol):
    """What holds the records; tiers/store.py keeps them on disk. Called on I/O threads, but for the properties."""

    @property
    def takes_writes(self) -> bool:
        """It is in order: not degraded, not read-only."""
        ...

    @property
    def usage_bytes(self) -> int:
        """What du says of it."""
        ...

    def entries(self) -> Iterator[StoredRecord]:
        """Every committed record that this engine may read, parents before children."""
        ...

    def write(self, records: Sequence[tuple[RecordHead, memoryview]]) -> list[RecordRef]:
        """Makes images durable, all of them or none."""
        ...

    def read(self, requests: Sequence[tuple[RecordHead, RecordRef, memoryview]]) -> Sequence[Exception | None]:
        """Reads, checks and decodes records into buffers of their images' sizes; of each, why not."""
        ...

    def delete(self, refs: Sequence[RecordRef]) -> None:
        """Forgets records durably; their room comes back once nobody reads them."""
        ...


@dataclass(slots=True)
class DiskStats:
    """Counters since start-up."""

    hit_tokens: int = 0
    evicted_records: int = 0
    dropped_writes: int = 0
    verify_failures: int = 0
    read_bytes: int = 0
    reads: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    writes: int = 0
    write_s: float = 0.0


class DiskTier:
    """What the tree knows of the store. `garbage` are records that no node has any more, to be deleted."""

    def __init__(self, tree: PrefixTree, store: RecordStore, *, fingerprint: bytes, quota_bytes: int) -> None:
        self.tree = tree
        self.store = store
        self.fingerprint = fingerprint
        self.quota_bytes = quota_bytes
        self.stats = DiskStats()
        self.garbage: list[RecordRef] = []
        self._by_use: OrderedDict[RecordRef, tuple[Node, bool]] = OrderedDict()  # oldest use first; bool: of the state

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tree's records, as the quota counts them."""
        return sum(ref.stored_bytes for ref in self._by_use)

    def head(self, node: Node, kind: RecordKind) -> RecordHead:
        """What a record of this node says of itself."""
        assert node.parent is not None
        return RecordHead(
            kind=kind,
            provenance=Provenance.EXACT,
            namespace=node.namespace,
            parent=node.parent.key,
            key=node.key,
            depth=node.depth,
            tokens=node.tokens if kind is RecordKind.BLOCK else b"",
        )

    def load(self) -> int:
        """Puts the store's committed records into an empty tree; how many. What does not fit together is garbage."""
        states: list[tuple[int, RecordRef, bytes]] = []
        nodes: dict[bytes, Node] = {}
        found: list[tuple[int, RecordRef, Node, bool]] = []
        for entry in self.store.entries():
            head = entry.head
            if head.provenance is not Provenance.EXACT:
                continue
            if head.kind is RecordKind.CHECKPOINT:
                states.append((entry.last_use, entry.ref, head.key))
                continue
            parent = nodes.get(head.parent)
            if parent is None and head.depth == 1:
                root = root_key(self.fingerprint, head.provenance, head.namespace)
                parent = self.tree.root(root, head.namespace) if root == head.parent else None
            if parent is None or block_key(head.parent, head.tokens) != head.key:
                self.garbage.append(entry.ref)
                continue
            node = self.tree.add(parent, head.tokens)
            if node is None:
                self.garbage.append(entry.ref)
                continue
            nodes[head.key] = node
            found.append((entry.last_use, entry.ref, node, False))
        for last_use, ref, key in states:
            node = nodes.get(key)
            if node is None:
                self.garbage.append(ref)
            else:
                found.append((last_use, ref, node, True))
        found.sort(key=lambda item: (item[0], item[2].depth))
        for _, ref, node, is_state in found:
            (self.set_state if is_state else self.set_block)(node, ref)
        return len(found)

    def set_block(self, node: Node, ref: RecordRef) -> None:
        """The node's block is on disk from now on."""
        assert node.disk_block is None
        assert node.parent is not None
        node.disk_block = ref
        node.parent.disk_children += 1
        self._by_use[ref] = (node, False)

    def set_state(self, node: Node, ref: RecordRef) -> None:
        """The node's checkpoint is on disk from now on."""
        assert node.disk_state is None
        node.disk_state = ref
        self._by_use[ref] = (node, True)

    def use(self, node: Node) -> None:
        """A hit ended at this node."""
        for ref in (node.disk_block, node.disk_state):
            if ref is not None:
                self._by_use.move_to_end(ref)

    def drop_block(self, node: Node) -> None:
        """Forgets the block's record, which becomes garbage. The caller looks after what hangs below."""
        ref = node.disk_block
        assert ref is not None
        node.disk_block = None
        if node.parent is not None:  # else it is out of the tree already
            node.parent.disk_children -= 1
        del self._by_use[ref]
        self.garbage.append(ref)

    def drop_state(self, node: Node) -> None:
        """Forgets the checkpoint's record, which becomes garbage."""
        ref = node.disk_state
        assert ref is not None
        node.disk_state = None
        del self._by_use[ref]
        self.garbage.append(ref)

    def quarantine_block(self, node: Node, reason: str) -> None:
        """The block's record is damaged or cannot be read: it is no copy any more."""
        log.warning("record of block %s set aside: %s", node.key.hex()[:16], reason)
        self.stats.verify_failures += 1
        self.drop_block(node)

    def quarantine_state(self, node: Node, reason: str) -> None:
        """The same for the checkpoint's record."""
        log.warning("record of checkpoint %s set aside: %s", node.key.hex()[:16], reason)
        self.stats.verify_failures += 1
        self.drop_state(node)

    @property
    def takes_writes(self) -> bool:
        """The store is in order."""
        return self.store.takes_writes

    def take_in(self, node: Node, ref: RecordRef, *, is_state: bool) -> bool:
        """A record has been committed; False where it has no place: there is one already, or a gap above it."""
        assert node.parent is not None
        if is_state:
            if node.disk_block is None or node.disk_state is not None:
                return False
            self.set_state(node, ref)
        else:
            if node.disk_block is not None or (node.parent.parent is not None and node.parent.disk_block is None):
                return False
            self.set_block(node, ref)
        return True

    def write_failed(self, num_records: int, error: Exception) -> None:
        """A batch could not be written; the store has drawn its own conclusions."""
        log.warning("%d records not written: %s", num_records, error)
        self.stats.dropped_writes += num_records

    def make_room(self, image_bytes: int, num_records: int) -> bool:
        """Drops the least recently used records until these images fit, however badly they code, without garbage."""
        num_bytes = image_bytes + num_records * RECORD_OVERHEAD_BYTES
        free = self.quota_bytes - self.store.usage_bytes + sum(ref.stored_bytes for ref in self.garbage)
        while free < num_bytes:
            victim = next((item for item in self._by_use.items() if self._may_go(*item[1])), None)
            if victim is None:
                return False
            ref, (node, is_state) = victim
            if is_state:
                self.drop_state(node)
            else:
                self.drop_block(node)
                if not node.has_block:
                    self.tree.prune(node)
            self.stats.evicted_records += 1
            free += ref.stored_bytes
        return True

    def take_garbage(self) -> list[RecordRef]:
        """The records to delete, handed over."""
        garbage, self.garbage = self.garbage, []
        return garbage

    def check(self) -> None:
        """Raises AssertionError where nodes and records disagree."""
        seen = 0
        for node in self.tree.nodes():
            for ref, is_state in ((node.disk_block, False), (node.disk_state, True)):
                if ref is not None:
                    assert self._by_use[ref] == (node, is_state), "a record with another owner"
                    seen += 1
        assert seen == len(self._by_use), "a record that no node has"

    def _may_go(self, node: Node, is_state: bool) -> bool:
        if node.pins:
            return False
        if is_state:
            return True
        if node.disk_children or node.disk_state is not None:
            return False
        return node.block_id is not None or node.host_block is not None or not (node.children or node.has_state)
