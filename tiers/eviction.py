"""Which cached thing goes first when a tier is full: recency plus alpha times FLOPs saved per byte.

After Marconi (MLSys 2025, arXiv 2411.19379, section 4.2). Owns an order, not the things in it: no tree, no torch, no
clock. The score of a thing, of which the lowest goes first, is

    -log(wait) + alpha x log(MFLOPs saved / bytes freed),    wait = time since the last use + gap weight x usual gap

- In logarithms, because alpha then has no unit: it means the same for every model, budget and load. With alpha 1 the
  thing goes that saves least for its bytes and for the time until it is asked for again.
- The usual gap between uses tells two things of the same age apart: one that is asked for every ten seconds, and one
  that has just been asked for after an hour. With both weights zero what is left is LRU.
- What could not be hit if it stayed (its whole path does not fit into the tier) goes before everything else.

Things lie in classes of nearly equal efficiency and usual gap, and a class is ordered by last use alone. A decision
compares the oldest of each class. So no score has to be kept up to date while time goes by, and both weights can be
changed at any moment, however many things there are.

**What an item is.** A *stop*: a grid position at which a look-up can resume, with the blocks that only it needs.
For a model with slots that is a checkpoint, with the chain of blocks from it up to the next node that has a checkpoint
or another child. For attention alone every grid position is a stop, with the one grid chunk of blocks above it. Blocks
that are below every checkpoint can serve nobody: they are a stop too, of efficiency zero.

**How a tree calls it**, one order for each budget of each tier:
- `offer` a stop when nothing holds or pins it and the tier has its bytes: when its last holder leaves, when it arrives
  in the tier, and again when anything in its `Worth` has changed (a hit on it, a child that came or went, a checkpoint
  above that went). Offering again moves it.
- `discard` it when it is taken up by a sequence or pinned, and when it is removed for another reason.
- `pop` when room is needed: it is out of the order then, and the tree frees its bytes. If the stop is a leaf of the
  tier, its checkpoint and its chain of blocks go, from the deepest up, and the stop above is offered again, which may
  be a leaf now. If something hangs below it, its checkpoint goes alone and the one stop below, if it is just one, is
  offered again with the longer chain. A stop with children that has no checkpoint frees nothing and is not offered.
- A hit refreshes the stop that it resumed at and no other. Checkpoints made by a request are as recent as its arrival.
  The usual gap of both is what tiers/history.py says of the prompt, but for a leaf that the prompt resumed at and goes
  on from to a checkpoint of its own: its conversation will not come back to it, its gap is `history.PASSED_GAP_S`.

A device has blocks and slots of fixed numbers: it keeps two orders, one of leaves in bytes of blocks, one of all
checkpoints in bytes of slots; what leaves by one is discarded from the other.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf, isfinite, log2
from typing import Generic, TypeVar

import numpy as np

from tiers.heap import Entry, Heap

T = TypeVar("T", bound=Hashable)

EFFICIENCY_STEPS = 3  # classes for each factor of two
GAP_STEPS = 2
LEAST_EXPONENT, MOST_EXPONENT = -20, 20  # of two: MFLOPs a byte, and seconds; beyond, classes are not told apart
LEAST_WAIT_S = 0.5  # so that what was used at this very moment is still compared by its efficiency
ROOM = 64  # classes, to begin with


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts beside the last use."""

    alpha: float = 1.0  # of the efficiency
    gap: float = 2.0  # of the usual gap

    def __post_init__(self) -> None:
        if not (isfinite(self.alpha) and isfinite(self.gap) and self.alpha >= 0 and self.gap >= 0):
            raise ValueError(f"weights are finite and not negative, not {self.alpha} and {self.gap}")


LRU = Weights(alpha=0.0, gap=0.0)


@dataclass(frozen=True, slots=True)
class Worth:
    """What decides about a stop."""

    last_use_s: float
    gap_s: float  # usual time between uses
    flops: int  # that a hit saves here beyond what it would save at the next stop above
    num_bytes: int  # that its eviction frees
    fits: bool = True  # False where the whole path is larger than the tier

    @property
    def efficiency(self) -> float:
        """MFLOPs saved a byte."""
        return self.flops / (1e6 * max(self.num_bytes, 1))


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """One eviction and what it was decided by."""

    item: T
    now_s: float
    worth: Worth
    weights: Weights


@dataclass(slots=True)
class _Class(Generic[T]):
    """Items of nearly one efficiency and usual gap."""

    index: int  # in the order's arrays
    efficiency: float
    gap_s: float
    fits: bool
    heap: Heap[T]  # by last use


@dataclass(frozen=True, slots=True)
class _Offer(Generic[T]):
    """Where an item is in the order."""

    worth: Worth
    class_: _Class[T]
    entry: Entry[T]


class EvictionOrder(Generic[T]):
    """Items that may go. Every call is O(log n), and `pop` reads one line of numbers besides: one of each class.

    Args:
        record: told of every decision, in order. The same calls lead to the same decisions.
    """

    def __init__(self, weights: Weights, record: Callable[[Decision[T]], None] | None = None) -> None:
        self.weights = weights
        self._record = record
        self._serial = 0
        self._offers: dict[T, _Offer[T]] = {}
        self._by_key: dict[tuple[int, int, bool], _Class[T]] = {}
        self._classes: list[_Class[T]] = []
        # Of each class, with room for more: a wait is (now + lead) x factor. The lead of an empty class, or of none, is
        # minus infinity; the factor of one that does not fit is infinity.
        self._lead_s = np.full(ROOM, -inf)
        self._factor = np.ones(ROOM)
        self._waits = np.zeros(ROOM)  # scratch

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, item: T) -> bool:
        return item in self._offers

    @property
    def num_classes(self) -> int:
        """Classes that have been seen, empty ones too: what `pop` looks through."""
        return len(self._classes)

    def offer(self, item: T, worth: Worth) -> None:
        """Adds an item, or gives it another worth."""
        class_ = self._class_of(worth)
        known = self._offers.get(item)
        self._serial += 1
        if known is not None and known.class_ is class_:
            entry = known.entry
            class_.heap.move(entry, worth.last_use_s, self._serial)
        else:
            if known is not None:
                self._leave(known)
            entry = class_.heap.push(item, worth.last_use_s, self._serial)
        self._offers[item] = _Offer(worth, class_, entry)
        self._look(class_)

    def discard(self, item: T) -> None:
        """Takes an item out, if it is there."""
        known = self._offers.pop(item, None)
        if known is not None:
            self._leave(known)

    def first(self, now_s: float) -> T | None:
        """What `pop` would return."""
        if not self._offers:
            return None
        return self._classes[self._lowest(now_s)].heap.first()

    def pop(self, now_s: float) -> T | None:
        """Takes out the item with the lowest score; None where there is none. No use is later than `now_s`."""
        item = self.first(now_s)
        if item is None:
            return None
        offer = self._offers.pop(item)
        self._leave(offer)
        if self._record is not None:
            self._record(Decision(item, now_s, offer.worth, self.weights))
        return item

    def reweigh(self, weights: Weights) -> None:
        """Other weights from now on. What it costs depends on the number of classes, not of items."""
        self.weights = weights
        for class_ in self._classes:
            self._factor[class_.index] = self._factor_of(class_)
            self._look(class_)

    def check(self) -> None:
        """Raises AssertionError where an item is not exactly in its class, or a class is not seen as it is."""
        assert len(self._offers) == sum(len(class_.heap) for class_ in self._classes)
        for item, offer in self._offers.items():
            assert offer.entry.item == item
            assert offer.class_.heap.has(offer.entry)
            assert offer.class_ is self._class_of(offer.worth)
        for class_ in self._classes:
            class_.heap.check()
            assert self._lead_s[class_.index] == self._lead_of(class_)
            assert self._factor[class_.index] == self._factor_of(class_)
        assert np.all(self._lead_s[len(self._classes) :] == -inf)

    def _lowest(self, now_s: float) -> int:
        """The class whose first item goes: the longest wait for its efficiency. At least one class has an item."""
        np.add(self._lead_s, now_s, out=self._waits)
        np.multiply(self._waits, self._factor, out=self._waits)
        return int(self._waits.argmax())

    def _class_of(self, worth: Worth) -> _Class[T]:
        key = (_step(worth.efficiency, EFFICIENCY_STEPS), _step(worth.gap_s, GAP_STEPS), worth.fits)
        class_ = self._by_key.get(key)
        if class_ is None:
            efficiency, gap_s = 2.0 ** (key[0] / EFFICIENCY_STEPS), 2.0 ** (key[1] / GAP_STEPS)
            class_ = _Class(len(self._classes), efficiency, gap_s, worth.fits, Heap[T]())
            if class_.index == len(self._lead_s):
                self._lead_s = np.concatenate([self._lead_s, np.full(class_.index, -inf)])
                self._factor = np.concatenate([self._factor, np.ones(class_.index)])
                self._waits = np.zeros(len(self._lead_s))
            self._factor[class_.index] = self._factor_of(class_)
            self._by_key[key] = class_
            self._classes.append(class_)
        return class_

    def _leave(self, offer: _Offer[T]) -> None:
        offer.class_.heap.remove(offer.entry)
        self._look(offer.class_)

    def _look(self, class_: _Class[T]) -> None:
        self._lead_s[class_.index] = self._lead_of(class_)

    def _lead_of(self, class_: _Class[T]) -> float:
        if not class_.heap:
            return -inf
        return LEAST_WAIT_S + self.weights.gap * class_.gap_s - class_.heap.first_key()

    def _factor_of(self, class_: _Class[T]) -> float:
        return class_.efficiency**-self.weights.alpha if class_.fits else inf


def _step(value: float, steps: int) -> int:
    """The class of a value: its logarithm, rounded."""
    if value <= 0:
        return LEAST_EXPONENT * steps
    return min(max(round(log2(value) * steps), LEAST_EXPONENT * steps), MOST_EXPONENT * steps)
