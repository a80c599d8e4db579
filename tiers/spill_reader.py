"""Reading the spill ahead of a forward, and the blocks of it that selection picks through a cache.

A forward announces what it will read, in order. As much of that as `ahead_bytes` is asked of the kernel at any time, so
that the disk is busy while the forward computes, and what has come lies in the page cache, which is what memory has
left. A read then copies it to where it is wanted, once, and checks it. A forecast that was wrong costs time alone.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from tiers.layout import Part
from tiers.spill import Spill

AHEAD_BYTES = 32 << 20
PIECE_BYTES = 1 << 20  # read at a time, or one extent's part of a plane, where that is larger
LOOK_AHEAD = 64  # pieces, to find out how far a forward has come


@dataclass(frozen=True, slots=True)
class _Piece:
    """Extents [first, last) of one plane."""

    part: Part
    first: int
    last: int


@dataclass(slots=True)
class ReadCounts:
    """Pieces read since start-up: those that had been asked for ahead, and others."""

    foreseen: int = 0
    unforeseen: int = 0


class SpillReader:
    """Owns the forecast of one forward, and the cache. Used by one thread.

    Args:
        ahead_bytes: asked of the disk before they are wanted.
        cache_bytes: of the parts that selection picks, kept by last use.
    """

    def __init__(self, spill: Spill, *, ahead_bytes: int = AHEAD_BYTES, cache_bytes: int) -> None:
        self.spill = spill
        self.counts = ReadCounts()
        self.cache_bytes = cache_bytes
        self._ahead_bytes = ahead_bytes
        self._wanted: Iterator[_Piece] = iter(())  # not asked for yet
        self._asked: deque[_Piece] = deque()
        self._asked_bytes = 0
        self._cache: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()  # by plane, block, generation
        self._cache_left = cache_bytes

    def announce(self, wanted: Iterable[tuple[Part, int]]) -> None:
        """What a forward that begins will read: parts of extents, in order. What an earlier one left is forgotten."""
        self._wanted = self._pieces(wanted)
        self._asked.clear()
        self._asked_bytes = 0
        self._ask()

    def fill(self, out: memoryview, part: Part, blocks: list[int]) -> None:
        """Parts of blocks into `out`, in order.

        Raises:
            SpillError: they cannot be read, or do not check.
        """
        size, per_chunk = part.num_bytes, self.spill.chunk_blocks
        most = self._most_extents(part)
        for first, last in _runs(blocks):
            while first < last:
                extent = blocks[first] // per_chunk
                piece = self._passed(part, extent)
                end = (extent + most if piece is None else piece.last) * per_chunk
                upto = min(last, first + end - blocks[first])
                self.spill.read(blocks[first], part, out[first * size : upto * size])
                first = upto

    def pick(self, out: memoryview, part: Part, blocks: list[int]) -> int:
        """The same for blocks that a selection picked, through the cache; how many of them it did not have.

        Raises:
            SpillError: they cannot be read, or do not check.
        """
        size, num_missed = part.num_bytes, 0
        for place, block in enumerate(blocks):
            target = out[place * size : (place + 1) * size]
            key = (part.name, block, self.spill.generations[block // self.spill.chunk_blocks])
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                target[:] = known
                continue
            self.spill.read(block, part, target)
            num_missed += 1
            self._remember(key, bytes(target))
        return num_missed

    def _remember(self, key: tuple[str, int, int], data: bytes) -> None:
        self._cache[key] = data
        self._cache_left -= len(data)
        while self._cache_left < 0:
            _, dropped = self._cache.popitem(last=False)
            self._cache_left += len(dropped)

    def _most_extents(self, part: Part) -> int:
        """Of a piece."""
        return max(1, PIECE_BYTES // (part.num_bytes * self.spill.chunk_blocks))

    def _pieces(self, wanted: Iterable[tuple[Part, int]]) -> Iterator[_Piece]:
        """What is wanted, with neighbours that follow each other as one."""
        piece: _Piece | None = None
        for part, extent in wanted:
            is_next = piece is not None and piece.part.name == part.name and piece.last == extent
            if piece is not None and is_next and extent - piece.first < self._most_extents(part):
                piece = _Piece(part, piece.first, extent + 1)
                continue
            if piece is not None:
                yield piece
            piece = _Piece(part, extent, extent + 1)
        if piece is not None:
            yield piece

    def _ask(self) -> None:
        while self._asked_bytes < self._ahead_bytes:
            piece = next(self._wanted, None)
            if piece is None:
                return
            self._asked.append(piece)
            self._asked_bytes += self.spill.ask(piece.part, piece.first, piece.last)

    def _passed(self, part: Part, extent: int) -> _Piece | None:
        """A forward wants this now: the piece that has it, if it was asked for. What was to come before it was not
        wanted; as much again is asked for."""
        for place, piece in enumerate(islice(self._asked, LOOK_AHEAD)):
            if piece.part.name == part.name and piece.first <= extent < piece.last:
                for _ in range(place + 1):
                    gone = self._asked.popleft()
                    self._asked_bytes -= self.spill.stretch_bytes(gone.part, gone.first, gone.last)
                self._ask()
                self.counts.foreseen += 1
                return piece
        self.counts.unforeseen += 1
        return None


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Places [first, last) of blocks that are neighbours and in order."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield first, place
            first = place
