"""Blocks of live sequences on disk, in extents of one grid chunk each, plane by plane.

A record (FORMAT.md) has all layers of a block under one checksum, which no layer's part could be read without. Here
the parts of one plane lie side by side, so that a layer reads its keys of neighbouring extents in one piece:

    file = [plane][extent][block][part of the block's image]

Extents are given out in order, so those of a sequence are neighbours as long as no other moves down beside it.
Checksums of every part and of every extent's stretch of a plane are kept in memory, and compared on every read. Planes
that are read whole for every row (index keys) are kept in memory themselves, beside the file. Nothing here outlives the
process: the file has no name, nothing is synced, and a sequence that loses an extent computes it again.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiers.id_pool import IdPool
from tiers.layout import Part, StateLayout
from tiers.resources import Resources

MOST_BLOCKS = 1024  # of a grid chunk: the pieces of one system call
ASK_BYTES = 128 << 10  # in one call, of which the kernel takes no more than it reads ahead by itself


@dataclass(frozen=True, slots=True)
class Extent:
    """One grid chunk of blocks in the file."""

    number: int


class SpillError(Exception):
    """Bytes of the spill cannot be read or written, or are not those that were written."""


class Spill:
    """Books and bytes. Books on the thread of the engine; `write` and `read` on any.

    Args:
        folder: where the file lies; it is unlinked at once.
    """

    def __init__(self, layout: StateLayout, folder: Path, *, chunk_blocks: int, num_extents: int) -> None:
        self.parts = {part.name: index for index, part in enumerate(layout.block_parts)}
        self.layout = layout
        self.chunk_blocks = chunk_blocks
        self.extents = IdPool(num_extents)
        self.give_way: Callable[[], bool] = lambda: False  # asked for an extent that nobody needs, where none is free
        self.generations = [0] * num_extents  # of what each holds: no cache may take one for another
        self.extent_bytes = chunk_blocks * layout.block_bytes
        self._checks: NDArray[np.uint64] = np.zeros((num_extents, len(self.parts), chunk_blocks), np.uint64)
        self._whole_checks: NDArray[np.uint64] = np.zeros((num_extents, len(self.parts)), np.uint64)
        self._kept: dict[str, dict[int, bytes]] = {plane.name: {} for plane in layout.planes if plane.is_scanned}
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # open for as long as the engine lives

    def fileno(self) -> int:
        """Of the file, which has no name."""
        return self._file.fileno()

    @property
    def num_blocks(self) -> int:
        """Blocks that fit."""
        return self.extents.size * self.chunk_blocks

    @property
    def kept_bytes(self) -> int:
        """Memory for the planes that are kept, once all extents have been written."""
        kept = [part for part in self.layout.block_parts if part.name in self._kept]
        return self.num_blocks * sum(part.num_bytes for part in kept)

    @property
    def used_bytes(self) -> int:
        """Of extents that somebody holds."""
        return self.extents.num_held * self.extent_bytes

    def is_kept(self, part: Part) -> bool:
        """Whether reading this plane asks nothing of the disk."""
        return part.name in self._kept

    def take(self, resources: Resources) -> Extent | None:
        """An extent to be written; None where all are held."""
        while not self.extents.num_free:
            if not self.give_way():
                return None
        (number,) = self.extents.take(1)
        resources.hold("spill extent", number, lambda: self.extents.release(number))
        self.generations[number] += 1
        return Extent(number)

    def hold(self, resources: Resources, extent: Extent) -> None:
        """One more owner."""
        self.extents.share(extent.number)
        resources.hold("spill extent", extent.number, lambda: self.extents.release(extent.number))

    def write(self, extent: Extent, images: Sequence[memoryview]) -> None:
        """Fills an extent with the images of its blocks.

        Raises:
            SpillError: the disk does not take them.
        """
        assert len(images) == self.chunk_blocks <= MOST_BLOCKS
        first = extent.number * self.chunk_blocks
        for index, part in enumerate(self.layout.block_parts):
            pieces = [image[part.offset : part.offset + part.num_bytes] for image in images]
            if part.name in self._kept:
                self._kept[part.name][extent.number] = b"".join(pieces)
                continue
            self._checks[extent.number, index] = [xxhash.xxh3_64_intdigest(piece) for piece in pieces]
            self._whole_checks[extent.number, index] = xxhash.xxh3_64_intdigest(b"".join(pieces))
            try:
                done = os.pwritev(self.fileno(), pieces, self.place(part, first))
            except OSError as error:
                raise SpillError(f"write: {error.strerror or error}") from error
            if done != part.num_bytes * len(pieces):
                raise SpillError("write: the disk took a part only")

    def place(self, part: Part, block: int) -> int:
        """Where in the file a block's part of a plane begins."""
        return part.offset * self.num_blocks + block * part.num_bytes

    def read(self, block: int, part: Part, out: memoryview) -> None:
        """Parts of neighbouring blocks from `block` on, as many as `out` takes; counted from the first extent's first.

        Raises:
            SpillError: they cannot be read, or do not check.
        """
        if part.name not in self._kept:
            self.read_unchecked(block, part, out)
        for at, found in self._stretches(block, part.num_bytes, out):
            if part.name in self._kept:
                extent, begin = divmod(at, self.chunk_blocks)
                kept = memoryview(self._kept[part.name][extent])
                found[:] = kept[begin * part.num_bytes : begin * part.num_bytes + len(found)]
            elif not self._is_intact(found, part, at):
                raise SpillError("read: a checksum is wrong")

    def image(self, block: int) -> memoryview:
        """A block's whole image, put together from its planes.

        Raises:
            SpillError: it cannot be read, or does not check.
        """
        image = memoryview(bytearray(self.layout.block_bytes))
        for part in self.layout.block_parts:
            self.read(block, part, image[part.offset : part.offset + part.num_bytes])
        return image

    def stretch_bytes(self, part: Part, first: int, last: int) -> int:
        """Of a plane's part of extents [first, last)."""
        return (last - first) * self.chunk_blocks * part.num_bytes

    def ask(self, part: Part, first: int, last: int) -> int:
        """Asks the kernel for a plane's part of extents [first, last), without waiting; how many bytes that are."""
        begin, num_bytes = self.place(part, first * self.chunk_blocks), self.stretch_bytes(part, first, last)
        for at in range(0, num_bytes, ASK_BYTES):
            os.posix_fadvise(self.fileno(), begin + at, min(ASK_BYTES, num_bytes - at), os.POSIX_FADV_WILLNEED)
        return num_bytes

    def read_unchecked(self, block: int, part: Part, out: memoryview) -> None:
        """The same as the disk gives it: what a read costs without its checks.

        Raises:
            SpillError: it cannot be read.
        """
        at, done = self.place(part, block), 0
        while done < len(out):
            try:
                got = os.preadv(self.fileno(), [out[done:]], at + done)
            except OSError as error:
                raise SpillError(f"read: {error.strerror or error}") from error
            if not got:
                raise SpillError("read: the file ends")
            done += got

    def astray(self, owners: Sequence[Resources]) -> list[str]:
        """Extents that are held by more or fewer than the owners know of."""
        known = Counter(number for resources in owners for number in resources.ids("spill extent"))
        return [
            f"spill extent {n}: {self.extents.refs(n)} owners, {known[n]} known"
            if known[n]
            else f"spill extent {n} has no owner"
            for n in range(self.extents.size)
            if self.extents.refs(n) != known[n]
        ]

    def close(self) -> None:
        """The file is gone."""
        self._file.close()

    def _stretches(self, block: int, size: int, out: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Neighbouring blocks of `size` bytes each from `block` on, cut where extents end: first block, and bytes."""
        first = 0
        while first < len(out):
            last = min(len(out), first + (self.chunk_blocks - block % self.chunk_blocks) * size)
            yield block, out[first:last]
            block += (last - first) // size
            first = last

    def _is_intact(self, found: memoryview, part: Part, block: int) -> bool:
        """Whether parts of neighbouring blocks of one extent, from `block` on, are what was written."""
        size, index = part.num_bytes, self.parts[part.name]
        extent, begin = divmod(block, self.chunk_blocks)
        if len(found) == size * self.chunk_blocks:
            return xxhash.xxh3_64_intdigest(found) == int(self._whole_checks[extent, index])
        checks = [xxhash.xxh3_64_intdigest(found[at : at + size]) for at in range(0, len(found), size)]
        return checks == self._checks[extent, index, begin : begin + len(checks)].tolist()
