"""Writing down what is worth keeping: behind the steps, in path order, within bounds.

A prefix is offered when an admitted checkpoint covers it (for a model without slots: when a chunk commits). Offers are
remembered, not held: each is turned into batches when there is room for dirty bytes and the rate allows, from wherever
its blocks are by then. A batch holds what it reads until its job is done. Nothing here is ever awaited by a step; what
cannot be written is dropped and counted.

With a host tier an image goes there first and to disk from there. Without one it goes to disk from the device. The
mover writes one batch after another, so a record is on disk before what hangs below it.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import Job, Mover, Priority
from tiers.records import RecordHead, RecordKind, RecordRef
from tiers.resources import Resources
from tiers.transfer import Fence, Image, Transfer
from tiers.tree import Node

MAX_OFFERS = 1024  # remembered at a time
BATCH_BYTES = 32 << 20  # of images written and committed together
BUSY_BATCH_BYTES = 16 << 20  # the same where coding takes its time from steps: a commit costs as much as a few MB


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Bounds of the traffic."""

    dirty_bytes: int  # held by batches that are not committed
    bytes_per_s: int | None
    busy_bytes_per_s: int | None = None  # while steps want the cores that code the records


CopyKey = tuple[bytes, bool]  # of a block, and whether it is the state after it: what a copy is found by


@dataclass(slots=True)
class WriteStats:
    """Counters since start-up."""

    dropped_offers: int = 0  # no room to remember them, or their bytes were gone before their turn
    failed_batches: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """One image on its way down."""

    node: Node
    is_state: bool
    source: int | None  # block or slot id; None where the host has it already
    chunks: tuple[int, ...] | None  # of the host tier, to be filled or to be read
    head: RecordHead | None  # None: to the host tier only

    @property
    def fills_host(self) -> bool:
        return self.source is not None and self.chunks is not None


@dataclass(slots=True, eq=False)
class Batch:
    """Images written together; `refs` are those of the writes with a head, once they are committed."""

    resources: Resources
    writes: tuple[Write, ...]
    num_bytes: int
    refs: list[RecordRef] = field(default_factory=list[RecordRef])
    took_s: float = 0.0

    @property
    def copies(self) -> "dict[CopyKey, Node]":
        """What it writes."""
        return {(write.node.key, write.is_state): write.node for write in self.writes}


class WriteDown:
    """Owns the offers and the batches in flight."""

    def __init__(
        self,
        device: DeviceTier,
        transfer: Transfer,
        mover: Mover,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        limits: WriteLimits,
    ) -> None:
        self.device = device
        self.transfer = transfer
        self.mover = mover
        self.host = host
        self.disk = disk
        self.limits = limits
        self.stats = WriteStats()
        self.dirty_bytes = 0
        self._offers: OrderedDict[Node, None] = OrderedDict()
        self._in_flight: list[Batch] = []
        self._on_the_way: dict[CopyKey, Node] = {}  # what these and others write, each once at a time
        self._postponed: defaultdict[CopyKey, list[Node]] = defaultdict(list)  # offers that wait for another's write
        self._num_batches = 0
        self._allowance = 0.0  # bytes that the rate still allows now
        self._allowed_at: float | None = None
        self._batch_bytes = BATCH_BYTES
        self._least_allowance = 1

    @property
    def is_idle(self) -> bool:
        """Nothing is offered, nothing on its way."""
        has_garbage = self.disk is not None and self.disk.takes_writes and bool(self.disk.garbage)
        return not (self._offers or self._postponed or self._in_flight or has_garbage)

    def owners(self) -> list[Resources]:
        """For the ledger and the idle proof."""
        return [batch.resources for batch in self._in_flight]

    def offer(self, node: Node) -> None:
        """The path down to `node`, and the checkpoint there if it has one, are worth writing."""
        self._offers[node] = None
        self._offers.move_to_end(node)
        if len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
            self.stats.dropped_offers += 1

    def pump(self, now: float, *, is_busy: bool) -> None:
        """Plans batches while bounds allow. Called once a step, and when a batch has ended."""
        self._refill(now, self.limits.busy_bytes_per_s if is_busy else None)
        while self._offers and self._has_room and self.has_allowance:
            node = next(iter(self._offers))
            batch = self._plan(node)
            if batch is None:
                del self._offers[node]
                continue
            self._in_flight.append(batch)
            self.dirty_bytes += batch.num_bytes
            self._allowance -= batch.num_bytes
            self.mover.submit(self._job(batch))
        self.clean_up()

    @property
    def _has_room(self) -> bool:
        """For one more batch; else offers wait for those on their way."""
        return self.dirty_bytes < self.limits.dirty_bytes and (self.disk is None or not self.disk.is_crowded)

    @property
    def has_allowance(self) -> bool:
        """The rate allows that somebody writes now."""
        return self._allowance >= self._least_allowance

    def spend(self, num_bytes: int) -> None:
        """What others write counts against the rate."""
        self._allowance -= num_bytes

    def clean_up(self) -> None:
        """Has the records deleted that no node has any more."""
        if self.disk is None or not self.disk.garbage or not self.disk.takes_writes:
            return
        disk = self.disk
        room = disk.take_garbage()
        num_reclaimed: int | None = None

        def work() -> None:
            nonlocal num_reclaimed
            num_reclaimed = disk.clear(room)

        def done(_: Exception | None) -> None:
            disk.room_used(room, num_reclaimed)  # after an error they cost room until the disk can be written again

        self.mover.submit(Job(Priority.CLEAN_UP, work, done))

    def begin(self, copies: Mapping[CopyKey, Node]) -> bool:
        """Claims copies for a write; False where one of them is on its way already.

        Were a key written twice at a time, the store would keep the later record and the tree the earlier.
        """
        if not self._on_the_way.keys().isdisjoint(copies):
            return False
        self._on_the_way.update(copies)
        return True

    def end(self, copies: Iterable[CopyKey]) -> None:
        """They have been written, or have not; whoever waited for one of them is offered again."""
        for copy in copies:
            del self._on_the_way[copy]
            for node in self._postponed.pop(copy, ()):
                if node.parent is not None:
                    self.offer(node)

    def astray(self) -> list[str]:
        """Dirty bytes that no batch has."""
        known = sum(batch.num_bytes for batch in self._in_flight)
        return [f"{self.dirty_bytes - known} dirty bytes belong to no batch"] if self.dirty_bytes != known else []

    def is_written(self, node: Node) -> bool:
        """The path to `node`, and its checkpoint if it has one, are in the lowest tier."""
        if self.disk is not None:
            return not self.disk.lacking(node) and (not node.has_state or self.disk.has_state(node))
        return all(above.host_block is not None for above in node.path()) and (
            not node.has_state or node.host_state is not None
        )

    def _refill(self, now: float, busy_rate: int | None) -> None:
        rates = [rate for rate in (self.limits.bytes_per_s, busy_rate) if rate is not None]
        if busy_rate is None:
            self._batch_bytes, self._least_allowance = BATCH_BYTES, 1
        elif self._batch_bytes != BUSY_BATCH_BYTES:  # steps have begun: what idleness allowed is gone
            self._batch_bytes = self._least_allowance = BUSY_BATCH_BYTES
            self._allowance = 0.0
        if not rates:
            self._allowance = float(BATCH_BYTES)
            self._allowed_at = now
            return
        rate = min(rates)
        elapsed = 1.0 if self._allowed_at is None else now - self._allowed_at
        self._allowance = min(self._allowance + elapsed * rate, float(max(rate, self._least_allowance)))
        self._allowed_at = now

    def _plan(self, node: Node) -> Batch | None:
        """The next batch of an offer; None where nothing is left to write or its bytes are gone."""
        to_disk = self.disk is not None and self.disk.takes_writes  # asked once: the disk may recover meanwhile
        if node.parent is None or (self.host is None and not to_disk):
            self.stats.dropped_offers += 1
            return None
        wanted = self._wanted(node, to_disk=to_disk)
        self._num_batches += 1
        resources = Resources(f"write:{self._num_batches}")
        writes: list[Write] = []
        num_bytes = 0
        for above, is_state in wanted:
            writing = self._on_the_way.get((above.key, is_state))
            if writing is above:
                continue
            if writing is not None:
                self._postponed[above.key, is_state].append(node)
                break
            if self.disk is not None and self.device.tree.find(above.key) is not above:
                break  # another block has the same key: on disk it would be taken for that one
            if above.parent is None:
                break  # went to make room in the host tier
            size = self.device.layout.slot_bytes if is_state else self.device.layout.block_bytes
            if writes and num_bytes + size > self._batch_bytes:
                break
            write = self._write(resources, above, is_state=is_state, to_disk=to_disk)
            if write is None:
                break
            writes.append(write)
            num_bytes += size
        if not writes:
            resources.release()
            return None
        deepest = max((write.node for write in writes if write.source is not None), key=lambda n: n.depth, default=None)
        if deepest is not None:
            self.device.hold_path(resources, deepest)
        for write in writes:
            if write.source is not None and write.is_state:
                self.device.hold_state(resources, write.node)
        batch = Batch(resources, tuple(writes), num_bytes)
        self._on_the_way.update(batch.copies)
        return batch

    def _wanted(self, node: Node, *, to_disk: bool) -> list[tuple[Node, bool]]:
        """What the tier lacks of a path; bool: the checkpoint. What hangs below a new record is written anew."""
        if self.disk is not None and to_disk:
            lacking = self.disk.lacking(node)
            has_state = not lacking and self.disk.has_state(node)
        else:
            lacking = [above for above in node.path() if above.host_block is None]
            has_state = node.host_state is not None
        return [*((above, False) for above in lacking), *([(node, True)] if node.has_state and not has_state else [])]

    def _write(self, resources: Resources, node: Node, *, is_state: bool, to_disk: bool) -> Write | None:
        """One image's way down; None where its bytes are nowhere to be had, or nowhere to go."""
        source = node.checkpoint if is_state else node.block_id
        copy = node.host_state if is_state else node.host_block
        head = None
        if self.disk is not None and to_disk:
            head = self.disk.head(node, RecordKind.CHECKPOINT if is_state else RecordKind.BLOCK)
        if copy is not None and self.host is not None:
            self.host.hold(resources, copy)
            return Write(node, is_state, None, copy.chunks, head)
        if source is None:
            return None
        chunks = None
        if self.host is not None:
            size = self.device.layout.slot_bytes if is_state else self.device.layout.block_bytes
            chunks = self.host.take_for(resources, self.host.chunks_for(size))
        if chunks is None and head is None:
            return None
        return Write(node, is_state, source, chunks, head)

    def _job(self, batch: Batch) -> Job:
        fence = self.transfer.fence()
        disk, last_use = self.disk, int(self.device.tree.time_s)
        num_reclaimed: int | None = None
        room = None
        if disk is not None and any(write.head is not None for write in batch.writes):
            room = disk.make_room(batch.num_bytes, len(batch.writes))

        def work() -> None:
            nonlocal num_reclaimed
            began = time.perf_counter()
            if disk is not None and room is not None:
                num_reclaimed = disk.clear(room)
            records: list[tuple[RecordHead, memoryview]] = []
            for write in batch.writes:
                image = self._image(write, fence)
                if write.head is not None:
                    records.append((write.head, image))
            if disk is not None and records:
                batch.refs = disk.store.write(records, last_use=last_use)
            batch.took_s = time.perf_counter() - began

        def done(error: Exception | None) -> None:
            if disk is not None and room is not None:
                disk.room_used(room, num_reclaimed)
            self._done(batch, error)

        return Job(Priority.WRITE_DOWN, work, done)

    def _image(self, write: Write, fence: Fence) -> memoryview:
        """The image for the disk, after what is to stay in the host tier has been copied there."""
        layout, transfer = self.device.layout, self.transfer
        if write.chunks is not None:
            if write.source is not None:
                transfer.to_host(Image(write.source, write.is_state), write.chunks, fence)
            return transfer.view_chunks(write.chunks, layout.slot_bytes if write.is_state else layout.block_bytes)
        assert write.source is not None
        return transfer.view(Image(write.source, write.is_state), fence)

    def _done(self, batch: Batch, error: Exception | None) -> None:
        self._in_flight.remove(batch)
        self.dirty_bytes -= batch.num_bytes
        if error is None:
            self._commit(batch)
        else:
            self.stats.failed_batches += 1
            if self.disk is not None:
                self.disk.write_failed(len(batch.writes), error)
            for write in batch.writes:
                self._offers.pop(write.node, None)
        self.end(batch.copies)
        batch.resources.release()

    def _commit(self, batch: Batch) -> None:
        """The images' new places become known, of those that are still in the tree."""
        refs = iter(batch.refs)
        for write in batch.writes:
            node, ref = write.node, next(refs) if write.head is not None else None
            is_linked = node.parent is not None
            has_copy = (node.host_state if write.is_state else node.host_block) is not None
            if write.fills_host and is_linked and not has_copy and self.host is not None and write.chunks is not None:
                self.host.give(batch.resources, node, write.chunks, is_state=write.is_state)
            if ref is None or self.disk is None:
                continue
            if not is_linked or not self.disk.take_in(node, ref, is_state=write.is_state):
                self.disk.garbage.append(ref)
        if self.host is not None:
            filled = [write for write in batch.writes if write.fills_host and write.chunks is not None]
            self.host.stats.writes += len(filled)
            self.host.stats.written_bytes += sum(len(write.chunks or ()) * self.host.chunk_bytes for write in filled)
            if self.disk is None and filled:
                self.host.stats.write_s += batch.took_s
                self.host.meters.write_s.observe(batch.took_s)
        if self.disk is not None and batch.refs:
            stats = self.disk.stats
            stats.writes += len(batch.refs)
            stats.written_bytes += sum(ref.stored_bytes for ref in batch.refs)
            stats.write_s += batch.took_s
            self.disk.meters.write_s.observe(batch.took_s)
