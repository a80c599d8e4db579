"""Child processes of the front, started without running anything of ours in the forked child.

The event loop's own way to start a process forks with the interpreter's and gRPC's fork handlers, while gRPC's threads
run: a child was seen to die of it on the spot. `subprocess` uses vfork and execs at once. The end of a
child arrives through a pidfd, so that no signal handler and no thread is needed.
"""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from daemon.front.processor import as_given


class Child:
    """A started process in a session of its own: a signal to the front's group is the front's to act on."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        stdio: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it; `stdio` becomes its standard input and output, `environment` is added to ours where not set.

        Raises:
            OSError: it cannot be started.
        """
        with as_given():
            self._popen = subprocess.Popen(
                command,
                pass_fds=tuple(pass_fds),
                stdin=subprocess.DEVNULL if stdio is None else stdio.fileno(),
                stdout=None if stdio is None else stdio.fileno(),
                start_new_session=True,
                env={**(environment or {}), **os.environ},
            )
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError:  # for want of a descriptor: nobody would ever end it
            self._popen.kill()
            self._popen.wait()
            raise
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.returncode

    async def wait(self) -> int:
        """Its exit status, negative where a signal ended it."""
        return await asyncio.shield(self._exited)

    def kill(self) -> None:
        """Ends it at once, where it still runs."""
        if self._popen.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._popen.wait()
        os.close(self._pidfd)
        if not self._exited.done():
            self._exited.set_result(status)
