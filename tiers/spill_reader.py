"""Reading the spill ahead of a forward: a ring of stages, each one plane's part of a grid chunk.

A forward announces what it will read, in order; one thread fills free stages in that order. Whoever wants a part takes
it out of its stage, waits for the stage that is being filled, or, where nobody has begun, reads by itself. So the
order of what is wanted is a forecast that costs time where it is wrong, and nothing else. A stage is filled again only
after it was emptied or its forward has ended, and the thread has let go of it.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tiers.files import aligned_buffer
from tiers.layout import Part
from tiers.spill import Spill, SpillError

LOOK_AHEAD = 64  # of what is wanted, to find out how far a forward has come


@dataclass(slots=True, eq=False)
class _Stage:
    """A part of a chunk: being filled, or filled once `ready` is set."""

    buffer: memoryview
    ready: threading.Event = field(default_factory=threading.Event)
    error: SpillError | None = None
    is_wanted: bool = True


@dataclass(slots=True)
class ReadCounts:
    """Stretches since start-up: taken from the ring, or read by whoever wanted them."""

    staged: int = 0
    direct: int = 0


_Key = tuple[str, int]  # plane, extent


class SpillReader:
    """Owns the ring and its thread, and a cache of single blocks' parts. `fill` is called by one thread at a time.

    Args:
        num_stages: of the ring; 0: nothing is read ahead.
        cache_bytes: of the parts that selection picks, kept by last use.
    """

    def __init__(self, spill: Spill, *, num_stages: int, cache_bytes: int) -> None:
        self.spill = spill
        self.counts = ReadCounts()
        most = max(part.num_bytes for part in spill.layout.block_parts)
        self.stage_bytes = most * spill.chunk_blocks
        self.num_bytes = num_stages * self.stage_bytes + cache_bytes
        self._free = deque(aligned_buffer(self.stage_bytes) for _ in range(num_stages))
        self._stages: dict[_Key, _Stage] = {}
        self._wanted: deque[tuple[Part, int]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._cache: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()  # by plane, block, generation
        self._cache_left = cache_bytes
        self._thread = threading.Thread(target=self._run, name="spill-ahead", daemon=True)
        if num_stages:
            self._thread.start()

    @property
    def num_staged(self) -> int:
        """Stages that are filled or being filled."""
        with self._changed:
            return len(self._stages)

    def announce(self, wanted: Iterable[tuple[Part, int]]) -> None:
        """What a forward that begins will read: parts of extents, in order. What an earlier one left is dropped."""
        with self._changed:
            self._wanted.clear()
            for key in list(self._stages):
                self._drop(key)
            self._wanted.extend(wanted)
            self._changed.notify_all()

    def fill(self, out: memoryview, part: Part, blocks: list[int]) -> None:
        """Parts of blocks into `out`, in order.

        Raises:
            SpillError: they cannot be read, or do not check.
        """
        size, per_chunk, first = part.num_bytes, self.spill.chunk_blocks, 0
        while first < len(blocks):
            extent = blocks[first] // per_chunk
            last = first + 1
            while last < len(blocks) and blocks[last] // per_chunk == extent:
                last += 1
            target = out[first * size : last * size]
            if not self._from_stage(target, part, extent, [block % per_chunk for block in blocks[first:last]]):
                self.counts.direct += 1
                self._overtaken(part, extent)
                self.spill.read(blocks[first:last], part, target)
            first = last

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
            self.spill.read([block], part, target)
            num_missed += 1
            self._remember(key, bytes(target))
        return num_missed

    def close(self) -> None:
        """Ends the thread, once it has let go of the disk."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _remember(self, key: tuple[str, int, int], data: bytes) -> None:
        self._cache[key] = data
        self._cache_left -= len(data)
        while self._cache_left < 0:
            _, dropped = self._cache.popitem(last=False)
            self._cache_left += len(dropped)

    def _from_stage(self, out: memoryview, part: Part, extent: int, within: list[int]) -> bool:
        key = (part.name, extent)
        with self._changed:
            stage = self._stages.get(key)
            if stage is None:
                return False
        stage.ready.wait()
        if stage.error is None:
            size = part.num_bytes
            source, target = np.frombuffer(stage.buffer, np.uint8), np.frombuffer(out, np.uint8)
            if within == list(range(within[0], within[0] + len(within))):
                target[:] = source[within[0] * size : (within[0] + len(within)) * size]
            else:
                for place, block in enumerate(within):
                    target[place * size : (place + 1) * size] = source[block * size : (block + 1) * size]
        with self._changed:
            self._drop(key)
            self._changed.notify_all()
        if stage.error is not None:
            raise stage.error
        self.counts.staged += 1
        return True

    def _overtaken(self, part: Part, extent: int) -> None:
        """A forward reads this by itself: what was to come before it, and it itself, are not worth reading ahead."""
        with self._changed:
            soon = enumerate(islice(self._wanted, LOOK_AHEAD))
            place = next((n for n, (other, at) in soon if at == extent and other.name == part.name), None)
            if place is not None:
                for _ in range(place + 1):
                    self._wanted.popleft()

    def _drop(self, key: _Key) -> None:
        """Called with the lock held: the buffer is free now, or when the thread has let go of it."""
        stage = self._stages.pop(key)
        if stage.ready.is_set():
            self._free.append(stage.buffer)
        else:
            stage.is_wanted = False

    def _run(self) -> None:
        per_chunk = self.spill.chunk_blocks
        while True:
            with self._changed:
                while not self._is_closed and not (self._wanted and self._free):
                    self._changed.wait()
                if self._is_closed:
                    return
                part, extent = self._wanted.popleft()
                key = (part.name, extent)
                if key in self._stages:
                    continue
                stage = self._stages[key] = _Stage(self._free.popleft())
            blocks = list(range(extent * per_chunk, (extent + 1) * per_chunk))
            try:
                self.spill.read(blocks, part, stage.buffer[: part.num_bytes * per_chunk])
            except (
                Exception
            ) as error:  # whatever it is: somebody may wait for this stage, and this thread is the only one
                stage.error = error if isinstance(error, SpillError) else SpillError(f"read: {error!r}")
            with self._changed:
                stage.ready.set()
                if not stage.is_wanted:
                    self._free.append(stage.buffer)
                    self._changed.notify_all()
