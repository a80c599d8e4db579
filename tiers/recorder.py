"""Recording what went below the device: grid chunks of a live prompt become records on disk, a prefix for others.

What a sequence has in the spill is its own, and no tree knows it. Here each grid chunk of its prompt is written to the
store, from where it lies, once the path above it is there; with the record it becomes a node of the tree. Chunks are
held until then, also beyond their sequence's end, and given up for whoever needs their room. Behind the steps, one
chunk at a time, at the rate of all write-downs.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.keys import block_key
from tiers.mover import Job, Mover, Priority
from tiers.records import RecordHead, RecordKind, RecordRef
from tiers.resources import Resources
from tiers.tree import Node
from tiers.writedown import CopyKey, WriteDown

ReadImage = Callable[[], memoryview]  # called on an I/O thread
_Refs = dict[CopyKey, RecordRef]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBelow:
    """A grid chunk of a prompt, wherever it is below the device; `resources` keep it there."""

    resources: Resources
    tokens: tuple[bytes, ...]  # of each block, as keys.token_bytes makes them
    blocks: tuple[ReadImage, ...]
    state: ReadImage | None  # after the last block, where it is worth keeping


@dataclass(slots=True, eq=False)
class Trail:
    """What is to be recorded of one sequence, in order, below `node`, which is a root where nothing is above it."""

    node: Node
    gap_s: float
    waiting: deque[ChunkBelow] = field(default_factory=deque[ChunkBelow])
    writing: ChunkBelow | None = None
    is_over: bool = False  # its sequence has ended
    is_cut: bool = False  # something of it is not on disk, so what follows has no place there
    has_offered: bool = False  # the path above it

    @property
    def chunks(self) -> list[ChunkBelow]:
        """Those that it still holds."""
        return [*self.waiting, *([] if self.writing is None else [self.writing])]


@dataclass(frozen=True, slots=True)
class _Record:
    """One record to be written; `node` may not be in the tree yet."""

    node: Node
    is_state: bool
    head: RecordHead
    image: ReadImage


class Recorder:
    """Owns the trails and the chunks that they hold."""

    def __init__(self, device: DeviceTier, disk: DiskTier, mover: Mover, writedown: WriteDown) -> None:
        self.device = device
        self.disk = disk
        self.mover = mover
        self.writedown = writedown
        self.trails: list[Trail] = []

    @property
    def is_idle(self) -> bool:
        """Nothing is being written, and nothing waits to be."""
        return not any(trail.chunks for trail in self.trails)

    def owners(self) -> list[Resources]:
        """For the ledger and the idle proof."""
        return [chunk.resources for trail in self.trails for chunk in trail.chunks]

    def begin(self, node: Node, gap_s: float) -> Trail:
        """A trail below a node, until its owner says that it is over."""
        trail = Trail(node, gap_s)
        self.trails.append(trail)
        return trail

    def add(self, trail: Trail, chunk: ChunkBelow) -> None:
        """The next chunk of a trail."""
        if trail.is_cut:
            chunk.resources.release()
        else:
            trail.waiting.append(chunk)

    def pump(self) -> None:
        """Begins what may be written now. Called once a step."""
        for trail in list(self.trails):
            if trail.writing is not None:
                continue
            if not self.disk.takes_writes or self._is_cut_off(trail):
                self._cut(trail)
            if trail.waiting and self._is_below_records(trail) and self.writedown.has_allowance:
                self._write(trail, trail.waiting[0])
            if trail.is_over and not trail.chunks:
                self.trails.remove(trail)

    def give_way(self) -> bool:
        """Gives up what waits of a sequence that has ended, for its room; whether there was any."""
        for trail in self.trails:
            if trail.is_over and trail.waiting:
                self._cut(trail)
                return True
        return False

    def _cut(self, trail: Trail) -> None:
        trail.is_cut = True
        while trail.waiting:
            trail.waiting.pop().resources.release()

    def _is_cut_off(self, trail: Trail) -> bool:
        """What it would hang below is not in the tree any more, or is not on its way to the disk."""
        if trail.node.parent is None:
            return trail.node.depth > 0
        return trail.node.disk_block is None and trail.has_offered and self.writedown.is_idle

    def _is_below_records(self, trail: Trail) -> bool:
        if trail.node.parent is None or trail.node.disk_block is not None:
            return True
        if not trail.has_offered:
            self.writedown.offer(trail.node)
            trail.has_offered = True
        return False

    def _above(self, trail: Trail) -> Node:
        """The node that the next chunk hangs below. Roots come and go with what is below them."""
        return trail.node if trail.node.parent is not None else self.device.root(trail.node.namespace)

    def _size(self, chunk: ChunkBelow) -> int:
        layout = self.device.layout
        return len(chunk.blocks) * layout.block_bytes + (layout.slot_bytes if chunk.state is not None else 0)

    def _write(self, trail: Trail, chunk: ChunkBelow) -> None:
        """Begins to write the first chunk that waits; not while another writes some of it."""
        records = self._records(self._above(trail), chunk)
        copies = {(record.head.key, record.is_state): record.node for record in records or ()}
        if not self.writedown.begin(copies):
            return
        trail.writing = trail.waiting.popleft()
        if not records:
            self._ended(trail, chunk, None if records is None else {})
            return
        self.writedown.spend(self._size(chunk))
        disk, last_use = self.disk, int(self.device.tree.time_s)
        room = disk.make_room(self._size(chunk), len(records))  # where it cannot, the store says that it is full
        refs, took_s = list[RecordRef](), 0.0
        num_reclaimed: int | None = None

        def work() -> None:
            nonlocal num_reclaimed, took_s
            began = time.perf_counter()
            num_reclaimed = disk.clear(room)
            refs.extend(disk.store.write([(r.head, r.image()) for r in records], last_use=last_use))
            took_s = time.perf_counter() - began

        def done(error: Exception | None) -> None:
            disk.room_used(room, num_reclaimed)
            self.writedown.end(copies)
            if error is not None:
                disk.write_failed(len(records), error)
                self._ended(trail, chunk, None)
                return
            disk.stats.writes += len(refs)
            disk.stats.written_bytes += sum(ref.stored_bytes for ref in refs)
            disk.stats.write_s += took_s
            disk.meters.write_s.observe(took_s)
            self._ended(trail, chunk, dict(zip(copies, refs, strict=True)))

        self.mover.submit(Job(Priority.WRITE_DOWN, work, done))

    def _ended(self, trail: Trail, chunk: ChunkBelow, refs: _Refs | None) -> None:
        """A chunk's records are on disk; None: not all of them."""
        trail.writing = None
        chunk.resources.release()
        node = None if refs is None or self._is_cut_off(trail) else self._take_in(trail, chunk, refs)
        self.disk.garbage += (refs or {}).values()
        if node is None:
            self._cut(trail)
        else:
            trail.node, trail.has_offered = node, False

    def _records(self, above: Node, chunk: ChunkBelow) -> list[_Record] | None:
        """What the disk lacks of a chunk; None where a key is another block's, which on disk would be taken for it."""
        tree, records = self.device.tree, list[_Record]()
        for tokens, image in zip(chunk.tokens, chunk.blocks, strict=True):
            known = tree.child(above, tokens)
            key = block_key(above.key, tokens)
            if known is not tree.find(key):
                return None
            node = known or Node(key, tokens, above, above.depth + 1, above.namespace)
            if node.disk_block is None:
                records.append(_Record(node, False, self.disk.head(node, RecordKind.BLOCK), image))
            above = node
        if chunk.state is not None and above.disk_state is None:
            records.append(_Record(above, True, self.disk.head(above, RecordKind.CHECKPOINT), chunk.state))
        return records

    def _take_in(self, trail: Trail, chunk: ChunkBelow, refs: _Refs) -> Node | None:
        """What was written becomes the tree's and is taken out of `refs`; the last node, where all have their place."""
        node = self._above(trail)
        for tokens in chunk.tokens:
            placed = self._place(node, tokens, refs, trail.gap_s)
            if placed is None:
                return None
            node = placed
        state = refs.get((node.key, True))
        if state is not None and self.disk.take_in(node, state, is_state=True):
            del refs[node.key, True]
        return node

    def _place(self, above: Node, tokens: bytes, refs: _Refs, gap_s: float) -> Node | None:
        """The node below `above`, on disk from now on; None where the path to it is not there any more."""
        tree, place = self.device.tree, (block_key(above.key, tokens), False)
        if above.parent is not None and above.disk_block is None:
            return None
        node = tree.child(above, tokens)
        if node is None and place in refs:
            node = tree.add(above, tokens)
            if node is not None:
                node.gap_s = gap_s
        if node is not None and place in refs and self.disk.take_in(node, refs[place], is_state=False):
            del refs[place]
        return node if node is not None and node.disk_block is not None else None
