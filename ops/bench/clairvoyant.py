"""An evictor that knows the future: what a policy's savings are measured against.

Belady's rule (evict what is used again last) is optimal for pages of equal size and worth. Stops have neither, their
uses move to the next stop above when they go, and the best choice is then as hard as packing a knapsack. So this is not
the optimum: it is a family of greedy rules, from Belady's own to the value of the next use for its bytes and for the
time until then, and a comparison takes the best of them for each budget.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np

from tiers.eviction import Worth
from tiers.shadow import Chunk, Visit


@dataclass(frozen=True, slots=True)
class Foresight:
    """How a next use is valued: savings^value / bytes^size / (visits until then)^distance."""

    value: float
    size: float
    distance: float

    @property
    def name(self) -> str:
        """For tables."""
        if self.value == self.size == 0:
            return "used again last (Belady)"
        return f"saved^{self.value:g} / bytes^{self.size:g} / visits^{self.distance:g}"


BELADY = Foresight(0.0, 0.0, 1.0)
FORESIGHTS = (
    BELADY,
    Foresight(1.0, 1.0, 1.0),
    Foresight(1.0, 1.0, 0.5),
    Foresight(1.0, 1.0, 0.1),
    Foresight(1.0, 0.5, 1.0),
    Foresight(1.0, 0.0, 1.0),
    Foresight(2.0, 1.0, 1.0),
)


class Future:
    """All visits of a trace, and which of them could resume at a key."""

    def __init__(self, visits: Sequence[Visit], grid: int) -> None:
        self.visits = visits
        self.grid = grid
        self._by_key: dict[Hashable, list[int]] = {}
        for index, visit in enumerate(visits):
            for key in visit.keys[: self.usable(visit)]:
                self._by_key.setdefault(key, []).append(index)

    def usable(self, visit: Visit) -> int:
        """Chunks of a prompt that a hit can save."""
        return max(visit.num_tokens - 1, 0) // self.grid

    def next_use(self, chunk: Chunk, now: int) -> float:
        """Index of the first visit after `now` that would resume at this stop, as the cache is; infinite for none."""
        uses = self._by_key.get(chunk.key, [])
        for index in uses[bisect_right(uses, now) :]:
            visit = self.visits[index]
            if not _has_stop_below(chunk, visit.keys[chunk.depth : self.usable(visit)]):
                return index
        return inf


class ClairvoyantOrder:
    """Ranks stops by their next use. `now` is the index of the visit that is being served."""

    def __init__(self, future: Future, foresight: Foresight) -> None:
        self.future = future
        self.foresight = foresight
        self.now = -1
        self._rows: dict[Chunk, int] = {}
        self._chunks: list[Chunk | None] = []
        self._free: list[int] = []
        self._next = np.full(0, np.nan)  # [rows], index of the visit that uses it; NaN in free rows
        self._log_value = np.zeros(0)  # [rows]

    def offer(self, item: Chunk, worth: Worth) -> None:
        """Adds a stop or takes a new look at its future."""
        row = self._rows.get(item)
        if row is None:
            row = self._free.pop() if self._free else self._add_row()
            self._rows[item] = row
            self._chunks[row] = item
        sight = self.foresight
        self._next[row] = self.future.next_use(item, self.now) if worth.fits else inf
        self._log_value[row] = sight.value * log(max(worth.flops, 1)) - sight.size * log(max(worth.num_bytes, 1))

    def discard(self, item: Chunk) -> None:
        """Takes a stop out, if it is there."""
        row = self._rows.pop(item, None)
        if row is not None:
            self._chunks[row] = None
            self._next[row] = np.nan
            self._free.append(row)

    def pop(self, now_s: float) -> Chunk | None:
        """Takes out the stop whose next use is worth least; one that is never used goes first."""
        if not self._rows:
            return None
        score = self._log_value - self.foresight.distance * np.log(self._next - self.now)
        item = self._chunks[int(np.nanargmin(score))]
        assert item is not None
        self.discard(item)
        return item

    def _add_row(self) -> int:
        size = len(self._chunks)
        if size == len(self._next):
            room = max(64, size)
            self._next = np.concatenate([self._next, np.full(room, np.nan)])
            self._log_value = np.concatenate([self._log_value, np.zeros(room)])
        self._chunks.append(None)
        return size


def _has_stop_below(chunk: Chunk, keys: Sequence[Hashable]) -> bool:
    for key in keys:
        below = chunk.children.get(key)
        if below is None:
            return False
        if below.has_state:
            return True
        chunk = below
    return False
