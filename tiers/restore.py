"""Bringing a prefix back to the device: planned whole, carried out by I/O threads, then taken into the tree.

A restore owns what it needs (the path above, fresh blocks, a slot, the copies it reads) until its last byte has arrived
or failed, whatever becomes of the requests that wait for it. Its first bytes are on their way while the rest is still
planned, and what has arrived is cached like any prefix while the rest comes: from the first block on, up to the first
that is missing. Once nothing is on its way a record that failed is quarantined, and the waiting requests look again:
they find more on the device, or compute.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.match import Match
from tiers.mover import Job, Mover, Priority
from tiers.records import RecordHead, RecordKind, RecordRef, is_refusal
from tiers.resources import Resources
from tiers.transfer import Fence, Image, Transfer
from tiers.tree import Node

JOB_BYTES = 64 << 20  # of images read from records in one job, so that several threads share a restore
HAND_OVER_S = 5e-5  # else a thread that copies waits for the interpreter while thousands of blocks are planned
HOST_JOB_BYTES = 256 << 20  # of images copied from the host in one job; the link is one


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """One image on its way: from the host's chunks, or else from a record, to a block or a slot of the device."""

    node: Node
    is_state: bool
    target: int  # block or slot id
    chunks: tuple[int, ...] | None  # where it comes from; of a lift (lift.py), where it goes
    record: tuple[RecordHead, RecordRef] | None

    @property
    def image(self) -> Image:
        """Where it goes."""
        return Image(self.target, self.is_state)


@dataclass(slots=True, eq=False)
class Restore:
    """A prefix on its way. `tokens` by tier count what came from there, once it is done."""

    resources: Resources
    target: Node
    loads: list[Load] = field(default_factory=list[Load])
    pending: int = 0  # jobs
    arrived: set[Load] = field(default_factory=set[Load])
    failed: dict[Load, Exception] = field(default_factory=dict[Load, Exception])
    num_settled: int = 0  # of the loads, in order: they are the tree's, or given up
    host_tokens: int = 0
    disk_tokens: int = 0
    read_bytes: int = 0  # as they lie in their tiers
    began_s: float = 0.0
    elapsed_s: float = 0.0  # from the plan to the last byte; not the time until the engine takes note
    is_done: bool = False

    @property
    def slowest_tier(self) -> str:
        """Of those that it reads from."""
        return "disk" if any(load.record is not None for load in self.loads) else "host"


class Restorer:
    """Owns the restores in flight."""

    def __init__(
        self,
        device: DeviceTier,
        transfer: Transfer,
        mover: Mover,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        forget: Callable[[list[Node]], None],
        ended: Callable[["Restore"], None],
    ) -> None:
        self.device = device
        self.transfer = transfer
        self.mover = mover
        self.host = host
        self.disk = disk
        self.forget = forget
        self.ended = ended
        self.in_flight: dict[Node, Restore] = {}  # by the node it ends at
        self._num_started = 0

    def owners(self) -> list[Resources]:
        """For the ledger and the idle proof."""
        return [restore.resources for restore in self.in_flight.values()]

    def needs(self, match: Match) -> tuple[int, int]:
        """Blocks and slots that restoring the match's deeper part takes."""
        assert match.deeper is not None
        blocks = sum(node.block_id is None for node in match.deeper.nodes)
        return blocks, int(bool(self.device.layout.slots) and match.deeper.nodes[-1].checkpoint is None)

    def start(self, match: Match) -> Restore:
        """Begins to load the match's deeper part, or joins a restore that ends at the same node.

        The caller has checked that the blocks and the slot it `needs` are available.
        """
        assert match.deeper is not None
        target, began_s = match.deeper.nodes[-1], time.perf_counter()
        if target in self.in_flight:
            return self.in_flight[target]
        self._num_started += 1
        resources = Resources(f"restore:{self._num_started}")
        missing = [node for node in match.deeper.nodes if node.block_id is None]
        resident = [*match.nodes, *(node for node in match.deeper.nodes if node.block_id is not None)]
        if resident:
            self.device.hold_path(resources, resident[-1])
        num_blocks, num_slots = self.needs(match)
        blocks = sorted(self.device.take_blocks(resources, num_blocks))  # neighbours are copied together
        wanted = [(node, block, False) for node, block in zip(missing, blocks, strict=True)]
        if num_slots:
            wanted.append((target, self.device.take_slot(resources), True))
        restore = Restore(resources, target, began_s=began_s)
        self.in_flight[target] = restore
        fence = self.transfer.fence()
        loads = (self._load(resources, *where) for where in wanted)
        for batch in self._batches(loads):  # each is on its way before the next one is worked out
            restore.loads += batch
            restore.pending += 1
            self.mover.submit(self._job(restore, batch, fence))
            time.sleep(HAND_OVER_S)
        return restore

    def _load(self, resources: Resources, node: Node, target: int, is_state: bool) -> Load:
        copy, ref = (node.host_state, node.disk_state) if is_state else (node.host_block, node.disk_block)
        if copy is not None:
            assert self.host is not None
            self.host.hold(resources, copy)
            return Load(node, is_state, target, copy.chunks, None)
        assert ref is not None
        assert self.disk is not None
        kind = RecordKind.CHECKPOINT if is_state else RecordKind.BLOCK
        return Load(node, is_state, target, None, (self.disk.head(node, kind), ref))

    def _batches(self, loads: Iterator[Load]) -> Iterator[list[Load]]:
        """Loads in jobs: neighbours that come from one tier."""
        layout = self.device.layout
        batch: list[Load] = []
        size = 0
        for load in loads:
            num_bytes = layout.slot_bytes if load.is_state else layout.block_bytes
            most = JOB_BYTES if load.chunks is None else HOST_JOB_BYTES
            if batch and (size + num_bytes > most or (load.chunks is None) is not (batch[0].chunks is None)):
                yield batch
                batch, size = [], 0
            batch.append(load)
            size += num_bytes
        yield batch

    def _job(self, restore: Restore, batch: Sequence[Load], fence: Fence) -> Job:
        failures: dict[Load, Exception] = {}
        began_s = ended_s = 0.0

        def work() -> None:
            nonlocal began_s, ended_s
            began_s = time.perf_counter()
            if batch[0].chunks is not None:
                self._from_host(batch, fence)
            else:
                failures.update(self._from_disk(batch, fence))
            ended_s = time.perf_counter()

        def done(error: Exception | None) -> None:
            took_s = max(ended_s - began_s, 0.0)
            restore.elapsed_s = max(restore.elapsed_s, ended_s - restore.began_s)
            restore.failed.update(failures if error is None else dict.fromkeys(batch, error))
            restore.arrived.update(load for load in batch if load not in restore.failed)
            restore.pending -= 1
            self._count(restore, batch, took_s)
            self._settle_arrived(restore)
            if restore.pending == 0:
                self._finish(restore)

        return Job(Priority.RESTORE, work, done)

    def _from_host(self, batch: Sequence[Load], fence: Fence) -> None:
        self.transfer.to_device([(load.chunks, load.image) for load in batch if load.chunks is not None], fence)
        self.transfer.arrived()

    def _from_disk(self, batch: Sequence[Load], fence: Fence) -> dict[Load, Exception]:
        assert self.disk is not None
        landings = self.transfer.landings([load.image for load in batch])
        requests = [
            (*load.record, landing) for load, landing in zip(batch, landings, strict=True) if load.record is not None
        ]
        failures: dict[Load, Exception] = {}
        for load, landing, flaw in zip(batch, landings, self.disk.store.read(requests), strict=True):
            if flaw is None:
                self.transfer.land(load.image, landing, fence)
            else:
                failures[load] = flaw
        self.transfer.arrived()
        return failures

    def _settle_arrived(self, restore: Restore) -> None:
        """What has arrived becomes the tree's, in order, up to the first that has not."""
        device, size = self.device, self.device.layout.block_size
        for load in restore.loads[restore.num_settled :]:
            node = load.node
            if load not in restore.arrived or node.parent is None:  # unlinked: another record of its path was damaged
                return
            restore.num_settled += 1
            if load.is_state:
                if node.checkpoint is None:
                    device.give_checkpoint(restore.resources, node, load.target)
            elif node.block_id is not None:  # someone computed it meanwhile: held as what comes after it will be
                device.adopt(restore.resources, load.target, node)
            else:
                device.attach(restore.resources, node, load.target)
                if load.chunks is not None:
                    restore.host_tokens += size
                else:
                    restore.disk_tokens += size

    def _finish(self, restore: Restore) -> None:
        """Nothing is on its way any more: what could not be read is set aside, the rest goes back."""
        for load in restore.loads:
            if load in restore.failed and load.record is not None:
                self.set_aside(load.node, load.record[1], restore.failed[load])
        if self.host is not None:
            self.host.stats.hit_tokens += restore.host_tokens
        if self.disk is not None:
            self.disk.stats.hit_tokens += restore.disk_tokens
        del self.in_flight[restore.target]
        restore.is_done = True
        self.ended(restore)
        restore.resources.release()

    def set_aside(self, node: Node, ref: RecordRef, flaw: Exception) -> bool:
        """A record that could not be read is no copy any more, and what that leaves without bytes is forgotten.

        False where the node does not have this record any more, or where the disk was not asked: nothing is known
        against the record then, and it is good for later.
        """
        if node.parent is None or self.disk is None or is_refusal(flaw):
            return False
        reason = str(flaw) or repr(flaw)
        if node.disk_state == ref:
            self.disk.quarantine_state(node, reason)
        elif node.disk_block == ref:
            self.disk.quarantine_block(node, reason)
            if not node.has_block:
                self.forget(self.device.tree.prune(node))
        else:
            return False
        return True

    def _count(self, restore: Restore, batch: Sequence[Load], took_s: float) -> None:
        """What one job read, all of it from one tier."""
        layout = self.device.layout
        tier = self.host if batch[0].chunks is not None else self.disk
        assert tier is not None
        stats = tier.stats
        tier.meters.read_s.observe(took_s)
        stats.reads += len(batch)
        stats.read_s += took_s
        for load in batch:
            image_bytes = layout.slot_bytes if load.is_state else layout.block_bytes
            num_bytes = load.record[1].stored_bytes if load.record is not None else image_bytes
            stats.read_bytes += num_bytes
            restore.read_bytes += num_bytes
