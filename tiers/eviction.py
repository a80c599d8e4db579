"""Which cached thing goes first when a tier is full: recency plus alpha times FLOPs saved per byte.

After Marconi (MLSys 2025, arXiv 2411.19379, section 4.2). Owns an order, not the things in it: no tree, no torch, no
clock. The score of a thing, of which the lowest goes first, is

    -log(wait) + alpha x log(MFLOPs saved / bytes freed)
    wait = age + max(habit - age, 0)^2 / (2 habit),    habit = patience x usual gap

where the age is the time since the last use, the gap that between uses, and the wait how long the next use may take.

- In logarithms, because alpha then has no unit: it means the same for every model, budget and load. With alpha 1 the
  thing goes that saves least for its bytes and for the time until it is asked for again.
- The usual gap between uses tells two things of the same age apart: one that is asked for every ten seconds, and one
  that has just been asked for after an hour. Within its habit the age hardly counts: what is asked for every minute is
  no less likely to be asked for after half of one. Beyond, the age alone is the wait: what has stayed away for an hour
  will stay away for about another. (Half the habit where the age is zero, the age where it has reached the habit,
  smoothly from one to the other.) With a patience of zero the age is all of the wait; with alpha zero too it is LRU.
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
  on from to a deeper checkpoint that the tier can hold: its conversation will not come back to it, its gap is
  `history.PASSED_GAP_S`.

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

EFFICIENCY_STEPS = 4  # classes for each factor of two
GAP_STEPS = 4
LEAST_EXPONENT, MOST_EXPONENT = -20, 20  # of two: MFLOPs a byte, and seconds; beyond, classes are not told apart
LEAST_AGE_S = 0.5  # so that what was used at this very moment is still compared by its efficiency
ROOM = 64  # classes, to begin with and to grow by


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts beside the last use."""

    alpha: float = 1.0  # of the efficiency
    patience: float = 2.0  # usual gaps within which the age hardly counts; 0: gaps do not count

    def __post_init__(self) -> None:
        if not (isfinite(self.alpha) and isfinite(self.patience) and self.alpha >= 0 and self.patience >= 0):
            raise ValueError(f"weights are finite and not negative, not {self.alpha} and {self.patience}")


LRU = Weights(alpha=0.0, patience=0.0)


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
    factor: float = 0.0  # of the wait, under the weights in force


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
        # Of each class, with room for a few more.
        self._oldest_s = np.zeros(ROOM)
        self._habit_s = np.zeros(ROOM)
        self._half_inverse = np.zeros(ROOM)  # of the habit
        self._factor = np.zeros(ROOM)  # of the wait: 0 of an empty class, infinity where things do not fit
        self._ages, self._waits = np.zeros(ROOM), np.zeros(ROOM)  # scratch

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
        self._weigh(0)

    def check(self) -> None:
        """Raises AssertionError where an item is not exactly in its class, or a class is not seen as it is."""
        assert len(self._offers) == sum(len(class_.heap) for class_ in self._classes)
        for item, offer in self._offers.items():
            assert offer.entry.item == item
            assert offer.class_.heap.has(offer.entry)
            assert offer.class_ is self._class_of(offer.worth)
        for class_ in self._classes:
            class_.heap.check()
        seen = [each.copy() for each in (self._oldest_s, self._habit_s, self._half_inverse, self._factor)]
        self._weigh(0)
        after = (self._oldest_s, self._habit_s, self._half_inverse, self._factor)
        assert all(np.array_equal(*pair) for pair in zip(seen, after, strict=True))
        assert not np.any(self._factor[len(self._classes) :])

    def _lowest(self, now_s: float) -> int:
        """The class whose first item goes: the longest wait for its efficiency. At least one class has an item."""
        ages, waits = self._ages, self._waits
        np.subtract(now_s + LEAST_AGE_S, self._oldest_s, out=ages)
        np.subtract(self._habit_s, ages, out=waits)
        np.maximum(waits, 0.0, out=waits)
        np.multiply(waits, waits, out=waits)
        np.multiply(waits, self._half_inverse, out=waits)
        np.add(waits, ages, out=waits)
        np.multiply(waits, self._factor, out=waits)
        return int(waits.argmax())

    def _class_of(self, worth: Worth) -> _Class[T]:
        key = (_step(worth.efficiency, EFFICIENCY_STEPS), _step(worth.gap_s, GAP_STEPS), worth.fits)
        class_ = self._by_key.get(key)
        if class_ is None:
            efficiency, gap_s = 2.0 ** (key[0] / EFFICIENCY_STEPS), 2.0 ** (key[1] / GAP_STEPS)
            class_ = _Class(len(self._classes), efficiency, gap_s, worth.fits, Heap[T]())
            if class_.index == len(self._waits):
                self._grow()
            self._by_key[key] = class_
            self._classes.append(class_)
            self._weigh(class_.index)
        return class_

    def _leave(self, offer: _Offer[T]) -> None:
        offer.class_.heap.remove(offer.entry)
        self._look(offer.class_)

    def _look(self, class_: _Class[T]) -> None:
        is_empty = not class_.heap
        self._oldest_s[class_.index] = 0.0 if is_empty else class_.heap.first_key()
        self._factor[class_.index] = 0.0 if is_empty else class_.factor

    def _weigh(self, first: int) -> None:
        """Sees the classes from this one on under the weights in force."""
        weights, classes, here = self.weights, self._classes[first:], slice(first, len(self._classes))
        for class_ in classes:
            class_.factor = class_.efficiency**-weights.alpha if class_.fits else inf
        self._oldest_s[here] = [class_.heap.first_key() if class_.heap else 0.0 for class_ in classes]
        self._factor[here] = [class_.factor if class_.heap else 0.0 for class_ in classes]
        self._habit_s[here] = [weights.patience * class_.gap_s for class_ in classes]
        self._half_inverse[here] = 0.5 / np.maximum(self._habit_s[here], LEAST_AGE_S)  # no age is within a shorter one

    def _grow(self) -> None:
        room = np.zeros(ROOM)  # not twice as much: every decision reads all of it
        self._oldest_s = np.concatenate([self._oldest_s, room])
        self._habit_s = np.concatenate([self._habit_s, room])
        self._half_inverse = np.concatenate([self._half_inverse, room])
        self._factor = np.concatenate([self._factor, room])
        self._ages, self._waits = np.zeros(len(self._factor)), np.zeros(len(self._factor))


def _step(value: float, steps: int) -> int:
    """The class of a value: its logarithm, rounded."""
    if value <= 0:
        return LEAST_EXPONENT * steps
    return min(max(round(log2(value) * steps), LEAST_EXPONENT * steps), MOST_EXPONENT * steps)
