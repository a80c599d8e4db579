"""The prefix cache over all tiers: one tree, the tiers' books, and what moves between them.

Everything here is called by the thread that owns the books; bytes move on the mover's threads. A daemon with the device
alone has the same cache with no tier below: nothing is ever restored, written down or swapped.
"""

from collections.abc import Sequence
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
        self.swapper = Swapper(device, self.host, transfer) if self.host is not None else None
        device.forget = self.forget

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way between the tiers, and nothing waits to be."""
        return not self.restorer.in_flight and self.writedown.is_idle and self.mover.num_pending == 0

    @property
    def holds_device(self) -> bool:
        """Transfers keep blocks on the device that will be free again without anybody's doing."""
        return bool(self.restorer.in_flight) or not self.writedown.is_idle

    def poll(self, now: float) -> None:
        """Takes in what has arrived, and plans what may be written next."""
        self.mover.poll()
        self.writedown.pump(now)

    def offer(self, node: Node) -> None:
        """A prefix is worth keeping below the device."""
        if self.host is not None or self.disk is not None:
            self.writedown.offer(node)

    def wants(self, match: Match) -> bool:
        """There is more below the device, and loading it is worth while."""
        return match.deeper is not None

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
        """Ends the transfers; waits for those that have begun."""
        self.mover.close()

    def check(self) -> None:
        """Raises AssertionError where the books of a tier, or two tiers', disagree."""
        self.device.check()
        if self.host is not None:
            self.host.check()
        if self.disk is not None:
            self.disk.check()
