"""The store's file layer with a page cache that can be lost, and with faults at chosen operations.

Files are real. What was done to them since their last sync is remembered, so that a crash can take back any part of
it, sector by sector: a record half on disk, a size without data, a name that never was, a hole that was not kept.
"""

import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiers.files import SECTOR_BYTES, Abilities, OsFiles, Step

BACKUPS = ".unlinked"  # beside the directory: what was unlinked without a sync of its directory


class Crash(BaseException):
    """The process ends here."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Bytes of a file before they were written, punched or cut; and its size."""

    offset: int
    before: bytes
    size_before: int


@dataclass(frozen=True, slots=True)
class _Name:
    """A directory entry that was made (no backup) or removed."""

    path: Path
    backup: Path | None


class SimFiles(OsFiles):
    """`on_op` is called before each operation with its name and number, `on_step` at each persistence step: either may
    raise, wait or count. `most_written` shortens writes."""

    def __init__(self, directory: Path, *, abilities: Abilities | None = None) -> None:
        self.directory = directory
        self.num_ops = 0
        self.steps: Counter[Step] = Counter()
        self.on_op: Callable[[str, int], None] = lambda name, number: None
        self.on_step: Callable[[Step, int], None] = lambda step, number: None
        self.most_written: int | None = None
        self.mutex = threading.RLock()  # held by operations that change something: a crash falls between two
        self._abilities = abilities
        self._paths: dict[int, Path] = {}
        self._changes: dict[Path, list[_Change]] = {}
        self._hopeless: dict[Path, list[_Change]] = {}  # of a sync that failed: no later one helps them
        self._names: list[_Name] = []

    # A crash

    def copy_after_crash(self, target: Path, rng: random.Random) -> None:
        """What a crash now might leave on disk, as a directory of its own."""
        with self.mutex:
            shutil.copytree(self.directory, target)
            self._lose(target, rng)

    def lose(self, rng: random.Random) -> None:
        """Takes back what a crash now might take back. Nothing may go on after it."""
        with self.mutex:
            self._lose(self.directory, rng)

    def _lose(self, root: Path, rng: random.Random) -> None:
        keep = rng.choice((0.0, 0.5, 1.0))  # of each sector that was not synced
        for path in {*self._changes, *self._hopeless}:
            changes = [*self._hopeless.get(path, []), *self._changes.get(path, [])]
            place = root / path.relative_to(self.directory)
            if place.exists() and changes:
                _take_back(place, changes, keep, rng)
        for name in reversed(self._names):
            if rng.random() < 0.5:
                place = root / name.path.relative_to(self.directory)
                if name.backup is None:
                    place.unlink(missing_ok=True)
                elif not place.exists():
                    shutil.copyfile(name.backup, place)

    # Operations

    def reached(self, step: Step) -> None:
        self.steps[step] += 1
        self.on_step(step, self.steps[step])

    def abilities(self, directory: Path) -> Abilities:
        return self._abilities if self._abilities is not None else super().abilities(directory)

    def create(self, path: Path, *, direct: bool) -> tuple[int, bool]:
        with self.mutex:
            self._op("create")
            is_new = not path.exists()
            fd, is_direct = super().create(path, direct=direct)
            self._paths[fd] = path
            if is_new:
                self._names.append(_Name(path, None))
            return fd, is_direct

    def open_write(self, path: Path, *, direct: bool) -> int:
        with self.mutex:
            self._op("open_write")
            fd = super().open_write(path, direct=direct)
            self._paths[fd] = path
            return fd

    def open_read(self, path: Path, *, direct: bool) -> int:
        self._op("open_read")
        return super().open_read(path, direct=direct)

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._op("pread")
        return super().pread(fd, buffer, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self.mutex:
            self._op("pwrite")
            if self.most_written is not None:
                buffer = buffer[: self.most_written]
            self._remember(fd, offset, len(buffer))
            return super().pwrite(fd, buffer, offset)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        with self.mutex:
            self._op("punch")
            self._remember(fd, offset, num_bytes)
            super().punch(fd, offset, num_bytes)

    def truncate(self, fd: int, size: int) -> None:
        with self.mutex:
            self._op("truncate")
            self._remember(fd, size, max(0, os.fstat(fd).st_size - size))
            super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        with self.mutex:
            path = self._paths[fd]
            try:
                self._op("sync")
            except OSError:
                self._hopeless.setdefault(path, []).extend(self._changes.pop(path, []))
                raise
            super().sync(fd)
            self._changes.pop(path, None)

    def sync_directory(self, directory: Path) -> None:
        with self.mutex:
            self._op("sync_directory")
            super().sync_directory(directory)
            for name in [name for name in self._names if name.path.parent == directory]:
                self._names.remove(name)
                if name.backup is not None:
                    name.backup.unlink()

    def unlink(self, path: Path) -> None:
        with self.mutex:
            self._op("unlink")
            if path.exists():
                folder = self.directory.parent / BACKUPS
                folder.mkdir(exist_ok=True)
                backup = folder / f"{path.name}-{self.num_ops}"
                os.link(path, backup)
                self._names.append(_Name(path, backup))
            super().unlink(path)

    def _op(self, name: str) -> None:
        self.num_ops += 1
        self.on_op(name, self.num_ops)

    def _remember(self, fd: int, offset: int, num_bytes: int) -> None:
        path = self._paths[fd]
        with path.open("rb") as file:
            file.seek(offset)
            before = file.read(num_bytes)
        change = _Change(offset, before.ljust(num_bytes, b"\0"), path.stat().st_size)
        self._changes.setdefault(path, []).append(change)


def fail_with(code: int) -> OSError:
    """An error as the system words it."""
    return OSError(code, os.strerror(code))


def no_holes() -> OSError:
    """What a file system without holes answers."""
    return fail_with(errno.EOPNOTSUPP)


def _take_back(place: Path, changes: list[_Change], keep: float, rng: random.Random) -> None:
    with place.open("r+b") as file:
        for change in reversed(changes):
            for at in range(0, len(change.before), SECTOR_BYTES):
                if rng.random() >= keep:
                    file.seek(change.offset + at)
                    file.write(change.before[at : at + SECTOR_BYTES])
        if keep == 0.0:
            file.truncate(changes[0].size_before)
