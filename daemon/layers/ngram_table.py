"""An embedding table that stays on disk: rows read from safetensors shards by position, with a bounded cache of them.

The table of n-gram embeddings is tens of gigabytes and a token needs a few hundred bytes of it, so it is never loaded.
`start` begins to read what is not cached, on threads of the table's own, and `finish` hands the rows over; between the
two the caller computes something else. Neither changes anything but the cache, and the cache changes no byte of a
result, so a look-up may be repeated, dropped or made for a step that never runs.
"""

import hashlib
import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol, cast

import torch

from daemon.layers.steps import HostStageError

READ_BATCH = 256  # rows that one task reads
DIGEST_ROWS = 4096
MAX_AHEAD = 4  # prefetches that are not yet wanted


class TableReadError(HostStageError):
    """The table's file gave fewer bytes than its header promised, or could not be read."""


@dataclass(frozen=True, slots=True)
class TableShard:
    """Consecutive rows of the table: `num_rows` rows from byte `offset` of a file."""

    path: Path
    offset: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What a row of the table is."""

    dtype: torch.dtype
    dim: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * self.dim


@dataclass(frozen=True, slots=True)
class Fetch:
    """A look-up under way."""

    rows: torch.Tensor  # as asked, any shape
    unique: list[int]
    inverse: torch.Tensor  # of the flattened rows into `unique`
    data: bytearray  # the unique rows, one after the other; complete once the reads are
    missed: list[int]  # indices into `unique` that were not cached
    reads: list[Future[None]]


class RowSource(Protocol):
    """What an n-gram layer asks of a table."""

    def start(self, rows: torch.Tensor) -> Fetch:
        """Begins a look-up of rows [any shape] int64."""
        ...

    def wait(self, fetch: Fetch) -> None:
        """Returns once everything is read; raises HostStageError where it could not be."""
        ...

    def finish(self, fetch: Fetch) -> torch.Tensor:
        """Waits for it: [*rows.shape, dim]."""
        ...

    def digest(self) -> bytes:
        """What tells one table from another, for the state fingerprint: 32 bytes."""
        ...

    def prefetch(self, rows: torch.Tensor) -> None:
        """Begins to read what a later look-up will want."""
        ...

    def close(self) -> None:
        """Gives up whatever the table holds open; idempotent."""
        ...


class NgramTable:
    """Rows of one table. Used by one thread; its readers only fill buffers that a `Fetch` owns."""

    def __init__(self, shards: Sequence[TableShard], row: RowFormat, *, cache_rows: int, num_threads: int) -> None:
        """Opens every shard's file.

        Raises:
            TableReadError: a file cannot be opened or is shorter than its rows.
        """
        assert shards
        assert cache_rows > 0
        self.num_rows = sum(shard.num_rows for shard in shards)
        self.row = row
        self._shards = list(shards)
        self._starts = [0, *accumulate(shard.num_rows for shard in shards)]
        self._files: dict[Path, int] = {}
        self._cache = torch.empty((cache_rows, row.num_bytes), dtype=torch.uint8)
        self._places: OrderedDict[int, int] = OrderedDict()  # table row to cache row, least recently used first
        self._ahead: deque[Fetch] = deque(maxlen=MAX_AHEAD)
        self._num_read = 0
        try:
            for shard in shards:
                self._open(shard)
        except OSError as error:
            self._close_files()
            raise TableReadError(f"{error.filename}: {error.strerror}") from error
        except TableReadError:
            self._close_files()
            raise
        self._readers = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="ngram-table")

    @property
    def num_read(self) -> int:
        """Rows read from files so far."""
        return self._num_read

    @property
    def num_cached(self) -> int:
        """Rows in the cache."""
        return len(self._places)

    def start(self, rows: torch.Tensor) -> Fetch:
        """Begins a look-up of rows [any shape] int64; what is not cached is read in the background."""
        while self._ahead:
            self._settle(self._ahead.popleft())
        return self._begin(rows)

    def _begin(self, rows: torch.Tensor) -> Fetch:
        wanted = sorted_ids(rows)
        assert 0 <= wanted[0] <= wanted[-1] < self.num_rows, "a row lies outside the table"
        inverse = torch.searchsorted(torch.tensor(wanted), rows.flatten())
        data = bytearray(len(wanted) * self.row.num_bytes)
        hits = [index for index, row in enumerate(wanted) if row in self._places]
        missed = [index for index, row in enumerate(wanted) if row not in self._places]
        if hits:
            places = torch.tensor([self._places[wanted[index]] for index in hits])
            self._bytes_of(data)[torch.tensor(hits)] = self._cache[places]
            for index in hits:
                self._places.move_to_end(wanted[index])
        reads = [
            self._readers.submit(self._read, wanted, missed[first : first + READ_BATCH], data)
            for first in range(0, len(missed), READ_BATCH)
        ]
        self._num_read += len(missed)
        return Fetch(rows, wanted, inverse, data, missed, reads)

    def prefetch(self, rows: torch.Tensor) -> None:
        """Begins to read rows that a later look-up will want; they are cached when it comes. The oldest of too many is
        dropped.
        """
        self._ahead.append(self._begin(rows))

    def wait(self, fetch: Fetch) -> None:
        """Waits for a look-up's reads.

        Raises:
            TableReadError: a read failed or was short.
        """
        try:
            for read in fetch.reads:
                read.result()
        except OSError as error:
            raise TableReadError(f"n-gram table: {error.strerror}") from error

    def digest(self) -> bytes:
        """Of the sizes and of rows spread evenly over the table: reading all of it would take minutes."""
        digest = hashlib.blake2b(repr((self.row, [shard.num_rows for shard in self._shards])).encode(), digest_size=32)
        step = max(1, self.num_rows // DIGEST_ROWS)
        rows = [*range(0, self.num_rows, step), self.num_rows - 1]
        data = bytearray(len(rows) * self.row.num_bytes)
        self._read(rows, list(range(len(rows))), data)
        digest.update(data)
        return digest.digest()

    def finish(self, fetch: Fetch) -> torch.Tensor:
        """Waits for a look-up: [*rows.shape, dim] in the table's dtype. What was read is cached from now on.

        Raises:
            TableReadError: a read failed or was short.
        """
        self.wait(fetch)
        self._keep(fetch)
        found = self._bytes_of(fetch.data).view(self.row.dtype)
        return found[fetch.inverse].view(*fetch.rows.shape, self.row.dim)

    def close(self) -> None:
        """Ends the readers and closes the files; idempotent."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._close_files()

    def check(self) -> None:
        """Raises where the cache breaks an invariant: bounded, and no two rows in one place."""
        places = list(self._places.values())
        if len(places) > self._cache.shape[0]:
            raise AssertionError(f"{len(places)} rows in a cache of {self._cache.shape[0]}")
        if len(set(places)) != len(places):
            raise AssertionError("two rows share a place in the cache")

    def _bytes_of(self, data: bytearray) -> torch.Tensor:
        return _as_rows(data, self.row.num_bytes)

    def _settle(self, fetch: Fetch) -> None:
        """Caches what a prefetch read. One that failed is forgotten: whoever needs its rows reads them again."""
        try:
            for read in fetch.reads:
                read.result()
        except (OSError, TableReadError):
            return
        self._keep(fetch)

    def _open(self, shard: TableShard) -> None:
        if shard.path not in self._files:
            self._files[shard.path] = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self._files[shard.path]).st_size
        if shard.offset + shard.num_rows * self.row.num_bytes > size:
            raise TableReadError(f"{shard.path.name} is shorter than the rows it should hold")

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self, wanted: list[int], indices: list[int], data: bytearray) -> None:
        """Fills data[index] for each index, in rising order of table rows. Runs on a reader thread."""
        num_bytes = self.row.num_bytes
        into = memoryview(data)
        shard_index = 0
        for index in indices:
            row = wanted[index]
            while row >= self._starts[shard_index + 1]:
                shard_index += 1
            shard = self._shards[shard_index]
            offset = shard.offset + (row - self._starts[shard_index]) * num_bytes
            target = into[index * num_bytes : (index + 1) * num_bytes]
            if os.preadv(self._files[shard.path], [target], offset) != num_bytes:
                raise TableReadError(f"{shard.path.name}: a row could not be read whole")

    def _keep(self, fetch: Fetch) -> None:
        """Caches the rows that were read, at most as many as there are places; the last ones win."""
        data = self._bytes_of(fetch.data)
        for index in fetch.missed[-self._cache.shape[0] :]:
            row = fetch.unique[index]
            if row in self._places:
                continue
            if len(self._places) < self._cache.shape[0]:
                place = len(self._places)
            else:
                place = self._places.popitem(last=False)[1]
            self._places[row] = place
            self._cache[place] = data[index]


class SeededTable:
    """A table without a file: each row a fixed function of its number. For weights that are made up."""

    def __init__(self, row: RowFormat) -> None:
        self.row = row

    def start(self, rows: torch.Tensor) -> Fetch:
        """There is nothing to wait for."""
        wanted = sorted_ids(rows)
        return Fetch(rows, wanted, torch.searchsorted(torch.tensor(wanted), rows.flatten()), bytearray(), [], [])

    def prefetch(self, rows: torch.Tensor) -> None:
        """There is nothing to read."""

    def close(self) -> None:
        """There is nothing open."""

    def wait(self, fetch: Fetch) -> None:
        """There is nothing to wait for."""

    def digest(self) -> bytes:
        """The function is the same everywhere."""
        return hashlib.blake2b(repr(self.row).encode(), digest_size=32).digest()

    def finish(self, fetch: Fetch) -> torch.Tensor:
        """[*rows.shape, dim] in the table's dtype."""
        channels = torch.arange(1, self.row.dim + 1, dtype=torch.float64)
        numbers = torch.tensor(fetch.unique, dtype=torch.float64) + 1
        values = torch.sin(numbers[:, None] * channels.sqrt()).to(self.row.dtype)
        return values[fetch.inverse].view(*fetch.rows.shape, self.row.dim)


def sorted_ids(rows: torch.Tensor) -> list[int]:
    """Each number of a tensor once, rising."""
    assert rows.dtype == torch.int64
    assert rows.numel() > 0
    flat = cast(list[int], rows.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    return sorted(set(flat))


def _as_rows(data: bytearray, row_bytes: int) -> torch.Tensor:
    """[num_rows, row_bytes] uint8 over the same memory."""
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, row_bytes)
