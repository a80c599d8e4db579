"""The file operations of the disk tier, each of them one method, and the names of its persistence steps.

`OsFiles` is the real thing. Tests put a layer in its place that loses what was not synced, tears writes and fails at
will, so the store must do all its file work through here (SQLite does its own). Methods raise OSError as the system
does. No method retries, buffers or decides anything.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

LOCK = "lock"  # the file that the single writer of a directory holds
PROBE = "probe"  # what `abilities` tries on, and a kill may leave
SECTOR_BYTES = 4096  # alignment of records, of direct I/O and of what a hole gives back

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Step(StrEnum):
    """Points of the write, delete and open orders after which a crash leaves another state behind."""

    SEGMENT_CREATED = "segment created"
    DATA_WRITTEN = "data written"
    DATA_SYNCED = "data synced"
    DIRECTORY_SYNCED = "directory synced"
    WRITE_COMMITTING = "write committing"  # inside the index transaction, before its commit
    WRITE_COMMITTED = "write committed"
    DELETE_COMMITTING = "delete committing"
    DELETE_COMMITTED = "delete committed"
    RECORD_ERASED = "record erased"
    SEGMENT_UNLINKED = "segment unlinked"
    SETTING_COMMITTING = "setting committing"  # a pin or a quota
    TAIL_CUT = "tail cut"
    RECOVERY_COMMITTING = "recovery committing"  # what the segments say goes into the index
    RECOVERY_COMMITTED = "recovery committed"
    INDEX_REMOVED = "index removed"  # a damaged one; a new one is not yet there
    INDEX_CREATED = "index created"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the file system under a directory can do."""

    direct: bool  # reads and writes past the page cache
    punch: bool  # gives a range back inside a file


class OsFiles:
    """File operations of this system. Stateless; every method may be called from any thread."""

    def reached(self, step: Step) -> None:
        """A persistence step was made. Does nothing here; a test's layer may crash or fail."""

    def abilities(self, directory: Path) -> Abilities:
        """Tries both on a file of its own, which it removes."""
        path = directory / PROBE
        fd, direct = self.create(path, direct=True)
        try:
            sector = aligned_buffer(SECTOR_BYTES)
            try:
                self.pwrite(fd, sector, 0)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = False  # opens so, but wants a larger alignment than ours
            try:
                self.punch(fd, 0, SECTOR_BYTES)
                punch = True
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                punch = False
        finally:
            self.close(fd)
            self.unlink(path)
        return Abilities(direct, punch)

    def create(self, path: Path, *, direct: bool) -> tuple[int, bool]:
        """A file to read and write, truncated if it exists: its descriptor, and whether it is direct."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, direct)

    def open_write(self, path: Path, *, direct: bool) -> int:
        """An existing file, to read and write."""
        return self._open(path, os.O_RDWR, direct)[0]

    def open_read(self, path: Path, *, direct: bool) -> int:
        """An existing file, to read."""
        return self._open(path, os.O_RDONLY, direct)[0]

    def close(self, fd: int) -> None:
        """Closes a descriptor."""
        os.close(fd)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Reads once into the buffer; the number of bytes, fewer at the file's end."""
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Writes once; the number of bytes, which may be fewer."""
        return os.pwritev(fd, [buffer], offset)

    def sync(self, fd: int) -> None:
        """Data, and the metadata needed to find it, are durable on return."""
        os.fdatasync(fd)

    def sync_directory(self, directory: Path) -> None:
        """Names in the directory are durable on return."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Gives [offset, offset + num_bytes) back to the file system; it reads as zeros from then on."""
        if _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, num_bytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, size: int) -> None:
        """Cuts the file."""
        os.ftruncate(fd, size)

    def forget_cached(self, fd: int, offset: int, num_bytes: int) -> None:
        """Asks the page cache to drop a range that was read or synced without direct I/O."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def size(self, path: Path) -> int:
        """Length of a file."""
        return os.stat(path).st_size

    def allocated_bytes(self, path: Path) -> int:
        """What du says of one file or of a directory itself; 0 where there is none."""
        try:
            return os.stat(path).st_blocks * 512
        except FileNotFoundError:
            return 0

    def names(self, directory: Path) -> list[str]:
        """Everything in a directory, sorted."""
        return sorted(os.listdir(directory))

    def make_directory(self, path: Path) -> None:
        """Makes it, readable by its owner alone, unless it is there."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """Moves a file over another."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        """Removes a file."""
        os.unlink(path)

    def lock(self, path: Path) -> int:
        """Takes the exclusive lock on a file until the descriptor is closed; BlockingIOError where another has it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _open(self, path: Path, flags: int, direct: bool) -> tuple[int, bool]:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, flags, 0o600), False


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory at a page boundary, as direct I/O wants it; a multiple of SECTOR_BYTES.

    Every page is touched now, not in the middle of a read, and counts as resident from now on.
    """
    assert num_bytes > 0
    buffer = memoryview(mmap.mmap(-1, round_up(num_bytes)))
    for at in range(0, len(buffer), mmap.PAGESIZE):
        buffer[at] = 0
    return buffer


def round_up(num_bytes: int) -> int:
    """To the next multiple of SECTOR_BYTES."""
    return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES
