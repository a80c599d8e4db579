"""What a small sequence's tokens take beside one that is larger than the device, and by itself.

Each time is taken twice: by the wall, which other programs of the machine share, and as the processor time of the
thread that steps, which is what the engine gave to others between two tokens of the small one.
"""

import random
import tempfile
import time
from array import array
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

import torch

from daemon.config import EngineConfig
from daemon.engine.engine import Engine
from daemon.engine.start import start
from daemon.messages import Abort, SamplingParams, StepOutput, Submit, ToFront
from ops.models.shipped import TINY_HYBRID

GRID, BLOCK = 256, 64
GIANT_TOKENS = 8192
RESIDENT_TOKENS = 1024
SMALL_TOKENS = 64  # of its prompt
VOCAB_SIZE = 8192
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """Between two tokens of the small one, in milliseconds: by the wall, and of the thread that steps."""

    wall_median_ms: float
    wall_p99_ms: float
    cpu_median_ms: float
    cpu_p99_ms: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """One run. `beside_prompt` is while the giant's prompt is computed, `beside_rows` while it answers."""

    tier: str
    slice_ms: float
    solo: Pace
    beside_prompt: Pace
    beside_rows: Pace
    giant_tokens: int  # that it drew in the meantime
    streamed_bytes: int  # for one of them

    def flaws(self) -> list[str]:
        """Where it is not fair: a median over 3 times the solo one, a 99th percentile over that and one slice."""
        most_ms = 3 * self.solo.cpu_median_ms
        found: list[str] = []
        for name, pace in (("prompt", self.beside_prompt), ("rows", self.beside_rows)):
            if pace.cpu_median_ms > most_ms:
                found.append(f"beside the giant's {name}: median {pace.cpu_median_ms} ms, over {most_ms:.1f}")
            if pace.cpu_p99_ms > most_ms + self.slice_ms:
                found.append(f"beside the giant's {name}: p99 {pace.cpu_p99_ms} ms, over {most_ms + self.slice_ms:.1f}")
        return found


def measure(tier: str, num_tokens: int) -> Fairness:
    """`num_tokens` of the small one's are timed in each of ROUNDS rounds of each kind; solo ones before and after.

    Args:
        tier: where the giant's blocks lie, host or disk.
    """
    with tempfile.TemporaryDirectory(prefix="dc-fair-") as folder:
        run = _Run(tier, folder)
        try:
            solo = run.small("solo", num_tokens)
            run.submit("giant", GIANT_TOKENS, 1 << 14)
            prompt = run.small("beside prompt", num_tokens)
            run.until_drawn("giant")
            rows: list[tuple[float, float]] = []
            before = run.drawn["giant"]
            for number in range(ROUNDS):
                rows += run.small(f"beside rows {number}", num_tokens)
            made = run.drawn["giant"] - before
            streamed = run.streamed_bytes()
            run.engine.handle(Abort("giant"))
            for number in range(ROUNDS - 1):
                solo += run.small(f"solo again {number}", num_tokens)
            run.engine.check()
        finally:
            run.engine.close()
    slice_ms = run.engine.config.slice_ms
    return Fairness(tier, slice_ms, _pace(solo), _pace(prompt), _pace(rows), made, streamed)


class _Run:
    def __init__(self, tier: str, folder: str) -> None:
        self.drawn: dict[str, int] = {}
        self.rng = random.Random(0)
        probe = _engine(64 << 20, self._receive, {})
        layout = probe.device.layout
        probe.close()
        room = 2 * (GIANT_TOKENS + (1 << 14)) // BLOCK * layout.block_bytes
        lower: dict[str, object] = {"host_bytes": room}
        if tier == "disk":
            lower = {"disk_path": folder, "spill_bytes": room}
        pool_bytes = RESIDENT_TOKENS // BLOCK * layout.block_bytes + 12 * layout.slot_bytes
        self.engine = _engine(pool_bytes, self._receive, lower)

    def submit(self, name: str, prompt_len: int, max_tokens: int) -> None:
        ids = array("i", (self.rng.randrange(VOCAB_SIZE) for _ in range(prompt_len))).tobytes()
        self.drawn[name] = 0
        params = SamplingParams(seed=0, temperature=0.0)
        self.engine.handle(Submit(name, ids, 1, max_tokens, 0, (), params, ""))

    def small(self, name: str, num_tokens: int) -> list[tuple[float, float]]:
        """Serves a small request; wall and processor seconds of each token after its first."""
        self.submit(name, SMALL_TOKENS, num_tokens + 1)
        times: list[tuple[float, float]] = []
        with torch.inference_mode():
            while self.drawn[name] <= num_tokens:
                assert name in self.engine.requests, f"{name} has ended"
                had = self.drawn[name]
                self.engine.step()
                if self.drawn[name] > had:
                    times.append((time.perf_counter(), time.thread_time()))
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)]

    def until_drawn(self, name: str) -> None:
        """Steps until a request has its first token."""
        with torch.inference_mode():
            while not self.drawn[name]:
                assert not self.engine.is_idle, f"{name} has ended"
                self.engine.step()

    def streamed_bytes(self) -> int:
        streams = [sequence.stream for sequence in self.engine.scheduler.running]
        return max((stream.last_row.num_bytes for stream in streams if stream is not None), default=0)

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, StepOutput):
            for token in message.tokens:
                self.drawn[token.request_id] += 1


def _engine(pool_bytes: int, send: object, lower: dict[str, object]) -> Engine:
    config = EngineConfig(
        str(TINY_HYBRID), pool_bytes=pool_bytes, grid=GRID, block_size=BLOCK, threads=1, max_sequences=2,
        growth_window=BLOCK, stream_share=0.5, **lower,  # type: ignore[arg-type]
    )  # fmt: skip
    return start(config, send=send, progress=lambda done, total: None)[0]  # type: ignore[arg-type]


def _pace(times: list[tuple[float, float]]) -> Pace:
    wall, cpu = ([1000 * pair[i] for pair in times] for i in (0, 1))
    return Pace(*(round(value, 2) for each in (wall, cpu) for value in (median(each), quantiles(each, n=100)[-1])))
