"""Ids of a fixed set of buffers: free, or held by a counted number of owners.

Ids are [0, size). A released id goes to the end of the free list, so that a use after release meets old bytes late
rather than its own bytes at once. Knows nothing of what the ids stand for.
"""

from collections import deque


class IdPool:
    """free + held = size, always."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._free: deque[int] = deque(range(size))
        self._refs = [0] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.size - len(self._free)

    def refs(self, id_: int) -> int:
        """How many owners an id has; 0 where it is free."""
        return self._refs[id_]

    def take(self, count: int) -> list[int]:
        """`count` ids with one owner each. The caller has made sure that so many are free."""
        assert 0 <= count <= len(self._free), f"{count} ids wanted, {len(self._free)} free"
        ids = [self._free.popleft() for _ in range(count)]
        for id_ in ids:
            self._refs[id_] = 1
        return ids

    def share(self, id_: int) -> None:
        """One more owner of an id that has one."""
        assert self._refs[id_] > 0, f"id {id_} is free"
        self._refs[id_] += 1

    def release(self, id_: int) -> None:
        """One owner less; the last one frees the id."""
        assert self._refs[id_] > 0, f"id {id_} released more often than held"
        self._refs[id_] -= 1
        if self._refs[id_] == 0:
            self._free.append(id_)

    def check(self) -> None:
        """Raises AssertionError where free and held do not add up."""
        assert len(set(self._free)) == len(self._free), "an id is free twice"
        for id_ in self._free:
            assert self._refs[id_] == 0, f"id {id_} is free and held"
        held = sum(1 for refs in self._refs if refs > 0)
        assert held + len(self._free) == self.size, "an id is neither free nor held"
