"""Bringing records of a prefix from disk to the host tier, for a sequence that is too large to have it on the device.

The sequence then reads the blocks where they are. What arrives is the tree's; a record that failed is set aside.
"""

import time
from collections.abc import Sequence

from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.layout import StateLayout
from tiers.mover import Job, Mover, Priority
from tiers.records import RecordHead, RecordKind, RecordRef
from tiers.resources import Resources
from tiers.restore import JOB_BYTES, Load, Restore, Restorer
from tiers.transfer import Transfer
from tiers.tree import Node

NOWHERE = -1  # no block of the device is its target


class Lifter:
    """Owns the lifts in flight. Tells what failed to the restorer, which sets it aside."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier,
        *,
        layout: StateLayout,
        transfer: Transfer,
        restorer: Restorer,
        mover: Mover,
    ) -> None:
        self.layout = layout
        self.host = host
        self.disk = disk
        self.transfer = transfer
        self.restorer = restorer
        self.mover = mover
        self.in_flight: dict[Node, Restore] = {}
        self._num_started = 0

    def owners(self) -> list[Resources]:
        """For the ledger and the idle proof."""
        return [lift.resources for lift in self.in_flight.values()]

    def start(self, nodes: Sequence[Node]) -> Restore | None:
        """Begins to lift what these nodes, a path, and the state of the last lack in the host tier, or joins who does.

        None where that has no room, or no record to read.
        """
        target = nodes[-1]
        if target in self.in_flight:
            return self.in_flight[target]
        self._num_started += 1
        resources = Resources(f"lift:{self._num_started}")
        loads: list[Load] = []
        for node in nodes:
            if node.host_block is not None:
                self.host.hold(resources, node.host_block)
        wanted = [(node, False) for node in nodes if node.block_id is None and node.host_block is None]
        if self.layout.slots and target.checkpoint is None and target.host_state is None:
            wanted.append((target, True))
        for node, is_state in wanted:
            load = self._load(resources, node, is_state=is_state)
            if load is None:
                resources.release()
                return None
            loads.append(load)
        per_job = max(1, JOB_BYTES // self.layout.block_bytes)
        batches = [loads[i : i + per_job] for i in range(0, len(loads), per_job)]
        lift = Restore(resources, target, loads, pending=len(batches), began_s=time.perf_counter())
        self.in_flight[target] = lift
        for batch in batches:
            self.mover.submit(self._job(lift, batch))
        return lift

    def _load(self, resources: Resources, node: Node, *, is_state: bool) -> Load | None:
        ref = (node.disk_state if is_state else node.disk_block) if self.disk.gives_reads else None
        num_bytes = self.layout.slot_bytes if is_state else self.layout.block_bytes
        chunks = None if ref is None else self.host.take_for(resources, self.host.chunks_for(num_bytes))
        if ref is None or chunks is None:
            return None
        kind = RecordKind.CHECKPOINT if is_state else RecordKind.BLOCK
        return Load(node, is_state, NOWHERE, chunks, (self.disk.head(node, kind), ref))

    def _job(self, lift: Restore, batch: Sequence[Load]) -> Job:
        failures: dict[Load, Exception] = {}
        took_s = 0.0

        def work() -> None:
            nonlocal took_s
            began = time.perf_counter()
            failures.update(self._read(batch))
            took_s = time.perf_counter() - began

        def done(error: Exception | None) -> None:
            lift.failed.update(failures if error is None else dict.fromkeys(batch, error))
            lift.pending -= 1
            self._count(lift, batch, took_s)
            if lift.pending == 0:
                self._finish(lift)

        return Job(Priority.RESTORE, work, done)

    def _read(self, batch: Sequence[Load]) -> dict[Load, Exception]:
        """Blocks land in their chunks; a state, which may have several, by way of memory of its own."""
        requests: list[tuple[RecordHead, RecordRef, memoryview]] = []
        for load in batch:
            assert load.record is not None
            assert load.chunks is not None
            own = memoryview(bytearray(self.layout.slot_bytes)) if load.is_state else None
            landing = own or self.transfer.view_chunks(load.chunks, self.layout.block_bytes)
            requests.append((*load.record, landing))
        failures: dict[Load, Exception] = {}
        for load, request, flaw in zip(batch, requests, self.disk.store.read(requests), strict=True):
            if flaw is not None:
                failures[load] = flaw
            elif load.is_state and load.chunks is not None:
                size = self.host.chunk_bytes
                for number, chunk in enumerate(load.chunks):
                    piece = request[2][number * size : (number + 1) * size]
                    self.transfer.view_chunks((chunk,), len(piece))[:] = piece
        return failures

    def _count(self, lift: Restore, batch: Sequence[Load], took_s: float) -> None:
        read_bytes = sum(load.record[1].stored_bytes for load in batch if load.record is not None)
        lift.read_bytes += read_bytes
        self.disk.meters.read_s.observe(took_s)
        self.disk.stats.reads += len(batch)
        self.disk.stats.read_s += took_s
        self.disk.stats.read_bytes += read_bytes

    def _finish(self, lift: Restore) -> None:
        for load in lift.loads:
            node, has_copy = load.node, (load.node.host_state if load.is_state else load.node.host_block) is not None
            assert load.record is not None
            assert load.chunks is not None
            if load in lift.failed:
                self.restorer.set_aside(node, load.record[1], lift.failed[load])
            elif node.parent is not None and not has_copy:
                self.host.give(lift.resources, node, load.chunks, is_state=load.is_state)
                lift.disk_tokens += 0 if load.is_state else self.layout.block_size
        self.disk.stats.hit_tokens += lift.disk_tokens
        del self.in_flight[lift.target]
        lift.elapsed_s = time.perf_counter() - lift.began_s
        lift.is_done = True
        self.restorer.ended(lift)
        lift.resources.release()
