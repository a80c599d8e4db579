"""The bytes that open requests hold: as clients have sent them, as token ids on their way to the engine, and as answers
that a gateway wants whole.

What must hold: beside each request's own bound and that of their number there is one on all of them together; what a
call or a job has taken is given back when it ends.
"""

from daemon.errors import ErrorReason, RequestError


class HeldBytes:
    """What all open requests hold, and may hold."""

    __slots__ = ("max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class Holding:
    """What one call or job holds, until it is released; releasing it again does nothing."""

    __slots__ = ("_all", "_num_bytes")

    def __init__(self, all_: HeldBytes) -> None:
        self._all = all_
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Takes so many bytes more. Raises RequestError where others hold too much for that; one alone always may."""
        held, most = self._all.num_bytes, self._all.max_bytes
        if held > self._num_bytes and held + num_bytes > most:
            raise RequestError(ErrorReason.QUEUE_FULL, f"open requests hold {held} bytes, of at most {most}")
        self._all.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def move(self) -> "Holding":
        """The same bytes as another's, which may outlive this one."""
        taken = Holding(self._all)
        taken._num_bytes, self._num_bytes = self._num_bytes, 0
        return taken

    def release(self) -> None:
        self._all.num_bytes -= self._num_bytes
        self._num_bytes = 0
