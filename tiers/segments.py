"""Segment files: records one after the other, appended only, at sector boundaries.

One segment is active and takes the next group of records; the others are sealed. A failed write or sync abandons the
active one: it is cut back to its last commit and never written again. Space comes back by holes, or where the file
system has none when a segment holds no live record any more. Numbers and offsets are never used twice.

All methods but `read` belong to one thread at a time.
"""

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tiers.files import SECTOR_BYTES, Abilities, OsFiles, Step, aligned_buffer
from tiers.records import RecordRef

FOLDER = "segments"
SUFFIX = ".seg"
SEGMENT_BYTES = 256 << 20
SEGMENT_BYTES_WITHOUT_HOLES = 32 << 20  # space comes back by the segment: smaller ones come back sooner


@dataclass(slots=True)
class _Active:
    number: int
    fd: int
    direct: bool
    end: int  # committed bytes; the next group is written here
    is_named: bool  # the directory entry is durable


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next group of records will begin."""

    segment: int
    offset: int


class Segments:
    """The segment files of one directory. `live` counts the committed records of each segment."""

    def __init__(self, directory: Path, files: OsFiles, abilities: Abilities, segment_bytes: int | None = None) -> None:
        self.folder = directory / FOLDER
        self.abilities = abilities
        self.live: dict[int, int] = {}
        self._files = files
        self._segment_bytes = segment_bytes or (SEGMENT_BYTES if abilities.punch else SEGMENT_BYTES_WITHOUT_HOLES)
        self._allocated = {number: files.allocated_bytes(self.path(number)) for number in self.on_disk()}
        self._next_number = max(self._allocated, default=0) + 1
        self._active: _Active | None = None
        self._zeros = aligned_buffer(SECTOR_BYTES)

    @property
    def usage_bytes(self) -> int:
        """What du says of all segments."""
        return sum(self._allocated.values())

    @property
    def num_files(self) -> int:
        """Segments that exist."""
        return len(self._allocated)

    def path(self, number: int) -> Path:
        """The file of a segment."""
        return self.folder / f"{number:08d}{SUFFIX}"

    def on_disk(self) -> list[int]:
        """Numbers of the files that are there now."""
        names = (name.removesuffix(SUFFIX) for name in self._files.names(self.folder) if name.endswith(SUFFIX))
        return sorted(int(name) for name in names if name.isdigit())

    def size(self, number: int) -> int:
        """Length of a segment's file."""
        return self._files.size(self.path(number))

    def never_reuse(self, numbers: Iterable[int]) -> None:
        """New segments get numbers above these."""
        self._next_number = max(self._next_number, 1 + max(numbers, default=0))

    def resume(self, number: int, end: int) -> None:
        """Goes on appending to a segment, if it ends cleanly at `end`, has room and lets us."""
        assert self._active is None
        if 0 < end < self._segment_bytes and self.size(number) == end:
            try:
                fd = self._files.open_write(self.path(number), direct=self.abilities.direct)
            except OSError:
                return
            self._active = _Active(number, fd, self.abilities.direct, end, is_named=True)

    def next_place(self, num_bytes: int) -> Place:
        """Where a group of at most so many bytes will begin. The next `append` must be to this group."""
        active = self._active
        if active is None or active.end + num_bytes > self._segment_bytes:
            return Place(self._next_number, 0)
        return Place(active.number, active.end)

    def append(self, place: Place, at: int, piece: memoryview) -> None:
        """Writes the bytes of a group from `at` on. OSError: call `abandon`."""
        active = self._active
        if active is None or active.number != place.segment:
            active = self._begin(place.segment)
        assert active.end == place.offset
        written = 0
        while written < len(piece):
            done = self._files.pwrite(active.fd, piece[written:], place.offset + at + written)
            if done <= 0 or (active.direct and done % SECTOR_BYTES):
                raise OSError(errno.EIO, f"{done} of {len(piece) - written} bytes were written")
            written += done
        self._files.reached(Step.DATA_WRITTEN)
        self._allocated[active.number] = self._files.allocated_bytes(self.path(active.number))

    def sync(self, num_bytes: int) -> None:
        """Makes the group durable, with the name of a new segment. OSError: call `abandon`."""
        active = self._active
        assert active is not None
        self._files.sync(active.fd)
        self._allocated[active.number] = self._files.allocated_bytes(self.path(active.number))  # delayed allocation
        self._files.reached(Step.DATA_SYNCED)
        if not active.is_named:
            self._files.sync_directory(self.folder)
            active.is_named = True
            self._files.reached(Step.DIRECTORY_SYNCED)
        if not active.direct:
            self._files.forget_cached(active.fd, active.end, num_bytes)

    def committed(self, num_bytes: int, num_records: int) -> None:
        """The group that was appended is in the index."""
        assert self._active is not None
        self._active.end += num_bytes
        self.live[self._active.number] = self.live.get(self._active.number, 0) + num_records

    def abandon(self) -> None:
        """Seals the active segment after a failure and cuts what was not committed, if the disk lets us."""
        if self._active is None:
            return
        active, self._active = self._active, None
        try:
            self._files.truncate(active.fd, active.end)
            self._files.reached(Step.TAIL_CUT)
        except OSError:
            pass  # the tail is checked again when the directory is next opened
        finally:
            self._files.close(active.fd)
        self._allocated[active.number] = self._files.allocated_bytes(self.path(active.number))
        if not self.live.get(active.number):
            self.remove_if_dead(active.number)

    def erase(self, number: int, refs: Iterable[RecordRef]) -> None:
        """Gives the bytes of a segment's records back, or without holes takes their headers away, durably.

        OSError where the disk refuses; a file that is gone has nothing to give.
        """
        path = self.path(number)
        try:
            fd = self._files.open_write(path, direct=self.abilities.direct)
        except FileNotFoundError:
            self._allocated.pop(number, None)
            return
        try:
            for ref in refs:
                if self.abilities.punch:
                    self._files.punch(fd, ref.offset, ref.stored_bytes)
                elif ref.end <= self._files.size(path):
                    self._files.pwrite(fd, self._zeros, ref.offset)
                self._files.reached(Step.RECORD_ERASED)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
            self._allocated[number] = self._files.allocated_bytes(path)

    def remove_if_dead(self, number: int) -> bool:
        """Unlinks a sealed segment without live records. Whether it is gone. A refusal is no failure: it stays."""
        if self.live.get(number) or (self._active is not None and self._active.number == number):
            return False
        try:
            self._files.unlink(self.path(number))
            self._files.sync_directory(self.folder)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self.live.pop(number, None)
        self._allocated.pop(number, None)
        self._files.reached(Step.SEGMENT_UNLINKED)
        return True

    def cut(self, number: int, end: int) -> None:
        """Takes an uncommitted tail away."""
        fd = self._files.open_write(self.path(number), direct=self.abilities.direct)
        try:
            self._files.truncate(fd, end)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        self._allocated[number] = self._files.allocated_bytes(self.path(number))
        self._files.reached(Step.TAIL_CUT)

    def read(self, number: int, offset: int, buffer: memoryview) -> int:
        """Fills the buffer from a segment; the number of bytes, fewer at its end. From any thread.

        The file is opened anew: a descriptor kept would go on serving a file that is gone, and thousands of segments
        would need thousands.
        """
        fd = self._files.open_read(self.path(number), direct=self.abilities.direct)
        try:
            at = 0
            while at < len(buffer):
                done = self._files.pread(fd, buffer[at:], offset + at)
                at += done
                if not done or done % SECTOR_BYTES:
                    break
            if not self.abilities.direct:
                self._files.forget_cached(fd, offset, at)
            return at
        finally:
            self._files.close(fd)

    def close(self) -> None:
        """Closes the active segment."""
        if self._active is not None:
            self._files.close(self._active.fd)
            self._active = None

    def check(self) -> None:
        """Raises AssertionError where the books and the files differ."""
        found = {number: self._files.allocated_bytes(self.path(number)) for number in self.on_disk()}
        assert found == self._allocated, f"segments on disk {found}, in the books {self._allocated}"

    def _begin(self, number: int) -> _Active:
        """Seals the active segment and makes the next."""
        if self._active is not None:
            self._files.close(self._active.fd)
            sealed, self._active = self._active.number, None
            self.remove_if_dead(sealed)
        self._next_number = number + 1
        fd, direct = self._files.create(self.path(number), direct=self.abilities.direct)
        self._active = _Active(number, fd, direct, 0, is_named=False)
        self._allocated[number] = self._files.allocated_bytes(self.path(number))
        self._files.reached(Step.SEGMENT_CREATED)
        return self._active
