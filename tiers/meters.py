"""Counters and histograms of what a tier does: plain numbers, no clock, no lock, nothing of ours imported.

Each belongs to one thread, which adds to it and reads it. Durations are passed in, in seconds. Nothing here ever goes
down, so whoever reads twice can tell what happened between.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

# Upper bounds of histogram buckets; what is beyond the last has a bucket of its own.
TRANSFER_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LOOKUP_BOUNDS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
AGE_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0)


class Histogram:
    """How often values fell between bounds. A value equal to a bound is below it, as Prometheus has it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds that do not grow"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # of all values

    def observe(self, value: float) -> None:
        """One value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_values(self) -> int:
        return sum(self.counts)


class EvictionReason(StrEnum):
    """Why a block or a checkpoint left a tier."""

    ROOM = "room"  # something else needed its place
    ORPHANED = "orphaned"  # a block before it went, and without that it serves nobody
    DAMAGED = "damaged"  # its record did not check or could not be read
    ASKED = "asked"  # somebody named it
    EXPIRED = "expired"  # its time to live was over
    QUOTA = "quota"  # its namespace has too much


class Kind(StrEnum):
    """What can leave a tier."""

    BLOCK = "block"
    CHECKPOINT = "checkpoint"


def _transfers() -> Histogram:
    return Histogram(TRANSFER_BOUNDS_S)


def _ages() -> Histogram:
    return Histogram(AGE_BOUNDS_S)


@dataclass(slots=True)
class TierMeters:
    """What happened in one tier since start-up, beside what its own statistics count."""

    hit_tokens: int = 0  # prompt tokens that this tier gave, each counted in one tier
    read_s: Histogram = field(default_factory=_transfers)  # of one job: up to 64 MiB of images
    write_s: Histogram = field(default_factory=_transfers)  # of one batch and its commit
    stall_s: Histogram = field(default_factory=_transfers)  # how long a request stood aside for a load from here
    late_loads: int = 0  # of those, the ones that were not waited for to their end
    streamed_bytes: int = 0  # read for attention over blocks that stay here
    picked: int = 0  # parts of such blocks that a selection wanted
    picked_hits: int = 0  # those that the cache of them had
    evictions: Counter[tuple[Kind, EvictionReason]] = field(default_factory=Counter[tuple[Kind, EvictionReason]])
    lifetime_s: Histogram = field(default_factory=_ages)  # of blocks that left, from their arrival
    reuse_gap_s: Histogram = field(
        default_factory=_ages
    )  # since its prefix was last asked for, of a prompt served here

    def block_left(self, reason: EvictionReason, since_s: float, now_s: float) -> None:
        """A block has left the tier. `since_s` is 0 for one that was there before start-up: its age is not known."""
        self.evictions[Kind.BLOCK, reason] += 1
        if since_s:
            self.lifetime_s.observe(max(now_s - since_s, 0.0))

    def checkpoint_left(self, reason: EvictionReason) -> None:
        """A checkpoint has left the tier."""
        self.evictions[Kind.CHECKPOINT, reason] += 1
