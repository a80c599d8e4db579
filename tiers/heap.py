"""A binary heap whose items can be found again: each is in it once, and can be moved or taken out.

Nothing in it is ever stale. So it is no larger than what it holds, and no call has more to do than its own O(log n);
a heap with dead entries would have to be swept now and then, and that is a stall.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Entry(Generic[T]):
    """An item in a heap: what the heap moves and removes it by."""

    __slots__ = ("item", "place", "rank")

    def __init__(self, item: T, rank: tuple[float, int], place: int) -> None:
        self.item = item
        self.rank = rank  # key, and a serial number for equal keys
        self.place = place  # index in the heap; the heap's own


class Heap(Generic[T]):
    """Items by a key, the smallest first; of equal keys the one with the smaller serial number."""

    def __init__(self) -> None:
        self._entries: list[Entry[T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: T, key: float, serial: int) -> Entry[T]:
        """Puts an item in."""
        entry = Entry(item, (key, serial), len(self._entries))
        self._entries.append(entry)
        self._rise(entry)
        return entry

    def move(self, entry: Entry[T], key: float, serial: int) -> None:
        """Gives an item that is in another key."""
        assert self.has(entry)
        entry.rank = (key, serial)
        self._settle(entry)

    def remove(self, entry: Entry[T]) -> None:
        """Takes out an item that is in."""
        assert self.has(entry)
        last = self._entries.pop()
        if last is not entry:
            self._entries[entry.place] = last
            last.place = entry.place
            self._settle(last)

    def has(self, entry: Entry[T]) -> bool:
        """Whether the entry is of this heap, and in."""
        return entry.place < len(self._entries) and self._entries[entry.place] is entry

    def first(self) -> T:
        """The item with the smallest key. The heap is not empty."""
        return self._entries[0].item

    def first_key(self) -> float:
        """Its key. The heap is not empty."""
        return self._entries[0].rank[0]

    def check(self) -> None:
        """Raises AssertionError where order or places are broken."""
        for place, entry in enumerate(self._entries):
            assert entry.place == place
            assert place == 0 or self._entries[(place - 1) // 2].rank <= entry.rank

    def _settle(self, entry: Entry[T]) -> None:
        self._rise(entry)
        self._sink(entry)

    def _rise(self, entry: Entry[T]) -> None:
        entries, rank, place = self._entries, entry.rank, entry.place
        while place > 0:
            above = entries[(place - 1) // 2]
            if above.rank <= rank:
                break
            entries[place] = above
            above.place, place = place, above.place
        entries[place] = entry
        entry.place = place

    def _sink(self, entry: Entry[T]) -> None:
        entries, rank, place = self._entries, entry.rank, entry.place
        size = len(entries)
        while (child := 2 * place + 1) < size:
            below = entries[child]
            if child + 1 < size and entries[child + 1].rank < below.rank:
                below = entries[child + 1]
            if rank <= below.rank:
                break
            entries[place] = below
            below.place, place = place, below.place
        entries[place] = entry
        entry.place = place
