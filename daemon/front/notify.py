"""What a service manager is told: sd_notify's datagrams to $NOTIFY_SOCKET, and nothing where there is none.

READY once the engine serves, STOPPING when the way out begins, RELOADING around a reload, and WATCHDOG as long as the
step clock turns: a process that is alive and serves nobody is what the manager is to end (sd_notify(3)).
"""

import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger("downcore.front")

SENDS_PER_PERIOD = 3  # of the watchdog, so that a late one or a lost one is not the end


class Notifier:
    """Speaks to the manager that the environment names. A manager that does not listen is logged once, and no error."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        """`address` is a path or an abstract name that begins with @; None: nobody wants to know."""
        self._address = address
        self.watchdog_s = watchdog_s
        self._sent_watchdog_s = float("-inf")
        self._has_failed = False
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Notifier":
        """The manager of NOTIFY_SOCKET, and its watchdog where WATCHDOG_PID names this process or none."""
        address = environ.get("NOTIFY_SOCKET", "")
        is_ours = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        period_us = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(period_us) / 1e6 if is_ours and period_us.isdecimal() and int(period_us) else None
        return cls(address if address.startswith(("/", "@")) else None, watchdog_s)

    @property
    def is_managed(self) -> bool:
        """Somebody wants to know."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """It serves, for the first time or again after a reload."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """The way out begins."""
        self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """A line for people, beside the state."""
        self._send(f"STATUS={_one_line(status)}")

    def tick(self, *, is_alive: bool) -> None:
        """Feeds the watchdog while the daemon is alive, as often as it needs; called more often than that."""
        if self.watchdog_s is None or not is_alive:
            return
        now_s = time.monotonic()
        if now_s - self._sent_watchdog_s >= self.watchdog_s / SENDS_PER_PERIOD:
            self._sent_watchdog_s = now_s
            self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is None or self._address is None:
            return
        target = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            self._socket.sendto(text.encode(), target)
        except OSError as error:
            if not self._has_failed:
                log.warning("the service manager cannot be told (%s)", error.strerror)
            self._has_failed = True


def _one_line(status: str) -> str:
    return " ".join(status.split())
