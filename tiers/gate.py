"""Whether a prefix is loaded from a tier or computed again: what both would take, from what was measured here.

Owns estimates, one `BreakEvenGate` for each tier and one `PrefillSpeed` for the machine; no clock, no bytes. A load is
refused where it would take longer than the computation that it spares. Refusing must not be for ever: a tier that was
slow for a while is tried again by probes, reads of a record that nobody waits for.

What no gate can know is that a load will be slow for the first time. Its `deadline_s` bounds that one: given up then
and computed, it has cost at most twice the computation, and the gate has learnt from it before the next.
"""

from dataclasses import dataclass

FORGET = 0.7  # weight of what was known, at each new measurement
CALM = 0.5  # part of a slowdown that one load at the usual speed leaves
REOPEN_RATIO = 0.8  # of load to compute time, below which a tier that was refused is used again
PROBE_AFTER_S, PROBE_AFTER_MOST_S = 1.0, 60.0
PROBE_BACKOFF = 2.0  # after a probe that tells nothing new
FASTER_RATIO = 0.7  # of expected time: a probe that takes less is followed by another soon


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one load and the figures that it rests on; None where nothing was measured yet."""

    is_load: bool
    load_s: float | None
    compute_s: float | None
    deadline_s: float | None  # after which a load is given up

    def __str__(self) -> str:
        if self.load_s is None or self.compute_s is None:
            return f"load: {'its' if self.load_s is None else 'prefill'} speed is not measured yet"
        cheaper = "load" if self.is_load else "recompute"
        return f"{cheaper} is cheaper: load {_seconds(self.load_s)}, compute {_seconds(self.compute_s)}"


class PrefillSpeed:
    """FLOPs a second of prefill of late."""

    def __init__(self) -> None:
        self.flops_per_s: float | None = None

    def observe(self, flops: int, elapsed_s: float) -> None:
        """A grid chunk was computed, with nothing else running."""
        assert flops > 0
        speed = flops / max(elapsed_s, 1e-9)
        known = self.flops_per_s
        self.flops_per_s = speed if known is None else FORGET * known + (1 - FORGET) * speed

    def compute_s(self, flops: int) -> float | None:
        """How long so many FLOPs take; None before the first chunk."""
        return None if self.flops_per_s is None else flops / self.flops_per_s


class BreakEvenGate:
    """Break-even of one tier.

    A load takes latency + bytes / bandwidth, fitted by least squares to the loads of late, times the slowdown by which
    the worst of late exceeded the fit.
    """

    def __init__(self, prefill: PrefillSpeed) -> None:
        self.prefill = prefill
        self.latency_s: float | None = None
        self.s_per_byte: float | None = None
        self.slowdown = 1.0
        self.is_refusing = False
        # Weighted sums of the loads of late, with x bytes and y seconds: count, x, y, x*x, x*y.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._probe_after_s = PROBE_AFTER_S
        self._observed_s = 0.0  # when the last load was observed

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth beside latency, without the slowdown."""
        return 1 / self.s_per_byte if self.s_per_byte else None

    def load_s(self, num_bytes: int) -> float | None:
        """How long a load of so many bytes should be expected to take; None before the first."""
        if self.latency_s is None or self.s_per_byte is None:
            return None
        return (self.latency_s + num_bytes * self.s_per_byte) * self.slowdown

    def decide(self, num_bytes: int, flops: int, *, queued_bytes: int = 0) -> Verdict:
        """Load `num_bytes`, behind `queued_bytes` that others are waiting for, or compute `flops`?

        Before both speeds are known it loads: that is how they become known.
        """
        verdict = self.forecast(num_bytes + queued_bytes, flops)
        if verdict.load_s is not None and verdict.compute_s is not None:
            self.is_refusing = not verdict.is_load
        return verdict

    def forecast(self, num_bytes: int, flops: int) -> Verdict:
        """What would be decided. Nothing follows from it for other loads."""
        load_s, compute_s = self.load_s(num_bytes), self.prefill.compute_s(flops)
        if load_s is None or compute_s is None:
            return Verdict(True, load_s, compute_s, compute_s)
        is_load = load_s <= compute_s * (REOPEN_RATIO if self.is_refusing else 1.0)
        return Verdict(is_load, load_s, compute_s, compute_s if is_load else None)

    def observe(self, num_bytes: int, elapsed_s: float, now_s: float) -> None:
        """A load or a probe has ended, or was given up after `elapsed_s`."""
        assert num_bytes > 0
        usual_s = self.load_s(num_bytes)
        ratio = 1.0 if usual_s is None else elapsed_s * self.slowdown / max(usual_s, 1e-9)
        self.slowdown = max(ratio, 1 + CALM * (self.slowdown - 1), 1.0)
        fresh = (1.0, float(num_bytes), elapsed_s, float(num_bytes) ** 2, num_bytes * elapsed_s)
        self._sums = tuple(FORGET * old + new for old, new in zip(self._sums, fresh, strict=True))
        self._fit()
        if self.is_refusing and ratio > FASTER_RATIO:
            self._probe_after_s = min(self._probe_after_s * PROBE_BACKOFF, PROBE_AFTER_MOST_S)
        else:
            self._probe_after_s = PROBE_AFTER_S
        self._observed_s = now_s

    def wants_probe(self, now_s: float) -> bool:
        """A tier that is refused has not been measured for a while: read a record of it when nothing else does."""
        return self.is_refusing and now_s - self._observed_s >= self._probe_after_s

    def _fit(self) -> None:
        """A line of latency and seconds a byte, neither of them negative."""
        count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        slope = (count * xy - x * y) / spread if spread > 1e-9 * xx * count else y / x
        latency = (y - slope * x) / count
        if slope <= 0:
            slope, latency = y / x, 0.0
        elif latency < 0:
            slope, latency = xy / xx, 0.0
        self.latency_s, self.s_per_byte = latency, slope


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.1f} s"
