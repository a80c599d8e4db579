"""The front's cost a message, beside a bare grpc.aio server that streams the same bytes to the same client.

The front is the real one, with a null engine behind it, a token to check and stop strings to look for; every token is
a message of its own. The two sides take turns in one run. Rates are of all streams together; processor time is all
that the server's process has used, gRPC's own threads included, divided by the messages that carried a token.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
from downcore.v1 import generation_pb2 as pb
from grpc_health.v1 import health_pb2

from ops.bench.front_echo import ECHO
from ops.cli.client import GENERATION
from ops.cli.errors import CliError, ExitCode

PROMPT_IDS = range(1000, 1064)  # what the null engine says: plain words of any vocabulary
STOPS = ("\n\nUser:", "<|stop|>", "###", "Observation:")  # looked for in every character, and never there
HEALTH = "grpc.health.v1.Health/Check"
NUM_OTHER = 3  # messages of a stream without a token: started, finished, summary
WARM_UP_MESSAGES = 500
CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What to measure."""

    streams: tuple[int, ...]
    messages: int  # of all streams together, in each round
    rounds: int
    pings: int
    rate: float  # tokens a second of each stream where they are paced; 0: as fast as they are taken


@dataclass(frozen=True, slots=True)
class Sample:
    """One side, once."""

    messages_per_s: float
    server_cpu_us: float  # of the server's process, a message
    client_cpu_us: float  # of the client, which is the same for both


@dataclass(frozen=True, slots=True)
class SideBySide:
    """So many streams: medians of the rounds, and the median of the rounds' own ratios."""

    streams: int
    rate: float
    front: Sample
    echo: Sample
    speed_ratio: float  # the front's messages a second to the echo's


@dataclass(frozen=True, slots=True)
class Pings:
    """Round trips of one unary call after the other, milliseconds: the median of each side."""

    front_ms: float
    echo_ms: float


class Side:
    """One server and a channel to it."""

    def __init__(self, socket: Path, pid: int) -> None:
        self.channel = grpc.aio.insecure_channel(f"unix:{socket}", options=(("grpc.use_local_subchannel_pool", 1),))
        self.pid = pid

    async def measure(self, streams: int, messages: int) -> Sample:
        """`streams` streams of `messages` token messages each, all of them at once."""
        calls = [self.call(messages) for _ in range(streams)]
        before_s, own_before_s, began_s = process_cpu_s(self.pid), time.process_time(), time.perf_counter()
        await asyncio.gather(*(self.drain(call, messages) for call in calls))
        took_s = time.perf_counter() - began_s
        total = streams * messages
        server_s = process_cpu_s(self.pid) - before_s
        return Sample(total / took_s, 1e6 * server_s / total, 1e6 * (time.process_time() - own_before_s) / total)

    async def ping(self, count: int) -> float:
        """Milliseconds."""
        times: list[float] = []
        for _ in range(count):
            began_s = time.perf_counter()
            await self.unary()
            times.append(time.perf_counter() - began_s)
        return 1000 * median(times)

    def call(self, messages: int) -> Any:
        """A stream that is about to begin."""
        raise NotImplementedError

    async def drain(self, call: Any, messages: int) -> None:
        """Takes all of a stream. Raises CliError where it is not what was asked for."""
        raise NotImplementedError

    async def unary(self) -> None:
        raise NotImplementedError


class EchoSide(Side):
    """The bare server."""

    def __init__(self, socket: Path, pid: int, message: bytes, rate: float) -> None:
        super().__init__(socket, pid)
        self._message = message
        self._interval_ms = 1000 / rate if rate else 0.0
        self._stream: Any = self.channel.unary_stream("/echo/Stream")
        self._unary: Any = self.channel.unary_unary("/echo/Unary")

    def call(self, messages: int) -> Any:
        return self._stream(ECHO.pack(messages, self._interval_ms) + self._message, timeout=CALL_TIMEOUT_S)

    async def drain(self, call: Any, messages: int) -> None:
        count = 0
        async for _ in call:
            count += 1
        _expect(count, messages)

    async def unary(self) -> None:
        await self._unary(b"ping", timeout=CALL_TIMEOUT_S)


class FrontSide(Side):
    """The real front."""

    def __init__(self, socket: Path, pid: int, token: str) -> None:
        super().__init__(socket, pid)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._stream: Any = self.channel.unary_stream(f"/{GENERATION}/Generate")
        self._unary: Any = self.channel.unary_unary(f"/{HEALTH}")
        self._ping = health_pb2.HealthCheckRequest().SerializeToString()

    def call(self, messages: int) -> Any:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT_IDS),
            stopping=pb.StoppingParams(max_tokens=messages, ignore_eos=True, stop=STOPS),
        )
        return self._stream(request.SerializeToString(), metadata=self._metadata, timeout=CALL_TIMEOUT_S)

    async def drain(self, call: Any, messages: int) -> None:
        count = 0
        async for _ in call:
            count += 1
        _expect(count, messages + NUM_OTHER)

    async def sample(self, messages: int) -> list[pb.GenerateResponse]:
        """A whole stream, parsed."""
        return [pb.GenerateResponse.FromString(data) async for data in self.call(messages)]

    async def typical_message(self) -> bytes:
        """A token's message, of the usual length. Raises CliError where a message has not one token."""
        chunks = [one for one in await self.sample(WARM_UP_MESSAGES) if one.HasField("chunk")]
        _expect(len(chunks), WARM_UP_MESSAGES)
        if {len(one.chunk.token_ids) for one in chunks} != {1}:
            raise CliError(ExitCode.FAILED, "the front put several tokens into one message")
        encoded = sorted((one.SerializeToString() for one in chunks), key=len)
        return encoded[len(encoded) // 2]

    async def wait_serving(self, timeout_s: float) -> None:
        """Raises CliError where it does not serve in time."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            try:
                answer = health_pb2.HealthCheckResponse.FromString(await self._unary(self._ping, wait_for_ready=True))
            except grpc.aio.AioRpcError as error:
                raise CliError(ExitCode.FAILED, f"the front does not answer: {error.details()}") from None
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(0.05)
        raise CliError(ExitCode.TIMEOUT, f"the front does not serve after {timeout_s:.0f} s")

    async def unary(self) -> None:
        await self._unary(self._ping, timeout=CALL_TIMEOUT_S)


async def compare(front: FrontSide, echo: EchoSide, streams: int, settings: FrontSettings) -> SideBySide:
    """Both sides in turns."""
    each = max(1, settings.messages // streams)
    for side in (front, echo):
        await side.measure(streams, max(1, min(each, WARM_UP_MESSAGES // streams)))
    pairs = [(await front.measure(streams, each), await echo.measure(streams, each)) for _ in range(settings.rounds)]
    ratio = median(ours.messages_per_s / theirs.messages_per_s for ours, theirs in pairs)
    ours, theirs = (_medians([pair[i] for pair in pairs]) for i in range(2))
    return SideBySide(streams, settings.rate, ours, theirs, ratio)


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process, to the nanosecond: of the threads that it has now."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[0])
        except OSError:  # a thread that has just ended
            continue
    return total_ns / 1e9


def _expect(count: int, wanted: int) -> None:
    if count != wanted:
        raise CliError(ExitCode.FAILED, f"a stream of {wanted:,} messages came with {count:,}")


def _medians(samples: Sequence[Sample]) -> Sample:
    return Sample(
        median(sample.messages_per_s for sample in samples),
        median(sample.server_cpu_us for sample in samples),
        median(sample.client_cpu_us for sample in samples),
    )
