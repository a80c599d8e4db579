"""Whether the disk may be used: failures close a gate, and a probe now and then opens it again.

Time is passed in, in seconds of any steady clock.
"""

import threading
from dataclasses import dataclass
from enum import StrEnum

FIRST_PROBATION_S = 1.0
LONGEST_PROBATION_S = 300.0


class StoreState(StrEnum):
    """What the tier can do now."""

    OK = "ok"
    READ_ONLY = "read-only"  # writes failed; what is stored is served
    DEGRADED = "degraded"  # reads failed as well: everything is a miss


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """What a store can do now, and if that is not all, why and when it tries again."""

    state: StoreState
    reason: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class GateView:
    """A gate as it stands."""

    is_open: bool
    reason: str  # of the latest failure while it is closed, else empty
    retry_in_s: float


class Gate:
    """Open, or closed until a probe succeeds. Probes come after 1, 2, 4 ... 300 seconds, one at a time."""

    def __init__(self, num_failures: int) -> None:
        self._needed = num_failures  # in a row, to close
        self._failures = 0
        self._wait_s = FIRST_PROBATION_S
        self._retry_at: float | None = None  # None: open
        self._reason = ""
        self._lock = threading.Lock()

    def admits(self, now: float) -> bool:
        """Whether to try. A closed gate lets one try through whenever its probation is over."""
        with self._lock:
            if self._retry_at is None:
                return True
            if now < self._retry_at:
                return False
            self._retry_at = now + self._wait_s
            return True

    def succeeded(self) -> None:
        """A try went well."""
        with self._lock:
            self._failures, self._wait_s, self._retry_at, self._reason = 0, FIRST_PROBATION_S, None, ""

    def failed(self, now: float, reason: str) -> None:
        """A try failed."""
        with self._lock:
            self._failures += 1
            self._reason = reason
            if self._retry_at is not None:
                self._wait_s = min(2 * self._wait_s, LONGEST_PROBATION_S)
            if self._failures >= self._needed:
                self._retry_at = now + self._wait_s

    def view(self, now: float) -> GateView:
        """For people."""
        with self._lock:
            if self._retry_at is None:
                return GateView(True, "", 0.0)
            return GateView(False, self._reason, max(0.0, self._retry_at - now))
