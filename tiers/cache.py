"""The prefix cache over all tiers: one tree, the tiers' books, and what moves between them.

Everything here is called by the thread that owns the books; bytes move on the mover's threads. A daemon with the device
alone has the same cache with no tier below: nothing is ever restored, written down or swapped.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.eviction import Weights
from tiers.flops import ComputeCost
from tiers.gate import BreakEvenGate, PrefillSpeed, Verdict
from tiers.history import History
from tiers.host import HostTier
from tiers.landing import Lander
from tiers.lift import Lifter
from tiers.match import Match
from tiers.meters import LOOKUP_BOUNDS_S, EvictionReason, Histogram, TierMeters
from tiers.mover import Job, Mover, Priority
from tiers.record_store import RecordStore
from tiers.recorder import Recorder
from tiers.residency import Residency
from tiers.resources import Resources
from tiers.restore import Restore, Restorer
from tiers.spill import Spill
from tiers.swap import Swapped, Swapper
from tiers.transfer import Transfer
from tiers.tree import Node
from tiers.writedown import WriteDown, WriteLimits

log = logging.getLogger("downcore.tiers")


@dataclass(frozen=True, slots=True)
class Costs:
    """What the gates weigh against each other; loads are always taken where they are not gated."""

    cost: ComputeCost
    prefill: PrefillSpeed
    is_gated: bool


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What is below the device; None: there is no such tier."""

    host: HostTier | None = None
    disk: DiskTier | None = None
    spill: Spill | None = None  # room on disk for sequences larger than the device


class TieredCache:
    """Owns the traffic between the tiers; the tiers own their books."""

    def __init__(
        self,
        device: DeviceTier,
        transfer: Transfer,
        mover: Mover,
        *,
        lower: LowerTiers,
        limits: WriteLimits,
        costs: Costs,
    ) -> None:
        self.device = device
        self._now = 0.0
        self.host = lower.host
        self.disk = lower.disk
        self.mover = mover
        self.costs = costs
        self.history = History()
        self.lookup_s = Histogram(LOOKUP_BOUNDS_S)
        self.last_lookup_s = 0.0
        self.forgotten: Callable[[list[Node]], None] = _nobody_asks  # told of nodes that are out of the tree
        self.gates = {name: BreakEvenGate(costs.prefill) for name in self.names if name != "device"}
        self.restorer = Restorer(
            device, transfer, mover, host=self.host, disk=self.disk, forget=self.forget, ended=self._observe
        )
        self._is_probing = False
        self.writedown = WriteDown(device, transfer, mover, host=self.host, disk=self.disk, limits=limits)
        self.residency: Residency | None = None
        if lower.host is not None or lower.spill is not None:
            self.residency = Residency(device, transfer, mover, host=self.host, spill=lower.spill)
        self.lifter: Lifter | None = None
        if self.host is not None and self.disk is not None:
            self.lifter = Lifter(
                self.host, self.disk, layout=device.layout, transfer=transfer, restorer=self.restorer, mover=mover
            )
        self.lander: Lander | None = None
        self.recorder: Recorder | None = None
        if lower.spill is not None and self.disk is not None:
            self.lander = Lander(device.layout, lower.spill, self.disk, mover, set_aside=self.restorer.set_aside)
            self.recorder = Recorder(device, self.disk, mover, self.writedown)
            lower.spill.give_way = self.recorder.give_way
        self.host_refusals = 0  # hits not loaded from there because computing was faster
        self.disk_refusals = 0
        self.swapper = Swapper(device, self.host, transfer) if self.host is not None else None
        device.forget = self.forget
        if self.host is not None:
            self.host.forget = self.forget
        if self.disk is not None:
            self.disk.forget = self.forget
            if self.host is not None:
                self.disk.settle_above = self.host.settle

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers there are, fastest first."""
        host, disk = ("host",) if self.host is not None else (), ("disk",) if self.disk is not None else ()
        return ("device", *host, *disk)

    @property
    def meters(self) -> dict[str, TierMeters]:
        """Of each tier there is, by name."""
        tiers = {"device": self.device, "host": self.host, "disk": self.disk}
        return {name: tier.meters for name, tier in tiers.items() if tier is not None}

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way between the tiers, and nothing waits to be."""
        is_idle = not self.restorer.in_flight and self.writedown.is_idle and not self._is_moving
        is_recorded = self.recorder is None or self.recorder.is_idle
        return is_idle and is_recorded and self.mover.num_pending == 0

    @property
    def holds_device(self) -> bool:
        """Transfers keep blocks on the device that will be free again without anybody's doing."""
        return bool(self.restorer.in_flight) or not self.writedown.is_idle or self._is_moving

    @property
    def _is_moving(self) -> bool:
        is_lifting = self.lifter is not None and bool(self.lifter.in_flight)
        is_landing = self.lander is not None and bool(self.lander.in_flight)
        return is_lifting or is_landing or (self.residency is not None and not self.residency.is_idle)

    def poll(self, now: float, unix_s: float, *, is_busy: bool) -> None:
        """Takes in what has arrived, and plans what may be written next.

        Args:
            now: seconds of a clock that only grows.
            unix_s: seconds since the epoch, for what outlives the process.
            is_busy: steps have something to compute, and should not be slowed by what nobody waits for.
        """
        self.device.tree.time_s = unix_s
        self._now = now
        self.mover.poll()
        self.writedown.pump(now, is_busy=is_busy)
        if self.recorder is not None:
            self.recorder.pump()
        if self.disk is not None and not self._is_probing and self.gates["disk"].wants_probe(now):
            self._probe(self.disk)

    @property
    def longest_lens(self) -> tuple[int, ...]:
        """Tokens of the longest prefix that each tier below the device can hold, of those that can hold any."""
        sizes = [self.host.chunks.size * self.host.chunk_bytes] if self.host is not None else []
        sizes += [self.disk.store.quota_bytes] if self.disk is not None else []
        lengths = [self.device.appraiser.longest_len(num_bytes) for num_bytes in sizes]
        return tuple(longest for longest in lengths if longest)

    def offer(self, node: Node) -> None:
        """A prefix is worth keeping below the device. One that no tier there can hold would only push others out."""
        if any(node.depth * self.device.layout.block_size <= longest for longest in self.longest_lens):
            self.writedown.offer(node)

    def look_up(self, token_ids: Sequence[int], namespace: str, known: Node | None = None) -> Match:
        """How much of a prompt is on the device and below. Holds nothing; `last_lookup_s` is what it took.

        `known`: the last node of the match before this one.
        """
        began = time.perf_counter()
        match = self.device.lookup(token_ids, namespace, known=known)
        self.last_lookup_s = time.perf_counter() - began
        self.lookup_s.observe(self.last_lookup_s)
        return match

    def weigh(self, match: Match, *, is_forecast: bool = False) -> Verdict | None:
        """Whether to load what is below the device or to compute it; None where nothing is below.

        The slowest tier that has a part of it decides. A disk that does not read now is not asked. A forecast is for
        somebody who only wants to know: it changes no later decision.
        """
        if match.deeper is None:
            return None
        flops = self.costs.cost.flops(match.resume_len, match.deeper.resume_len)
        num_bytes = dict.fromkeys(self.gates, 0)
        for node in match.deeper.nodes:
            if node.block_id is None:
                num_bytes["host" if node.host_block is not None else "disk"] += self.block_bytes_in(node)
        last = match.deeper.nodes[-1]
        if self.device.layout.slots and last.checkpoint is None:
            num_bytes["host" if last.host_state is not None else "disk"] += self.state_bytes_in(last)
        slowest = "disk" if num_bytes.get("disk") else "host"
        gate, total_bytes = self.gates[slowest], sum(num_bytes.values())
        verdict = gate.forecast(total_bytes, flops) if is_forecast else gate.decide(total_bytes, flops)
        if slowest == "disk" and self.disk is not None and not self.disk.gives_reads:
            return replace(verdict, is_load=False, deadline_s=None)
        return verdict if self.costs.is_gated else replace(verdict, is_load=True, deadline_s=None)

    def refused(self, match: Match) -> None:
        """A prompt was admitted without the deeper part of its match, since computing it is faster."""
        assert match.deeper is not None
        if any(node.host_block is None and node.block_id is None for node in match.deeper.nodes):
            self.disk_refusals += 1
        else:
            self.host_refusals += 1

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
        gate = self.gates.get(tier)
        return (gate.load_s(num_bytes) or 0.0) if gate is not None else 0.0

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

    def reweigh(self, weights: Weights) -> None:
        """Other weights for the lowest tier, which is the one that is tuned."""
        lowest = self.disk or self.host
        for order in (lowest.order,) if lowest is not None else (self.device.leaves, self.device.states):
            order.reweigh(weights)

    def used(self, node: Node, gap_s: float) -> None:
        """A hit resumed at this node.

        Args:
            gap_s: usual time between uses from now on.
        """
        node.gap_s = gap_s
        self.settle(node)
        if self.disk is not None:
            self.disk.use(node)

    def settle(self, node: Node) -> None:
        """A pin came or went, or its worth has changed: what may be evicted is not what it was."""
        self.device.settle(node)
        if self.host is not None:
            self.host.settle(node)
        if self.disk is not None:
            self.disk.settle(node)

    def forget(self, nodes: list[Node]) -> None:
        """Nodes that are out of the tree: what they have in the lower tiers goes back."""
        for node in nodes:
            if self.host is not None:
                if node.host_block is not None:
                    self.host.drop_block(node, EvictionReason.ORPHANED)
                if node.host_state is not None:
                    self.host.drop_state(node, EvictionReason.ORPHANED)
            if self.disk is not None:
                if node.disk_block is not None:
                    self.disk.drop_block(node, EvictionReason.ORPHANED)
                if node.disk_state is not None:
                    self.disk.drop_state(node, EvictionReason.ORPHANED)
        self.forgotten(nodes)

    def _observe(self, restore: Restore) -> None:
        """A restore has ended: the gate of the slowest tier it read from learns from it."""
        if restore.read_bytes and not restore.failed:
            self.gates[restore.slowest_tier].observe(restore.read_bytes, restore.elapsed_s, self._now)

    def _probe(self, disk: DiskTier) -> None:
        """Reads one record that nobody waits for, so that a disk that was slow once is not refused for ever."""
        place = disk.newest()
        if place is None:
            return
        self._is_probing = True
        took_s = 0.0

        def work() -> None:
            nonlocal took_s
            began = time.perf_counter()
            (flaw,) = disk.examine([place])
            took_s = time.perf_counter() - began
            if flaw is not None:
                raise flaw

        def done(error: Exception | None) -> None:
            self._is_probing = False
            if error is None:
                self.gates["disk"].observe(place.ref.stored_bytes, took_s, self._now)
            else:
                self.restorer.set_aside(place.node, place.ref, error)

        self.mover.submit(Job(Priority.CLEAN_UP, work, done))

    def remember(self, change: Callable[[RecordStore], object], told: Callable[[bool], None] | None = None) -> None:
        """Has a pin, a time to live or a quota kept with the records on disk, after all that was remembered before it.

        Args:
            told: whether it is, once that is known; at once, that it is not, where there is no disk tier.
        """
        disk = self.disk
        if disk is None:
            if told is not None:
                told(False)
            return

        def work() -> None:
            change(disk.store)

        def done(error: Exception | None) -> None:
            if error is not None:
                log.warning("a change of a pin, a time to live or a quota will be lost at the next restart: %s", error)
            if told is not None:
                told(error is None)

        self.mover.submit(Job(Priority.CLEAN_UP, work, done))

    def owners(self) -> list[Resources]:
        """Who holds something besides the sequences."""
        moving = [] if self.residency is None else self.residency.owners()
        lifting = [] if self.lifter is None else self.lifter.owners()
        landing = [] if self.lander is None else self.lander.owners()
        recording = [] if self.recorder is None else self.recorder.owners()
        return self.restorer.owners() + self.writedown.owners() + moving + lifting + landing + recording

    def close(self) -> None:
        """Ends the transfers, waiting for those that have begun, and gives the disk back."""
        self.mover.close()
        if self.residency is not None and self.residency.spill is not None:
            self.residency.spill.close()
        if self.disk is not None:
            self.disk.store.close()

    def astray(self, owners: Sequence[Resources]) -> list[str]:
        """What is held in some tier by nobody of the owners, by name. Of records only when nothing is on its way."""
        findings = self.device.astray(owners) + self.writedown.astray()
        if self.host is not None:
            findings += self.host.astray(owners)
        if self.residency is not None and self.residency.spill is not None:
            findings += self.residency.spill.astray(owners)
        if self.disk is not None and self.is_settled:
            findings += self.disk.astray()
        return findings

    def check(self) -> None:
        """Raises AssertionError where the books of a tier, or two tiers', disagree."""
        self.device.check()
        if self.host is not None:
            self.host.check()
        if self.disk is not None:
            self.disk.check()


def _nobody_asks(nodes: list[Node]) -> None:
    """Nobody keeps anything by node."""
