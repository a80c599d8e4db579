"""Learns the weights of eviction while it goes on: by replaying the recent trace under many weights at once.

Every candidate has a shadow of the tier (tiers/shadow.py), which is shown each visit some time after the real cache was
and decides by its own weights. What the shadows save is summed, the past fading; the weights of the best become the
real ones when they win by a margin, and by more than the luck of single visits explains. This is Marconi's tuning
(MLSys 2025, section 4.2) made continuous.

Bounded: visits wait in a queue that drops its oldest, a shadow holds no more than its tier, and `advance` does as much
as it is told to. No thread and no clock: the engine calls it in the idle moments of its loop, or a thread of its own
owns the tuner and hands over the changes.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tiers.eviction import EvictionOrder, Weights
from tiers.shadow import CacheShape, Chunk, ShadowCache, Visit

CANDIDATES = tuple(Weights(alpha, patience) for alpha in (0.0, 0.5, 1.0, 1.5) for patience in (0.0, 2.0, 4.0))
QUEUE_LEN = 4096  # visits that may wait
MEMORY_VISITS = 4096  # in which what was saved loses all but 1/e of its weight
REVIEW_VISITS = 64  # between two looks at the sums
MARGIN = 0.01  # by which another candidate must save more
SIGNIFICANCE = 2.5  # by how many standard errors of the sum of differences, visit by visit


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """One change, for the log."""

    now_s: float
    old: Weights
    new: Weights
    gain: float  # part by which the new ones saved more of late; 0.01 is 1%

    def __str__(self) -> str:
        return (
            f"eviction weights: alpha {self.old.alpha:g} to {self.new.alpha:g}, patience "
            f"{self.old.patience:g} to {self.new.patience:g}, which saved {self.gain:.1%} more FLOPs of late"
        )


class Tuner:
    """Weights of one tier. `weights` are those in force, one of the candidates."""

    def __init__(
        self, shape: CacheShape, budget_bytes: int, weights: Weights, candidates: tuple[Weights, ...] = CANDIDATES
    ) -> None:
        self.weights = weights
        self.num_dropped = 0  # visits that nobody had time for
        self._queue: deque[Visit] = deque()
        self._num_seen = 0
        self.candidates = tuple(dict.fromkeys((Weights(), weights, *candidates)))
        self._home = 0  # the default weights: good on many traces, so that going back to them takes less proof
        self._shadows = [ShadowCache(shape, budget_bytes, EvictionOrder[Chunk](each)) for each in self.candidates]
        # Of the TFLOPs that each candidate saved, visit by visit and fading: sums, and sums of products of two.
        self._sums = np.zeros(len(self.candidates))
        self._products = np.zeros((len(self.candidates), len(self.candidates)))

    @property
    def num_waiting(self) -> int:
        """Visits noted and not yet replayed."""
        return len(self._queue)

    def note(self, visit: Visit) -> None:
        """Remembers a visit, to be replayed later."""
        if len(self._queue) == QUEUE_LEN:
            self._queue.popleft()
            self.num_dropped += 1
        self._queue.append(visit)

    def advance(self, num_visits: int = 1) -> WeightsChange | None:
        """Replays at most so many visits, a fraction of a millisecond each; the change that follows, if one does."""
        change = None
        for _ in range(min(num_visits, len(self._queue))):
            visit = self._queue.popleft()
            saved = np.array([shadow.visit(visit) / 1e12 for shadow in self._shadows])
            self._sums += saved - self._sums / MEMORY_VISITS
            self._products += np.outer(saved, saved) - self._products / MEMORY_VISITS
            self._num_seen += 1
            if self._num_seen % REVIEW_VISITS == 0:
                change = self._review(visit.now_s) or change
        return change

    def _review(self, now_s: float) -> WeightsChange | None:
        current, best = self.candidates.index(self.weights), int(self._sums.argmax())
        if self._is_better(best, current, SIGNIFICANCE):
            chosen = best
        elif self._is_better(self._home, current, 0.0):
            chosen = self._home
        else:
            return None
        gain = (self._sums[chosen] - self._sums[current]) / max(self._sums[current], 1e-9)
        change = WeightsChange(now_s, self.weights, self.candidates[chosen], float(gain))
        self.weights = change.new
        return change

    def _is_better(self, one: int, other: int, significance: float) -> bool:
        difference = float(self._sums[one] - self._sums[other])
        squares = float(self._products[one, one] + self._products[other, other] - 2 * self._products[one, other])
        return difference > max(MARGIN * float(self._sums[other]), significance * sqrt(max(squares, 0.0)))
