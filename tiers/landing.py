"""Bringing records of a prefix from disk to the spill, for a sequence that neither device nor host tier can hold.

A landing owns its extents until whoever asked for it has taken them over, or until its last job has ended. Records are
read grid chunk by grid chunk, so that no more of the prefix is in memory than threads read at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiers.disk import DiskTier
from tiers.layout import StateLayout
from tiers.mover import Job, Mover, Priority
from tiers.records import RecordHead, RecordKind, RecordRef
from tiers.resources import Resources
from tiers.spill import Extent, Spill
from tiers.tree import Node

_Wanted = tuple[Node, RecordHead, RecordRef]


@dataclass(slots=True, eq=False)
class Landing:
    """A prefix's grid chunks on their way, each by the position of its first block."""

    resources: Resources
    extents: dict[int, Extent]
    state: memoryview | None  # of the last node's checkpoint, once it is there; None where it was not asked for
    pending: int  # jobs
    failed: list[tuple[Node, RecordRef, Exception]] = field(default_factory=list[tuple[Node, RecordRef, Exception]])
    error: Exception | None = None  # the spill took no blocks
    is_wanted: bool = True

    @property
    def is_done(self) -> bool:
        """All has come, or failed."""
        return self.pending == 0

    @property
    def is_whole(self) -> bool:
        """All has come."""
        return self.is_done and not self.failed and self.error is None


class Lander:
    """Owns the landings until they are taken over."""

    def __init__(
        self,
        layout: StateLayout,
        spill: Spill,
        disk: DiskTier,
        mover: Mover,
        *,
        set_aside: Callable[[Node, RecordRef, Exception], bool],
    ) -> None:
        self.layout = layout
        self.set_aside = set_aside
        self.spill = spill
        self.disk = disk
        self.mover = mover
        self.in_flight: list[Landing] = []
        self._num_started = 0

    def owners(self) -> list[Resources]:
        """For the ledger and the idle proof."""
        return [landing.resources for landing in self.in_flight]

    def start(self, chunks: dict[int, Sequence[Node]], state_of: Node | None) -> Landing | None:
        """Begins to read whole grid chunks of blocks, by position of the first, and a checkpoint; all have records.

        None where the spill has no room.
        """
        self._num_started += 1
        resources = Resources(f"landing:{self._num_started}")
        extents: dict[int, Extent] = {}
        for first in chunks:
            extent = self.spill.take(resources)
            if extent is None:
                resources.release()
                return None
            extents[first] = extent
        state = memoryview(bytearray(self.layout.slot_bytes)) if state_of is not None else None
        landing = Landing(resources, extents, state, pending=len(chunks) + (state is not None))
        self.in_flight.append(landing)
        for first, nodes in chunks.items():
            self.mover.submit(self._job(landing, self._wants(nodes), extents[first]))
        if state_of is not None and state is not None:
            assert state_of.disk_state is not None
            head = self.disk.head(state_of, RecordKind.CHECKPOINT)
            self.mover.submit(self._job(landing, [(state_of, head, state_of.disk_state)], None))
        return landing

    def end(self, landing: Landing) -> None:
        """Whoever asked has what it wants of it, or wants it no more; jobs that are under way end first."""
        if landing.is_wanted and landing.is_whole:
            self.disk.stats.hit_tokens += len(landing.extents) * self.spill.chunk_blocks * self.layout.block_size
        landing.is_wanted = False
        if landing.is_done:
            self.in_flight.remove(landing)
            landing.resources.release()

    def _wants(self, nodes: Sequence[Node]) -> list[_Wanted]:
        wanted: list[_Wanted] = []
        for node in nodes:
            assert node.disk_block is not None
            wanted.append((node, self.disk.head(node, RecordKind.BLOCK), node.disk_block))
        return wanted

    def _job(self, landing: Landing, wanted: Sequence[_Wanted], extent: Extent | None) -> Job:
        failed: list[tuple[Node, RecordRef, Exception]] = []
        took_s = 0.0

        def work() -> None:
            nonlocal took_s
            if not landing.is_wanted:
                return
            began = time.perf_counter()
            images = self._buffers(len(wanted)) if landing.state is None or extent is not None else [landing.state]
            requests = [(head, ref, image) for (_, head, ref), image in zip(wanted, images, strict=True)]
            flaws = self.disk.store.read(requests)
            failed.extend((node, ref, f) for (node, _, ref), f in zip(wanted, flaws, strict=True) if f is not None)
            if extent is not None and not failed:
                self.spill.write(extent, images)
            took_s = time.perf_counter() - began

        def done(error: Exception | None) -> None:
            landing.pending -= 1
            landing.failed += failed
            for node, ref, flaw in failed:  # whether or not somebody still waits for it
                self.set_aside(node, ref, flaw)
            landing.error = landing.error or error
            self.disk.meters.read_s.observe(took_s)
            self.disk.stats.reads += len(wanted)
            self.disk.stats.read_s += took_s
            self.disk.stats.read_bytes += sum(ref.stored_bytes for _, _, ref in wanted)
            if not landing.is_wanted and landing.is_done:
                self.end(landing)

        return Job(Priority.RESTORE, work, done)

    def _buffers(self, count: int) -> list[memoryview]:
        return [memoryview(bytearray(self.layout.block_bytes)) for _ in range(count)]
