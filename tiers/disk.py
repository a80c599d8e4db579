"""The disk tier's books: which nodes have records, which records go when room is wanted, which are garbage.

The bytes are the store's (tiers/store.py), which is asked on I/O threads only; here are references. A prefix on disk
stays whole: a block's record may go when no block below it has one, a state's at any time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiers.device import DeviceTier
from tiers.eviction import EvictionOrder
from tiers.health import StoreState
from tiers.keys import Provenance, block_key, root_key
from tiers.meters import EvictionReason, TierMeters
from tiers.record_store import RecordStore
from tiers.records import RecordHead, RecordKind, RecordRef
from tiers.tree import Node
from tiers.worth import DISK

PROMISED_PART = 16  # of the quota
RECLAIM_BYTES = 64 << 20  # at least, of records that nobody can use: looking for them costs the same for few and many
HEADER_BYTES = 8 << 10  # of a record beside its image, at the most: header, and padding to the next sector

log = logging.getLogger("downcore.tiers")


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


@dataclass(frozen=True, slots=True)
class Place:
    """A record, and whose it is."""

    node: Node
    head: RecordHead
    ref: RecordRef


@dataclass(frozen=True, slots=True)
class Room:
    """What is to be deleted and reclaimed before a write, and what the write was promised."""

    num_bytes: int
    reclaim_bytes: int  # of records that this engine cannot use
    garbage: tuple[RecordRef, ...]

    @property
    def garbage_bytes(self) -> int:
        """Of the quota, when they are gone."""
        return sum(ref.stored_bytes for ref in self.garbage)


class DiskTier:
    """What the tree knows of the store. `garbage` are records that no node has any more, to be deleted."""

    def __init__(self, device: DeviceTier, store: RecordStore) -> None:
        self.tree = device.tree
        self._image_bytes = {
            RecordKind.BLOCK: device.layout.block_bytes,
            RecordKind.CHECKPOINT: device.layout.slot_bytes,
        }
        self.store = store
        self.fingerprint = device.fingerprint
        self.stats = DiskStats()
        self.meters = TierMeters()
        self.garbage: list[RecordRef] = []
        self.forget: Callable[[list[Node]], None] = _has_no_other_tier
        self.settle_above: Callable[[Node], None] = lambda node: None  # the host's, where pins ask for records here
        self.appraiser = device.appraiser
        self.other_profile: frozenset[bytes] = frozenset()  # keys of blocks that another machine computed
        self._num_foreign = store.num_records  # records that this engine cannot read
        self._foreign_bytes = 0  # of them, those that no write has planned to reclaim
        self._promised_bytes = 0  # of writes that are on their way
        self._leaving_bytes = 0  # of garbage whose deletion is on its way
        self.order = EvictionOrder[Node](device.weights)  # stops, as tiers/eviction.py calls them
        self._records: dict[RecordRef, tuple[Node, bool]] = {}  # bool: of the checkpoint

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tree's records, as the quota counts them."""
        return sum(ref.stored_bytes for ref in self._records)

    @property
    def num_records(self) -> int:
        """Of the tree."""
        return len(self._records)

    @property
    def pinned_bytes(self) -> int:
        """Of those, what pins bind."""
        return sum(ref.stored_bytes for ref, (node, _) in self._records.items() if node.pins)

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

    def newest(self) -> "Place | None":
        """The record written last."""
        if not self._records:
            return None
        ref = next(reversed(self._records))
        node, is_state = self._records[ref]
        return Place(node, self.head(node, RecordKind.CHECKPOINT if is_state else RecordKind.BLOCK), ref)

    def places(self) -> list["Place"]:
        """Every record that a node has, as it is now."""
        kinds = {False: RecordKind.BLOCK, True: RecordKind.CHECKPOINT}
        return [Place(node, self.head(node, kinds[is_state]), ref) for ref, (node, is_state) in self._records.items()]

    def examine(self, places: Sequence["Place"]) -> list[Exception | None]:
        """Reads records and forgets them again; of each, what is wrong. Called on I/O threads."""
        scratch = [memoryview(bytearray(self._image_bytes[place.head.kind])) for place in places]
        requests = [(place.head, place.ref, target) for place, target in zip(places, scratch, strict=True)]
        return list(self.store.read(requests))

    def load(self) -> int:
        """Puts the store's committed records into an empty tree; how many. What does not fit together is garbage."""
        states: list[tuple[int, RecordRef, bytes]] = []
        nodes: dict[bytes, Node] = {}
        written: dict[bytes, int] = {}  # generation of each block's record: what hangs below was written after it
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
            is_older = entry.ref.generation < written.get(head.parent, 0)
            if parent is None or is_older or block_key(head.parent, head.tokens) != head.key:
                self.garbage.append(entry.ref)
                continue
            node = self.tree.add(parent, head.tokens)
            if node is None:
                self.garbage.append(entry.ref)
                continue
            nodes[head.key] = node
            written[head.key] = entry.ref.generation
            found.append((entry.last_use, entry.ref, node, False))
        for last_use, ref, key in states:
            node = nodes.get(key)
            if node is None or ref.generation < written[key]:
                self.garbage.append(ref)
            else:
                found.append((last_use, ref, node, True))
        for last_use, _, node, _ in found:
            node.used_s = max(node.used_s, float(last_use))
        found.sort(key=lambda item: (item[0], item[2].depth))
        for _, ref, node, is_state in found:
            (self.set_state if is_state else self.set_block)(node, ref)
        self.other_profile = self.store.other_profile_keys()
        self._num_foreign = self.store.num_records - len(self._records) - len(self.garbage)
        self._foreign_bytes = self.store.unreadable_bytes
        return len(found)

    def set_block(self, node: Node, ref: RecordRef) -> None:
        """The node's block is on disk from now on."""
        assert node.disk_block is None
        assert node.parent is not None
        node.disk_block = ref
        node.disk_since_s = self.tree.time_s
        node.parent.disk_children += 1
        self._records[ref] = (node, False)
        self.settle(node)
        self.settle(node.parent)
        self.settle_above(node)
        self.tree.charge(node, ref.stored_bytes)
        self.tree.tell(node, "disk", came=True)

    def set_state(self, node: Node, ref: RecordRef) -> None:
        """The node's checkpoint is on disk from now on."""
        assert node.disk_state is None
        node.disk_state = ref
        self._records[ref] = (node, True)
        self.settle(node)
        self.settle_above(node)
        self.tree.charge(node, ref.stored_bytes)

    def use(self, node: Node) -> None:
        """A hit ended at this node."""
        refs = [ref for ref in (node.disk_block, node.disk_state) if ref is not None]
        if refs:
            self.store.touch(refs, int(self.tree.time_s))

    def drop_block(self, node: Node, reason: EvictionReason) -> None:
        """Forgets the block's record, which becomes garbage. The caller looks after what hangs below."""
        ref = node.disk_block
        assert ref is not None
        node.disk_block = None
        if node.parent is not None:  # else it is out of the tree already
            node.parent.disk_children -= 1
            self.settle(node.parent)
        self.settle(node)
        self.settle_above(node)
        del self._records[ref]
        self.tree.charge(node, -ref.stored_bytes)
        self.garbage.append(ref)
        self.meters.block_left(reason, node.disk_since_s, self.tree.time_s)
        self.tree.tell(node, "disk", came=False)

    def drop_state(self, node: Node, reason: EvictionReason) -> None:
        """Forgets the checkpoint's record, which becomes garbage."""
        ref = node.disk_state
        assert ref is not None
        node.disk_state = None
        self.settle(node)
        self.settle_above(node)
        del self._records[ref]
        self.tree.charge(node, -ref.stored_bytes)
        self.garbage.append(ref)
        self.meters.checkpoint_left(reason)

    def quarantine_block(self, node: Node, reason: str) -> None:
        """The block's record is damaged or cannot be read: it is no copy any more."""
        log.warning("record of block %s set aside: %s", node.key.hex()[:16], reason)
        self.stats.verify_failures += 1
        self.drop_block(node, EvictionReason.DAMAGED)

    def quarantine_state(self, node: Node, reason: str) -> None:
        """The same for the checkpoint's record."""
        log.warning("record of checkpoint %s set aside: %s", node.key.hex()[:16], reason)
        self.stats.verify_failures += 1
        self.drop_state(node, EvictionReason.DAMAGED)

    @property
    def takes_writes(self) -> bool:
        """The store is in order."""
        return self.store.takes_writes

    @property
    def gives_reads(self) -> bool:
        """A read would be tried now. Where it would not, records are good for later: they must not be set aside."""
        health = self.store.health
        return health.state is not StoreState.DEGRADED or health.retry_in_s == 0

    def lacking(self, node: Node) -> list[Node]:
        """Of the path to a node, from the first block on whose record a restart would not find: `load` takes none
        that is missing, below a gap, or older than the one above it."""
        path, whole, newest = node.path(), 0, 0
        while whole < len(path) and (ref := path[whole].disk_block) is not None and ref.generation >= newest:
            whole, newest = whole + 1, ref.generation
        return path[whole:]

    def has_state(self, node: Node) -> bool:
        """A restart would find the record of its checkpoint, if that of its block."""
        state, block = node.disk_state, node.disk_block
        return state is not None and block is not None and state.generation >= block.generation

    def take_in(self, node: Node, ref: RecordRef, *, is_state: bool) -> bool:
        """A record has been committed, in place of the node's own, if it had one; False where there is a gap above."""
        assert node.parent is not None
        if is_state:
            if node.disk_state is not None:
                self.drop_state(node, EvictionReason.ORPHANED)
            if node.disk_block is None:
                return False
            self.set_state(node, ref)
        else:
            if node.disk_block is not None:
                self.drop_block(node, EvictionReason.ORPHANED)
            if node.parent.parent is not None and node.parent.disk_block is None:
                return False
            self.set_block(node, ref)
        return True

    def write_failed(self, num_records: int, error: Exception) -> None:
        """A batch could not be written; the store has drawn its own conclusions."""
        log.warning("%d records not written: %s", num_records, error)
        self.stats.dropped_writes += num_records

    @property
    def is_crowded(self) -> bool:
        """Writes on their way have been promised much of the quota: more would put out what they may never replace."""
        return self._promised_bytes > self.store.quota_bytes // PROMISED_PART

    def make_room(self, image_bytes: int, num_records: int) -> Room:
        """Sees to it that these images fit, however badly they code, beside those that are on their way already.

        What this engine cannot use goes first, then its own least worthwhile stops. Where even that is not enough, the
        store says that it is full.

        Returns: what is to be done before they are written; `room_used` is told of it when they are, or have failed.
        """
        record_bytes = image_bytes + num_records * HEADER_BYTES
        num_bytes = record_bytes + self.store.reserve_bytes(num_records)  # that for all writes, one after another
        leaving = self._leaving_bytes + sum(ref.stored_bytes for ref in self.garbage)
        free = self.store.quota_bytes - self.store.usage_bytes - self._promised_bytes + leaving
        reclaim_bytes = min(max(num_bytes - free, RECLAIM_BYTES), self._foreign_bytes) if free < num_bytes else 0
        self._foreign_bytes -= reclaim_bytes
        free += reclaim_bytes
        while free < num_bytes:
            node = self.order.pop(self.tree.time_s)
            if node is None:
                break
            free += self._evict(node)
        return self._room(record_bytes, reclaim_bytes)

    def take_garbage(self) -> Room:
        """The records to delete, handed over; nothing is to be written."""
        return self._room(0, 0)

    def clear(self, room: Room) -> int:
        """Deletes and reclaims what a room is made of; called on I/O threads, before its write.

        Returns: how many records that this engine could not use are gone.
        """
        if room.garbage:
            self.store.delete(room.garbage)
        return len(self.store.reclaim_unreadable(room.reclaim_bytes)) if room.reclaim_bytes else 0

    def room_used(self, room: Room, num_reclaimed: int | None) -> None:
        """What a room was made for has been written, or has failed, and so many records that this engine could not use
        are gone; None where the room could not be cleared: what it is made of is there for the next one."""
        self._promised_bytes -= room.num_bytes
        self._leaving_bytes -= room.garbage_bytes
        self._num_foreign -= num_reclaimed or 0
        if num_reclaimed is None:
            self.garbage += room.garbage  # deleting again what is gone already harms nobody
            self._foreign_bytes += room.reclaim_bytes

    def _room(self, num_bytes: int, reclaim_bytes: int) -> Room:
        room = Room(num_bytes, reclaim_bytes, tuple(self.garbage))
        self.garbage = []
        self._promised_bytes += num_bytes
        self._leaving_bytes += room.garbage_bytes
        return room

    def astray(self) -> list[str]:
        """Records that nobody has any more. To be asked when nothing is being written or deleted."""
        unknown = self.store.num_records - len(self._records) - len(self.garbage) - self._num_foreign
        found = [f"{unknown} record(s) on disk have no owner"] if unknown > 0 else []
        if self._promised_bytes or self._leaving_bytes:
            found.append(
                f"{self._promised_bytes} bytes of disk are promised to no write, {self._leaving_bytes} leave it"
            )
        return found

    def check(self) -> None:
        """Raises AssertionError where nodes and records disagree."""
        seen = 0
        for node in self.tree.nodes():
            for ref, is_state in ((node.disk_block, False), (node.disk_state, True)):
                if ref is not None:
                    assert self._records[ref] == (node, is_state), "a record with another owner"
                    seen += 1
            is_leaf = node.disk_block is not None and node.disk_children == 0
            assert (node in self.order) is (node.pins == 0 and (is_leaf or node.disk_state is not None))
        assert seen == len(self._records), "a record that no node has"

    def settle(self, node: Node) -> None:
        """Offers a stop for eviction, or takes it back, as it is now."""
        is_leaf = node.disk_block is not None and node.disk_children == 0
        if node.parent is not None and node.pins == 0 and (is_leaf or node.disk_state is not None):
            self.order.offer(node, self.appraiser.stop(node, DISK))
        else:
            self.order.discard(node)

    def _evict(self, node: Node) -> int:
        """A checkpoint, and at a leaf the blocks that only it needs, of one grid chunk; how many bytes that frees."""
        before = len(self.garbage)
        if node.disk_state is not None:
            self.drop_state(node, EvictionReason.ROOM)
        for _ in range(self.appraiser.chunk_blocks):
            above = node.parent
            if above is None or node.disk_block is None or node.disk_children or node.pins or node.disk_state:
                break
            self.drop_block(node, EvictionReason.ROOM)
            if not node.has_block:
                self.forget(self.tree.prune(node))
            node = above
        self.stats.evicted_records += len(self.garbage) - before
        return sum(ref.stored_bytes for ref in self.garbage[before:])


def _has_no_other_tier(nodes: list[Node]) -> None:
    assert not any(node.has_block or node.has_state for node in nodes), "nobody looks after other tiers"
