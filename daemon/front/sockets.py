"""Where the front may listen: Unix sockets in a directory that is ours alone, and TCP.

What must hold: nobody else can reach the socket or put another in its place; a living daemon's socket is never
removed; a dead daemon's never hinders; beyond this machine nothing is open without TLS and authentication.
"""

import errno
import fcntl
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MAX_PATH_BYTES = 107  # sun_path, less its terminating zero


class ListenError(Exception):
    """The front cannot listen where it was told to."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A socket path that is ours while `lock` is open."""

    path: Path
    lock: IO[bytes]

    @property
    def target(self) -> str:
        return f"unix:{self.path}"

    def release(self) -> None:
        """Removes the socket and lets another daemon have the path."""
        self.path.unlink(missing_ok=True)
        self.lock.close()


def claim_socket(listen: str) -> Claim:
    """Makes the directory, verifies it, and clears what a dead daemon left.

    Raises:
        ListenError: the directory is not ours alone, the path is too long, or a living daemon has it.
    """
    path = Path(os.path.abspath(listen.removeprefix("unix:")))
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ListenError(f"socket path {path} is longer than {MAX_PATH_BYTES} bytes")
    _make_private_directory(path.parent)
    try:
        lock = open(path.with_name(path.name + ".lock"), "wb")  # noqa: SIM115 - held for the daemon's life
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ListenError(f"another daemon holds {path}") from None
    except OSError as error:
        raise ListenError(f"cannot lock {path}: {error.strerror}") from error
    try:
        _remove_stale(path)
    except ListenError:
        lock.close()
        raise
    return Claim(path, lock)


def tcp_target(tcp: str, *, is_guarded: bool) -> str:
    """The listener address for HOST:PORT. Unguarded, HOST must be a loopback address or localhost.

    Args:
        is_guarded: there are TLS and authentication.

    Raises:
        ListenError: it is not, or the port is none.
    """
    host, colon, port = tcp.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"{tcp!r} is not HOST:PORT")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ListenError(f"{host!r} is not an IP address") from None
    if not address.is_loopback and not is_guarded:
        raise ListenError(
            f"{address} is not a loopback address: beyond this machine the daemon listens with TLS and authentication"
            " only; set tls_cert_file, tls_key_file and principals_file"
        )
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _make_private_directory(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ListenError(f"cannot make directory {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ListenError(f"{folder} is not a directory")
    if found.st_uid != os.getuid():
        raise ListenError(f"{folder} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ListenError(f"{folder} is open to other users; chmod 700 it, or listen in a directory of its own")


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise ListenError(f"{path} is in use") from error
        else:
            raise ListenError(f"another server answers on {path}")
    path.unlink()
