"""Files that are read again when they change: certificates, and who may call.

What must hold: what is used was read whole from one version of its files; a version that cannot be used changes
nothing but the log, and the one before it stays in use; the newest version is read, whenever it was finished.
"""

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from daemon.front.sockets import ListenError

log = logging.getLogger("downcore.front")

T = TypeVar("T")
TRIES = 3  # to find files that do not change while they are read


class UnusableFile(ListenError):
    """A file that the listeners need cannot be used; the message says which and why."""


def read_file(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """A whole file, and the permission bits of the very file that was read.

    Raises:
        UnusableFile: it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UnusableFile(f"{path}: {error.strerror}") from None
    if len(content) > max_bytes:
        raise UnusableFile(f"{path} is larger than {max_bytes} bytes")
    return content, mode


class Watched(Generic[T]):
    """What `load` makes of these files. `poll` is called now and then.

    Raises:
        UnusableFile: at the beginning, where there is nothing before it to stay with.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._paths = paths
        self._load = load
        self.value, self._seen = self._read()

    def poll(self, *, force: bool = False) -> bool:
        """Reads the files again where they have changed, or in any case. Returns: whether there is a new value."""
        found = self._signature()
        if not force and found == self._seen:
            return False
        try:
            self.value, self._seen = self._read()
        except UnusableFile as error:
            log.error("not read again, the version before stays in use: %s", error)
            self._seen = found  # as it was before it was read: what has come since is looked at again
            return False
        return True

    def _read(self) -> tuple[T, tuple[object, ...]]:
        for _ in range(TRIES):
            before = self._signature()
            value = self._load()
            if self._signature() == before:
                return value, before
        raise UnusableFile(f"{self._paths[0]} changes while it is read")

    def _signature(self) -> tuple[object, ...]:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, ...] | None:
    """Changes with the file, or with what a link points to."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
