"""What the bench measures. Every figure is the median of its rounds; the two sides of a comparison take turns."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from ops.bench.load import Prompts, Timed, ask, ask_together, follow
from ops.cli.client import Client
from ops.cli.errors import CliError, ExitCode

DECODE_TOKENS = 48
NEW_END_TOKENS = 16
SHORT_PROMPT_TOKENS = 64
STREAM_TOKENS = 64
STALL_STREAM_TOKENS = 4096  # a bound; it is cancelled when the long prompt is loaded
STALL_START_TOKENS = 16  # of the running stream, before the long prompt is sent
COMPARED_CONTEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    contexts: tuple[int, ...]  # tokens
    streams: tuple[int, ...]
    long_prompt_tokens: int
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """One context length."""

    context_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    cold_first_token_s: float
    hit_first_token_s: float | None  # None: no grid position lies inside, so nothing can be shared
    hit_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """So many streams at once."""

    streams: int
    tokens_per_s: float  # of all together
    front_cpu_us_per_message: float


@dataclass(frozen=True, slots=True)
class StallFigures:
    """A running stream's median time between tokens, alone and while a long prompt loads."""

    long_prompt_tokens: int
    solo_token_s: float
    loading_token_s: float
    tokens_while_loading: int


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side of the comparison at COMPARED_CONTEXT_TOKENS."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(slots=True)
class Rounds:
    """Samples of one figure pair."""

    prefill: list[float] = field(default_factory=list[float])
    decode: list[float] = field(default_factory=list[float])

    def figures(self) -> SideFigures:
        """Medians."""
        return SideFigures(median(self.prefill), median(self.decode))


class Reference:
    """The program ops/bench/reference.py, alive inside a with statement."""

    def __init__(self, model: Path, threads: int) -> None:
        script = Path(__file__).parent / "reference.py"
        self._command = [sys.executable, str(script), "--model", str(model), "--threads", str(threads)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Reference":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def measure(self, context_tokens: int, decode_tokens: int) -> tuple[float, float]:
        """Tokens a second of prefill and of decode."""
        assert self._process is not None
        assert self._process.stdin is not None
        command = {"context_tokens": context_tokens, "decode_tokens": decode_tokens}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return context_tokens / answer["prefill_s"], decode_tokens / answer["decode_s"]

    def _answer(self) -> dict[str, float]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CliError(ExitCode.FAILED, "transformers ended without an answer; is it installed (make bench)?")
        return json.loads(line)


class Measurement:
    """Figures of one running daemon."""

    def __init__(self, client: Client, front_pid: int, prompts: Prompts, tell: Callable[[str], None]) -> None:
        self._client = client
        self._front_pid = front_pid
        self._prompts = prompts
        self._tell = tell

    def warm_up(self) -> None:
        """First calls allocate and pick kernels."""
        ask(self._client, self._prompts.fresh(SHORT_PROMPT_TOKENS), 8)

    def compare(self, reference: Reference | None, rounds: int) -> tuple[SideFigures, SideFigures | None]:
        """Both sides in turns at one context length: ours, and theirs where there is a reference."""
        ours, theirs = Rounds(), Rounds()
        for number in range(rounds):
            self._tell(f"comparing, round {number + 1} of {rounds}")
            timed = ask(self._client, self._prompts.fresh(COMPARED_CONTEXT_TOKENS), DECODE_TOKENS + 1)
            ours.prefill.append(COMPARED_CONTEXT_TOKENS / timed.prefill_s)
            ours.decode.append(timed.decode_rate)
            if reference is not None:
                prefill, decode = reference.measure(COMPARED_CONTEXT_TOKENS, DECODE_TOKENS)
                theirs.prefill.append(prefill)
                theirs.decode.append(decode)
        return ours.figures(), theirs.figures() if reference is not None else None

    def context(self, context_tokens: int, rounds: int) -> ContextFigures:
        """Cold prompts of one length, each followed by one that shares all but its end."""
        cold: list[Timed] = []
        hits: list[Timed] = []
        for number in range(rounds):
            self._tell(f"context {context_tokens:,}, round {number + 1} of {rounds}")
            prompt = self._prompts.fresh(context_tokens)
            cold.append(ask(self._client, prompt, DECODE_TOKENS + 1))
            hits.append(ask(self._client, self._prompts.with_new_end(prompt, NEW_END_TOKENS), 2))
        if any(timed.cached_tokens for timed in cold):
            raise CliError(ExitCode.FAILED, "a prompt that is new came from the cache")
        cached = min(timed.cached_tokens for timed in hits)
        return ContextFigures(
            context_tokens=context_tokens,
            prefill_tokens_per_s=median(context_tokens / timed.prefill_s for timed in cold),
            decode_tokens_per_s=median(timed.decode_rate for timed in cold),
            cold_first_token_s=median(timed.first_token_s for timed in cold),
            hit_first_token_s=median(timed.first_token_s for timed in hits) if cached else None,
            hit_cached_tokens=cached,
        )

    def streams(self, streams: int, rounds: int) -> StreamFigures:
        """Tokens a second of all streams, and the front's processor time for each message of tokens."""
        rates: list[float] = []
        costs: list[float] = []
        for number in range(rounds):
            self._tell(f"{streams} streams, round {number + 1} of {rounds}")
            prompts = [self._prompts.fresh(SHORT_PROMPT_TOKENS) for _ in range(streams)]
            before_s = process_cpu_s(self._front_pid)
            timed = ask_together(self._client, prompts, STREAM_TOKENS)
            used_s = process_cpu_s(self._front_pid) - before_s
            # From the moment all streams have their first token: what comes before is prefill.
            start = max(one.token_times_s[0] for one in timed)
            end = max(one.token_times_s[-1] for one in timed)
            rates.append(sum(time_s > start for one in timed for time_s in one.token_times_s) / (end - start))
            costs.append(1e6 * used_s / sum(one.num_messages for one in timed))
        return StreamFigures(streams, median(rates), median(costs))

    def stall(self, long_prompt_tokens: int) -> StallFigures:
        """One stream that runs, and a long prompt that arrives in the middle of it."""
        self._tell(f"a stream while {long_prompt_tokens:,} tokens load")
        solo = ask(self._client, self._prompts.fresh(SHORT_PROMPT_TOKENS), STREAM_TOKENS)
        running, loaded = threading.Event(), threading.Event()
        times_s: list[float] = []

        def on_token(time_s: float) -> bool:
            times_s.append(time_s)
            if len(times_s) == STALL_START_TOKENS:
                running.set()
            return not loaded.is_set()

        def stream() -> None:
            try:
                follow(self._client, self._prompts.fresh(SHORT_PROMPT_TOKENS), STALL_STREAM_TOKENS, on_token)
            finally:
                running.set()

        thread = threading.Thread(target=stream)
        thread.start()
        running.wait()
        try:
            long = ask(self._client, self._prompts.fresh(long_prompt_tokens), 1)
        finally:
            loaded.set()
            thread.join()
        during = gaps([time_s for time_s in times_s if long.sent_s <= time_s <= long.token_times_s[0]])
        if len(during) < 3:
            raise CliError(
                ExitCode.FAILED, f"the running stream gave {len(during)} tokens while the long prompt loaded"
            )
        return StallFigures(
            long_prompt_tokens, median(gaps(list(solo.token_times_s))), median(during), tokens_while_loading=len(during)
        )


def gaps(times_s: list[float]) -> list[float]:
    """Times between neighbours."""
    return [after - before for before, after in pairwise(times_s)]


def process_cpu_s(pid: int) -> float:
    """Processor seconds, user and system, that a process has used."""
    # Fields 14 and 15; the name before them is in parentheses and may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
