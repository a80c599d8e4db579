"""The prefix cache over all tiers: one tree, the tiers' books, and what moves between them.

Everything here is called by the thread that owns the books; bytes move on the mover's threads. A daemon with the device
alone has the same cache with no tier below: nothing is ever restored, written down or swapped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiers.device import DeviceTier, Match
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import Mover
from tiers.resources import Resources
from tiers.restore import Restore, Restorer
from tiers.swap import Swapped, Swapper
from tiers.transfer import Transfer
from tiers.tree import Node
from tiers.writedown import WriteDown, WriteLimits


@dataclass(frozen=True, slots=True)
class Choice:
    """Load or compute, and why not to load."""

    is_worth: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What is below the device; None: there is no such tier."""

    host: HostTier | None = None
    disk: DiskTier | None = None


class TieredCache:
    """Owns the traffic between the tiers; the tiers own their books."""

    def __init__(
        self, device: DeviceTier, transfer: Transfer, mover: Mover, *, lower: LowerTiers, limits: WriteLimits
    ) -> None:
        self.device = device
        self.host = lower.host
        self.disk = lower.disk
        self.mover = mover
        self.restorer = Restorer(device, transfer, mover, host=self.host, disk=self.disk, forget=self.forget)
        self.writedown = WriteDown(device, transfer, mover, host=self.host, disk=self.disk, limits=limits)
        self.host_refusals = 0  # hits not loaded from there because computing was faster
        self.disk_refusals = 0
        self.swapper = Swapper(device, self.host, transfer) if self.host is not None else None
        device.forget = self.forget

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers there are, fastest first."""
        host, disk = ("host",) if self.host is not None else (), ("disk",) if self.disk is not None else ()
        return ("device", *host, *disk)

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way between the tiers, and nothing waits to be."""
        return not self.restorer.in_flight and self.writedown.is_idle and self.mover.num_pending == 0

    @property
    def holds_device(self) -> bool:
        """Transfers keep blocks on the device that will be free again without anybody's doing."""
        return bool(self.restorer.in_flight) or not self.writedown.is_idle

    def poll(self, now: float, unix_s: float) -> None:
        """Takes in what has arrived, and plans what may be written next.

        Args:
            now: seconds of a clock that only grows.
            unix_s: seconds since the epoch, for what outlives the process.
        """
        self.device.tree.time_s = unix_s
        self.mover.poll()
        self.writedown.pump(now)

    def offer(self, node: Node) -> None:
        """A prefix is worth keeping below the device."""
        if self.host is not None or self.disk is not None:
            self.writedown.offer(node)

    def weigh(self, match: Match, compute_s: Callable[[int, int], float]) -> Choice:
        """Whether to load what is below the device, or to compute it.

        Args:
            compute_s: seconds that positions [start, end) of a prompt take here; 0 where that is not known yet.
        """
        if match.deeper is None:
            return Choice(False, "nothing is below")
        return Choice(True, "")

    def block_bytes_in(self, node: Node) -> int:
        """Bytes to be moved for a node's block, from its fastest tier; on the device, as it lies there."""
        if node.block_id is not None or node.host_block is not None or node.disk_block is None:
            return self.device.layout.block_bytes
        return node.disk_block.stored_bytes

    def state_bytes_in(self, node: Node) -> int:
        """The same for its checkpoint."""
        if node.checkpoint is not None or node.host_state is not None or node.disk_state is None:
            return self.device.layout.slot_bytes
        return node.disk_state.stored_bytes

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds that bytes take from a tier to the device, as far as has been seen; 0 where nothing was."""
        stats = {"host": self.host and self.host.stats, "disk": self.disk and self.disk.stats}.get(tier)
        if not stats or not stats.read_bytes:
            return 0.0
        return num_bytes * stats.read_s / stats.read_bytes

    def written(self) -> tuple[int, int]:
        """Records and bytes written to disk since start-up; to the host tier where there is no disk."""
        if self.disk is not None:
            return self.disk.stats.writes, self.disk.stats.written_bytes
        return (self.host.stats.writes, self.host.stats.written_bytes) if self.host is not None else (0, 0)

    def swap_out(
        self, owner: str, block_ids: Sequence[int], nodes: Sequence[Node], slot: int, computed_len: int
    ) -> Swapped | None:
        """A sequence's state, moved to the host; None where there is no host tier or no room in it."""
        if self.swapper is None:
            return None
        return self.swapper.out(owner, block_ids, nodes, slot, computed_len)

    def fetch(self, match: Match) -> Restore:
        """Begins to bring back the deeper part of a match, or joins who does."""
        return self.restorer.start(match)

    def forget(self, nodes: list[Node]) -> None:
        """Nodes that are out of the tree: what they have in the lower tiers goes back."""
        for node in nodes:
            if self.host is not None:
                if node.host_block is not None:
                    self.host.drop_block(node)
                if node.host_state is not None:
                    self.host.drop_state(node)
            if self.disk is not None:
                if node.disk_block is not None:
                    self.disk.drop_block(node)
                if node.disk_state is not None:
                    self.disk.drop_state(node)

    def owners(self) -> list[Resources]:
        """Who holds something besides the sequences."""
        return self.restorer.owners() + self.writedown.owners()

    def close(self) -> None:
        """Ends the transfers, waiting for those that have begun, and gives the disk back."""
        self.mover.close()
        if self.disk is not None:
            self.disk.store.close()

    def check(self) -> None:
        """Raises AssertionError where the books of a tier, or two tiers', disagree."""
        self.device.check()
        if self.host is not None:
            self.host.check()
        if self.disk is not None:
            self.disk.check()
