"""A Generate call that is over, as those are told who keep no requests: metrics, the request log, traces.

It says counts, times and ids; no text and no token.
"""

from dataclasses import dataclass
from enum import StrEnum

from daemon import messages
from daemon.errors import ErrorReason
from daemon.front.trace_context import TraceContext


class End(StrEnum):
    """How one answer of a request ended."""

    STOP = "stop"  # by a stop string or token
    LENGTH = "length"
    ABORTED = "aborted"  # by Abort, an operator or the end of a drain
    CANCELLED = "cancelled"  # its client left or cancelled
    FAILED = "failed"  # with an error


@dataclass(frozen=True, slots=True)
class Ended:
    """One request. Times are of time.monotonic; what it did not come to is None."""

    request_id: str
    principal: str
    trace: TraceContext | None
    ends: tuple[End, ...]  # of its answers
    error: ErrorReason | None
    usage: messages.Usage | None  # once its prompt was computed
    completion_tokens: int
    arrived_s: float
    submitted_s: float | None  # to the engine
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        """From its arrival to its admission, tokenizing included."""
        if self.usage is None or self.submitted_s is None:
            return None
        return self.submitted_s - self.arrived_s + self.usage.queue_s

    @property
    def decode_s(self) -> float | None:
        """From its first token to its last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s

    @property
    def is_complete(self) -> bool:
        """Every answer ended as its request asked."""
        return self.error is None and all(end in (End.STOP, End.LENGTH) for end in self.ends)
