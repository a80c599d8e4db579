"""The service manager hears READY, STOPPING and WATCHDOG, and no WATCHDOG while the step clock stands still."""

import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.front.notify import Notifier
from tests.front.harness import Front, eventually


class Manager:
    """Listens as a service manager does."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self.sock.settimeout(20)

    def next(self) -> dict[str, str]:
        """The next message's fields."""
        return dict(line.split("=", 1) for line in self.sock.recv(4096).decode().splitlines())

    def until(self, name: str) -> dict[str, str]:
        """Messages up to one that has this field."""
        while name not in (message := self.next()):
            pass
        return message

    def drop_all(self) -> int:
        """How many wait now."""
        self.sock.setblocking(False)
        count = 0
        try:
            while self.sock.recv(4096):
                count += 1
        except BlockingIOError:
            self.sock.settimeout(20)
        return count


@contextmanager
def managed(address: str) -> Generator[Manager]:
    manager = Manager(address)
    try:
        yield manager
    finally:
        manager.sock.close()


@pytest.mark.parametrize("is_abstract", [False, True])
def test_each_word_is_a_datagram_to_a_path_or_an_abstract_name(is_abstract: bool, socket_folder: Path) -> None:
    address = f"@downcore-test-{os.getpid()}" if is_abstract else str(socket_folder / "notify")
    with managed(address) as manager:
        notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
        notifier.ready("serving\nSTOPPING=1")
        assert manager.next() == {"READY": "1", "STATUS": "serving STOPPING=1"}
        before_us = time.monotonic_ns() // 1000
        notifier.reloading()
        reloading = manager.next()
        assert (reloading["RELOADING"], int(reloading["MONOTONIC_USEC"]) >= before_us) == ("1", True)
        notifier.stopping("draining")
        assert manager.next() == {"STOPPING": "1", "STATUS": "draining"}
        notifier.close()


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_the_one_that_was_meant_for_this_process(
    environ: dict[str, str], watchdog_s: float | None
) -> None:
    assert Notifier.from_environment(environ).watchdog_s == watchdog_s


def test_without_a_manager_and_with_a_deaf_one_nothing_happens(socket_folder: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nowhere/notify"}):
        notifier = Notifier.from_environment({"WATCHDOG_USEC": "1000", **environ})
        notifier.ready("x")
        notifier.tick(is_alive=True)
        notifier.close()


def test_a_daemon_tells_its_life_and_its_watchdog_is_the_step_clock(
    tmp_path: Path, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(socket_folder / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "600000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    with managed(str(socket_folder / "notify")) as manager:
        front = Front(tmp_path, flags=("--pulse-timeout-s", "0.4"))
        assert manager.until("READY")["STATUS"] == "serving scripted"
        for _ in range(3):
            manager.until("WATCHDOG")
        front.process.send_signal(signal.SIGHUP)
        assert int(manager.until("RELOADING")["MONOTONIC_USEC"]) > 0
        assert "read again" in manager.until("READY")["STATUS"]
        engine_pid = front.info().engine_pid
        os.kill(engine_pid, signal.SIGUSR1)  # the pulse stops; the front itself is well
        eventually(lambda: front.health_status() != 1)
        manager.drop_all()
        manager.sock.settimeout(0.7)
        with pytest.raises(TimeoutError):  # no tick, no watchdog
            manager.next()
        manager.sock.settimeout(20)
        os.kill(engine_pid, signal.SIGUSR2)
        manager.until("WATCHDOG")
        os.kill(engine_pid, signal.SIGKILL)  # an engine that is being replaced is the front's own affair
        manager.drop_all()
        manager.until("WATCHDOG")
        eventually(lambda: front.health_status() == 1)
        manager.drop_all()
        front.process.send_signal(signal.SIGTERM)
        assert "draining" in manager.until("STOPPING")["STATUS"]
        assert front.close() == 0
