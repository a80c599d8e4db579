"""Sequences larger than the device: one address space for the blocks of all tiers, and moving blocks down in it.

A block id names a block wherever it is: `[0, first_host)` on the device, `[first_host, first_spill)` a chunk of the
host arena, and from there on a block of the spill. A sequence's table may hold any of them, in any order; the rows that
a forward writes lie on the device. So what moves down changes an entry of a table, and nothing that reads through it.

Blocks move by grid chunks, in jobs: `begin` plans one and holds its source and its target; once `is_done`, and while no
forward of the sequence is in flight, `apply` exchanges the ids. Whatever becomes of the sequence meanwhile, the
job's own resources keep both ends until it has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from tiers.copies import HostCopy
from tiers.device import DeviceTier
from tiers.host import HostTier
from tiers.landing import Landing
from tiers.mover import Job, Mover, Priority
from tiers.recorder import ReadImage, Trail
from tiers.resources import Resources
from tiers.spill import Extent, Spill
from tiers.transfer import Fence, Image, Transfer
from tiers.tree import Node


class Tier(IntEnum):
    """Where a block is, in the order of the address space."""

    DEVICE = 0
    HOST = 1
    SPILL = 2


@dataclass(frozen=True, slots=True)
class BlockSpace:
    """Where each tier's ids begin."""

    first_host: int
    first_spill: int

    def tier_of(self, block_id: int) -> Tier:
        if block_id < self.first_host:
            return Tier.DEVICE
        return Tier.HOST if block_id < self.first_spill else Tier.SPILL


Below = HostCopy | Extent
"""What a sequence holds of a lower tier: one block of the arena, or a grid chunk of the spill."""


@dataclass(slots=True)
class StreamStats:
    """Counters: of one forward, or since start-up."""

    host_bytes: int = 0  # read from below the device
    disk_bytes: int = 0
    picked: int = 0  # parts of blocks on disk that selection wanted
    picked_hits: int = 0  # those that the cache had
    elapsed_s: float = 0.0  # spent waiting for them, copying included

    @property
    def num_bytes(self) -> int:
        """From all tiers."""
        return self.host_bytes + self.disk_bytes

    @property
    def bytes_per_s(self) -> float | None:
        """None where nothing was read."""
        return self.num_bytes / self.elapsed_s if self.num_bytes and self.elapsed_s else None

    def add(self, other: "StreamStats") -> None:
        """Both together."""
        self.host_bytes += other.host_bytes
        self.disk_bytes += other.disk_bytes
        self.picked += other.picked
        self.picked_hits += other.picked_hits
        self.elapsed_s += other.elapsed_s


@dataclass(slots=True, eq=False)
class Lowering:
    """A grid chunk of blocks on its way down: `targets` are the ids that it will have there."""

    resources: Resources
    first: int  # block position in the sequence's table
    targets: list[int]
    below: list[Below]
    is_wanted: bool = True
    is_done: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """What a sequence that is larger than the device has below it."""

    tail: int  # block position where its resident tail begins; a grid position
    below: list[Below] = field(default_factory=list[Below])
    lowering: Lowering | None = None
    landing: Landing | None = None  # of what its prompt's beginning has on disk
    has_lost: bool = False  # that did not come, or not in time
    trail: Trail | None = None  # of its prompt's chunks that are to be recorded
    states: dict[int, HostCopy | memoryview] = field(default_factory=dict[int, "HostCopy | memoryview"])  # by position
    has_state: bool = False  # its slot was filled when it was admitted
    stats: StreamStats = field(default_factory=StreamStats)  # of all its forwards
    last_row: StreamStats = field(default_factory=StreamStats)  # of the last one
    last_turn: int = 0
    is_stuck: bool = False  # its blocks find no room below
    has_failed: bool = False  # they could not be written there, and it is not tried again


class Residency:
    """Owns the moves in flight. `spill` and `host` may be None, not both."""

    def __init__(
        self, device: DeviceTier, transfer: Transfer, mover: Mover, *, host: HostTier | None, spill: Spill | None
    ) -> None:
        self.device = device
        self.transfer = transfer
        self.mover = mover
        self.host = host
        self.spill = spill
        num_chunks = 0 if host is None else host.chunks.size
        self.space = BlockSpace(device.blocks.size, device.blocks.size + num_chunks)
        self.chunk_blocks = device.grid // device.layout.block_size
        self._in_flight: list[Lowering] = []
        self._num_started = 0

    def owners(self) -> list[Resources]:
        """For the ledger and the idle proof."""
        return [lowering.resources for lowering in self._in_flight]

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._in_flight

    @property
    def most_blocks(self) -> int:
        """Blocks that the lower tiers could hold."""
        host = 0 if self.host is None else self.host.chunks.size
        return host + (0 if self.spill is None else self.spill.num_blocks)

    def hold(self, resources: Resources, below: Below) -> None:
        """One more owner of what lies below."""
        if isinstance(below, Extent):
            assert self.spill is not None
            self.spill.hold(resources, below)
        else:
            assert self.host is not None
            self.host.hold(resources, below)

    def ids(self, below: Below) -> list[int]:
        """The block ids that it stands for."""
        if isinstance(below, Extent):
            first = self.space.first_spill + below.number * self.chunk_blocks
            return list(range(first, first + self.chunk_blocks))
        (chunk,) = below.chunks
        return [self.space.first_host + chunk]

    def begin(self, owner: str, table: Sequence[int], nodes: Sequence[Node], first: int) -> Lowering | None:
        """Begins to move the blocks [first, first + chunk_blocks) of a table down; None where there is no room.

        `nodes` are those of the table's first blocks. The host tier is filled first, then the spill.
        """
        blocks = table[first : first + self.chunk_blocks]
        held = [nodes[p] if p < len(nodes) else None for p in range(first, first + len(blocks))]
        self._num_started += 1
        resources = Resources(f"lower:{self._num_started}:{owner}")
        below = self._host_copies(resources, held)
        if below is None and self.spill is not None:
            extent = self.spill.take(resources)
            below = None if extent is None else list[Below]([extent])
        if below is None:
            resources.release()
            return None
        self._hold_source(resources, blocks, held)
        targets = [id_ for part in below for id_ in self.ids(part)]
        lowering = Lowering(resources, first, targets, below)
        self._in_flight.append(lowering)
        self.mover.submit(self._job(lowering, blocks, held))
        return lowering

    def apply(self, lowering: Lowering, resources: Resources, table: list[int]) -> None:
        """The table's entries become those below; the blocks on the device are held no more by `resources`."""
        assert lowering.is_done
        assert lowering.error is None
        for part in lowering.below:
            self.hold(resources, part)
        for offset, target in enumerate(lowering.targets):
            position = lowering.first + offset
            resources.drop("block", table[position])
            table[position] = target

    def end(self, lowering: Lowering) -> None:
        """What the job held goes back, its bytes being whoever's took them over, or nobody's."""
        self._in_flight.remove(lowering)
        lowering.resources.release()

    def abandon(self, lowering: Lowering) -> None:
        """Its sequence has ended: what it held goes back once the job is done."""
        if lowering.is_done:
            self.end(lowering)
        else:
            lowering.is_wanted = False

    def readers(self, below: Below) -> list[ReadImage]:
        """How the images of its blocks are read, on an I/O thread, while somebody holds it."""
        if isinstance(below, Extent):
            assert self.spill is not None
            first = below.number * self.chunk_blocks
            return [partial(self.spill.image, block) for block in range(first, first + self.chunk_blocks)]
        return [partial(self.transfer.view_chunks, below.chunks, self.device.layout.block_bytes)]

    def state_reader(self, state: "HostCopy | memoryview") -> ReadImage:
        """The same of a state that was saved."""
        if isinstance(state, memoryview):
            return lambda: state
        return partial(self.transfer.view_chunks, state.chunks, self.device.layout.slot_bytes)

    def save_state(self, resources: Resources, slot: int) -> "HostCopy | memoryview":
        """A copy of a slot in the host tier, held by `resources`, or where that has no room in memory of its own."""
        fence = self.transfer.fence()
        num_chunks = 0 if self.host is None else self.host.chunks_for(self.device.layout.slot_bytes)
        chunks = None if self.host is None else self.host.take(num_chunks)
        if self.host is None or chunks is None:
            return memoryview(bytes(self.transfer.view(Image(slot, is_state=True), fence)))
        copy = HostCopy(chunks)
        self.host.hold(resources, copy)
        self.transfer.to_host(Image(slot, is_state=True), chunks, fence)
        return copy

    def put_state(self, state: memoryview, slot: int) -> None:
        """Bytes of a state become those of a slot."""
        fence, image = self.transfer.fence(), Image(slot, is_state=True)
        (landing,) = self.transfer.landings([image])
        landing[:] = state
        self.transfer.land(image, landing, fence)
        self.transfer.arrived()

    def load_state(self, node: Node, slot: int) -> None:
        """The state at a node, from the host tier."""
        assert node.host_state is not None
        self.transfer.to_device([(node.host_state.chunks, Image(slot, is_state=True))], self.transfer.fence())
        self.transfer.arrived()

    def _hold_source(self, resources: Resources, blocks: Sequence[int], nodes: Sequence[Node | None]) -> None:
        """Of blocks that the tree has on the device, all above them too: it holds no block without the path to it."""
        shared = [
            node for block, node in zip(blocks, nodes, strict=True) if node is not None and node.block_id == block
        ]
        if shared:
            self.device.hold_path(resources, shared[-1])
        for block, node in zip(blocks, nodes, strict=True):
            if node not in shared:
                self.device.share_block(resources, block, None)

    def _host_copies(self, resources: Resources, nodes: Sequence[Node | None]) -> list[Below] | None:
        """A copy of the arena for each block: the tree's where it has one, else one to be filled."""
        if self.host is None:
            return None
        known = [None if node is None else node.host_block for node in nodes]
        for copy in known:
            if copy is not None:
                self.host.hold(resources, copy)
        copies: list[Below] = []
        for copy in known:
            if copy is None:
                chunks = self.host.take(1)
                if chunks is None:
                    resources.release()
                    return None
                copy = HostCopy(chunks)
                self.host.hold(resources, copy)
            copies.append(copy)
        return copies

    def _job(self, lowering: Lowering, blocks: Sequence[int], nodes: Sequence[Node | None]) -> Job:
        fence = self.transfer.fence()
        copies = [node.host_block if node is not None else None for node in nodes]

        def work() -> None:
            first = lowering.below[0]
            if isinstance(first, Extent):
                self._to_spill(first, blocks, fence)
                return
            for block_id, copy, known in zip(blocks, lowering.below, copies, strict=True):
                assert isinstance(copy, HostCopy)
                if copy is not known:
                    self.transfer.to_host(Image(block_id, is_state=False), copy.chunks, fence)

        def done(error: Exception | None) -> None:
            lowering.is_done, lowering.error = True, error
            if not lowering.is_wanted:
                self.end(lowering)

        return Job(Priority.RESTORE, work, done)

    def _to_spill(self, extent: Extent, blocks: Sequence[int], fence: Fence) -> None:
        assert self.spill is not None
        self.spill.write(extent, [self.transfer.view(Image(block, is_state=False), fence) for block in blocks])
