"""Load for a daemon, in two shapes, and what each request met.

A closed loop keeps a number of requests open: a slow server is asked less. An open loop sends at random times that owe
nothing to the server (a Poisson process), as the world does; its latencies count from the time a request was due, so
that one that had to wait here has waited. Everything runs in one thread, in one event loop.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from downcore.v1 import generation_pb2

from ops.bench.load import Prompts, make_request
from ops.cli.client import GENERATION, reason_of

METHOD = f"/{GENERATION}/Generate"
MAX_REQUESTS = 1_000_000
SETTLE_S = 60.0  # for what is open when the time is over; then it is cut off
CUT_OFF = "CUT_OFF"  # an error of ours: it was still open then
NOT_SENT = "NOT_SENT"  # an error of ours: as many as may be open were open


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """One run. Exactly one of `concurrency` and `rate_per_s` says its shape.

    `shared_tokens` of each prompt are the same for all requests; the rest is drawn from the seed, new for each.
    """

    concurrency: int | None
    rate_per_s: float | None
    duration_s: float
    max_requests: int
    max_open: int
    prompt_tokens: int
    shared_tokens: int
    answer_tokens: int
    timeout_s: float
    seed: int

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate_per_s is None), "a loop is closed or open"
        assert 0 <= self.shared_tokens <= self.prompt_tokens


@dataclass(slots=True)
class Outcome:
    """What one request met. Times are those of time.perf_counter; lists run in step."""

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list[float])  # of messages that carried tokens
    arrived_tokens: list[int] = field(default_factory=list[int])  # how many each carried
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None  # a reason of the catalogue, a status code, CUT_OFF or NOT_SENT

    @property
    def first_token_s(self) -> float | None:
        """From when it was due."""
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else None

    @property
    def total_s(self) -> float:
        """From when it was due to the end of its stream."""
        return self.ended_s - self.due_s

    @property
    def num_tokens(self) -> int:
        return sum(self.arrived_tokens)

    def gaps_s(self) -> list[float]:
        """Time between tokens, one for each after the first message: tokens that came together share what they took."""
        gaps: list[float] = []
        for number in range(1, len(self.arrivals_s)):
            count = self.arrived_tokens[number]
            gaps += [(self.arrivals_s[number] - self.arrivals_s[number - 1]) / count] * count
        return gaps


@dataclass(frozen=True, slots=True)
class Run:
    """All outcomes of a run, in the order in which they were due; `began_s` and `ended_s` of time.perf_counter."""

    outcomes: Sequence[Outcome]
    began_s: float
    ended_s: float  # of sending
    late_s: float  # the longest that a request was sent after it was due: much of it, and this machine was the limit


class Load:
    """One run over one channel."""

    def __init__(self, channel: grpc.aio.Channel, settings: LoadSettings, vocab_size: int) -> None:
        self._settings = settings
        self._prompts = Prompts(settings.seed, vocab_size)
        self._shared = self._prompts.fresh(settings.shared_tokens)
        self._random = random.Random(settings.seed)
        self._outcomes: list[Outcome] = []
        self._num_open = 0
        self._call = channel.unary_stream(
            METHOD,
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )

    async def run(self) -> Run:
        """Sends for the time of the settings, and waits for what is open then."""
        began_s = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        if self._settings.concurrency is not None:
            tasks |= {asyncio.create_task(self._keep_asking(began_s)) for _ in range(self._settings.concurrency)}
            await asyncio.wait(tasks, timeout=self._settings.duration_s)
        else:
            async for outcome in self._arrivals(began_s):
                tasks.add(task := asyncio.create_task(self._ask(outcome)))
                task.add_done_callback(tasks.discard)
        ended_s = time.perf_counter()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=SETTLE_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        late_s = max((outcome.sent_s - outcome.due_s for outcome in self._outcomes if outcome.sent_s), default=0.0)
        return Run(self._outcomes, began_s, ended_s, late_s)

    async def _keep_asking(self, began_s: float) -> None:
        while (due_s := time.perf_counter()) - began_s < self._settings.duration_s and self._has_room:
            outcome = Outcome(due_s)
            self._outcomes.append(outcome)
            await self._ask(outcome)

    async def _arrivals(self, began_s: float) -> AsyncIterator[Outcome]:
        """Each request when it is due; those for which there is no room here are outcomes, and not given."""
        assert self._settings.rate_per_s is not None
        due_s = began_s
        while self._has_room:
            due_s += self._random.expovariate(self._settings.rate_per_s)
            if due_s - began_s > self._settings.duration_s:
                await asyncio.sleep(max(0.0, began_s + self._settings.duration_s - time.perf_counter()))
                return
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            outcome = Outcome(due_s)
            self._outcomes.append(outcome)
            if self._num_open >= self._settings.max_open:
                outcome.error, outcome.ended_s = NOT_SENT, time.perf_counter()
                continue
            yield outcome

    @property
    def _has_room(self) -> bool:
        return len(self._outcomes) < self._settings.max_requests

    async def _ask(self, outcome: Outcome) -> None:
        prompt = self._shared + self._prompts.fresh(self._settings.prompt_tokens - len(self._shared))
        request = make_request(prompt, self._settings.answer_tokens)
        self._num_open += 1
        outcome.sent_s = time.perf_counter()
        try:
            async for event in self._call(request, timeout=self._settings.timeout_s):
                if event.WhichOneof("event") == "chunk" and event.chunk.token_ids:
                    outcome.arrivals_s.append(time.perf_counter())
                    outcome.arrived_tokens.append(len(event.chunk.token_ids))
                elif event.WhichOneof("event") == "summary":
                    usage = event.summary.usage
                    outcome.prompt_tokens = usage.prompt_tokens
                    outcome.cached_tokens = (
                        usage.cached_tokens.device + usage.cached_tokens.host + usage.cached_tokens.disk
                    )
        except grpc.aio.AioRpcError as error:
            outcome.error = reason_of(error) or error.code().name
        except asyncio.CancelledError:
            outcome.error = CUT_OFF
            raise
        finally:
            outcome.ended_s = time.perf_counter()
            self._num_open -= 1
