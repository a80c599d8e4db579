"""What has been asked for of late, whether or not anything of it is still cached.

Two questions need a longer memory than the cache's own. Where does a prompt leave a path that was walked before? And
how often does its conversation come back? Both are answered from keys of grid positions, a bounded number of them.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp, log

NUM_KEYS = 1 << 16  # remembered; about 250 bytes each
FIRST_GAP_S = 30.0  # assumed until any conversation has come back
LATEST_PART = 0.1  # of a conversation's gap that its latest return decides, after the first few
TYPICAL_PART = 0.02  # of the typical gap that one return decides
LEAST_GAP_S = 0.5
PASSED_GAP_S = 1e5  # of a stop that its conversation has gone on from: nobody else is known to come back to it


@dataclass(slots=True)
class _Trail:
    """The last time that a grid position was on a prompt's path."""

    last_s: float
    log_gap: float | None  # of the conversation that last walked here; None before its first return
    num_returns: int
    is_end: bool  # the prompt ended here


@dataclass(frozen=True, slots=True)
class Seen:
    """What history says of a prompt at its arrival."""

    num_known: int  # grid positions of it, from the first, that were walked before
    leaves_path: bool  # it turns off at the last of them, where an earlier prompt went on
    gap_s: float  # usual time between uses of the conversation that it continues; the typical one where it is new
    since_s: float | None = None  # since its longest known part was last asked for; None: never


class History:
    """Trails of grid positions, the latest `num_keys` of them. Gaps are skewed, and averaged in logarithms."""

    def __init__(self, num_keys: int = NUM_KEYS) -> None:
        self.num_keys = num_keys
        self._trails: OrderedDict[Hashable, _Trail] = OrderedDict()
        self._log_typical = log(FIRST_GAP_S)

    def __len__(self) -> int:
        return len(self._trails)

    @property
    def typical_gap_s(self) -> float:
        """Mean of the gaps of late, of all conversations."""
        return exp(self._log_typical)

    def visit(self, keys: Sequence[Hashable], now_s: float) -> Seen:
        """Remembers a prompt, by the block keys at its whole grid positions; returns what was known of it before."""
        trails = self._trails
        num_known = 0
        while num_known < len(keys) and keys[num_known] in trails:
            num_known += 1
        last = trails[keys[num_known - 1]] if num_known else None
        since_s = now_s - last.last_s if last is not None else None
        log_gap, num_returns = None, 0
        if last is not None and last.is_end:
            latest = log(max(now_s - last.last_s, LEAST_GAP_S))
            before = last.log_gap if last.log_gap is not None else self._log_typical
            num_returns = last.num_returns + 1
            log_gap = before + max(1 / (num_returns + 1), LATEST_PART) * (latest - before)
            self._log_typical += TYPICAL_PART * (latest - self._log_typical)
        for key in keys[:num_known]:
            trails[key].last_s = now_s
            trails.move_to_end(key)
        first_new = max(num_known - 1, 0)  # the last known one belongs to this conversation from now on
        for position in range(first_new, len(keys)):
            trails[keys[position]] = _Trail(now_s, log_gap, num_returns, is_end=position + 1 == len(keys))
        while len(trails) > self.num_keys:
            trails.popitem(last=False)
        leaves_path = last is not None and not last.is_end
        return Seen(num_known, leaves_path, exp(log_gap) if log_gap is not None else self.typical_gap_s, since_s)
