"""A daemon as a child of the demo or the bench: on a private socket, with its log, and never left behind.

The child leads a session of its own, so that Ctrl-C at the terminal reaches only us and we choose how it ends: SIGTERM
and a wait, and SIGKILL for its whole group where that does not help. Should we be killed ourselves, the kernel sends it
SIGTERM.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from downcore.v1 import admin_pb2

from ops.cli.client import ADMIN, Client, connect
from ops.cli.errors import CliError, ExitCode

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
LOG_LINES = 15
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ChildDaemon:
    """A running `python -m PROGRAM`; use it in a with statement, which ends it however the block ends."""

    def __init__(self, model: Path, arguments: Sequence[str] = (), *, program: str = "daemon") -> None:
        self._model = model
        self._arguments = arguments
        self._program = program
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ChildDaemon":
        self._folder = Path(tempfile.mkdtemp(prefix="downcore-"))  # mode 0700
        command = [sys.executable, "-m", self._program, "--model", str(self._model), "--listen", str(self.socket)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # whatever is left of its group
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """A directory of this child's own."""
        assert self._folder is not None, "used outside its with statement"
        return self._folder

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.folder / "downcore.sock"

    @property
    def log(self) -> Path:
        """What it has said."""
        return self.folder / "daemon.log"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The front's process."""
        assert self._process is not None, "used outside its with statement"
        return self._process

    def wait_serving(self, on_loaded: Callable[[float], None]) -> admin_pb2.GetServerInfoResponse:
        """Waits until it serves; `on_loaded` is told the fraction of the weights read.

        Raises:
            CliError: it ended, or took too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        with connect(str(self.socket)) as client:
            while time.monotonic() < deadline:
                self.check_alive()
                info = self._info(client)
                if info is not None:
                    on_loaded(info.loaded)
                    if info.state == admin_pb2.ENGINE_STATE_SERVING:
                        return info
                time.sleep(POLL_S)
        raise CliError(ExitCode.TIMEOUT, f"the daemon does not serve after {START_TIMEOUT_S:.0f} s\n{self.log_tail()}")

    def check_alive(self) -> None:
        """Raises CliError, with the end of its log, where it has ended."""
        code = self.process.poll()
        if code is not None:
            raise CliError(ExitCode.FAILED, f"the daemon ended with code {code}\n{self.log_tail()}")

    def stop(self) -> None:
        """SIGTERM and a clean end.

        Raises:
            CliError: it ended with another code than 0, or not in time.
        """
        self.check_alive()
        self.process.terminate()
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            message = f"the daemon runs on {STOP_TIMEOUT_S:.0f} s after SIGTERM\n{self.log_tail()}"
            raise CliError(ExitCode.TIMEOUT, message) from None
        if code != 0:
            raise CliError(ExitCode.FAILED, f"the daemon ended with code {code} after SIGTERM\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def _info(self, client: Client) -> admin_pb2.GetServerInfoResponse | None:
        if not self.socket.exists():
            return None
        request = admin_pb2.GetServerInfoRequest()
        try:
            return client.unary(f"{ADMIN}/GetServerInfo", request, admin_pb2.GetServerInfoResponse, 5.0)
        except CliError as error:
            if error.code in (ExitCode.UNREACHABLE, ExitCode.DEGRADED, ExitCode.TIMEOUT):
                return None
            raise


@contextmanager
def ending_signals() -> Generator[None]:
    """Inside, SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that with statements end what they hold."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
