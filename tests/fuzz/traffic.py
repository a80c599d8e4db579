"""Sends cases through many connections at once, and has every answer judged."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from daemon.front.access import CACHE, GENERATION
from tests.fuzz.http2 import Script
from tests.fuzz.judge import complaint, reason_of_trailers
from tests.fuzz.methods import Method

NUM_CHANNELS = 16
AT_ONCE = 64
PATIENCE_S = 90.0  # for any answer: a call that takes longer hangs
GLANCE_S = 0.15  # of a stream without end
RAW_WAIT_S = 0.02
MAX_SLOW = 64  # connections that say nothing more, open at a time
LASTS = {f"/{GENERATION}/Generate": "summary", f"/{CACHE}/WarmPrefix": "receipt"}  # how a whole stream ends
# The deadline goes with the call, and where the daemon's clock is first, its end of the stream is simply closed.
OUT_OF_TIME = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Args:
        kind: what is odd about it, for the count.
        requests: how many times `data` is sent.
        timeout_s: None: it is answered within PATIENCE_S; else it may run out of time.
        num_read: after so many messages of a stream it is cancelled.
    """

    kind: str
    path: str
    data: bytes
    name: str = ""
    requests: int = 1
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    compression: grpc.Compression | None = None
    timeout_s: float | None = None
    num_read: int | None = None


@dataclass(slots=True)
class Tally:
    """What was sent, and what came of it. A defect is told with the case that shows it."""

    sent: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    defects: list[str] = field(default_factory=list[str])


class Traffic:
    """Of one daemon. `tally` grows with every case."""

    def __init__(self, socket: Path, methods: Iterable[Method]) -> None:
        self._socket = socket
        self._methods = {method.path: method for method in methods}
        self._slow: list[asyncio.StreamWriter] = []
        self.tally = Tally()

    async def run(self, *batches: Iterator[Case | Script], look_after: Callable[[], None] = lambda: None) -> None:
        """Sends them all, through connections of its own; calls `look_after` between and after batches."""
        channels = [grpc.aio.insecure_channel(f"unix:{self._socket}", options=OPTIONS) for _ in range(NUM_CHANNELS)]
        for cases in batches:
            async with asyncio.TaskGroup() as group:
                for index in range(AT_ONCE):
                    group.create_task(self._work(channels[index % NUM_CHANNELS], cases))
            look_after()
        for writer in self._slow:
            writer.close()
        self._slow.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _work(self, channel: grpc.aio.Channel, cases: Iterator[Case | Script]) -> None:
        for case in cases:
            if isinstance(case, Script):
                self.tally.sent[f"HTTP/2: {case.name}"] += 1
                await self._send_raw(case)
                continue
            self.tally.sent[case.kind] += 1
            try:
                outcome, defect = await self._send(channel, case)
            except (grpc.aio.UsageError, ValueError, TypeError) as error:  # of the client's library
                outcome, defect = f"not sent: {type(error).__name__}", None
            self.tally.answers[outcome] += 1
            if defect is not None:
                self.tally.defects.append(f"{defect}; {case.kind} {case.name} {case.path} {case.data[:300].hex()}")

    async def _send(self, channel: grpc.aio.Channel, case: Case) -> tuple[str, str | None]:
        method = self._methods.get(case.path)
        is_endless = method is not None and method.is_endless
        timeout_s = case.timeout_s if case.timeout_s is not None else GLANCE_S if is_endless else PATIENCE_S
        options: dict[str, Any] = {
            "timeout": timeout_s, "metadata": case.metadata, "compression": case.compression
        }  # fmt: skip
        call: Any
        if case.requests == 1 and method is not None and not method.is_request_stream:
            call = channel.unary_stream(case.path)(case.data, **options)
        else:
            call = channel.stream_stream(case.path)(iter((case.data,) * case.requests), **options)
        last = b""
        num_read = 0
        try:
            async for data in call:
                last, num_read = data, num_read + 1
                if num_read == case.num_read:
                    call.cancel()
                    return "cancelled", None
        except grpc.aio.AioRpcError as error:
            code, message = error.code(), error.details() or ""
            if code in OUT_OF_TIME and timeout_s < PATIENCE_S:
                return "out of time", None
            trailers = tuple(error.trailing_metadata() or ())
            own = reason_of_trailers(trailers)
            return own or f"gRPC: {message.partition('(')[0]}", complaint(code, message, trailers)
        return "well", _wrong_end(method, last) if case.requests == 1 else None

    async def _send_raw(self, script: Script) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError as error:
            self.tally.defects.append(f"no connection: {error}")
            return
        writer.write(script.data)
        if script.is_slow:
            self._slow.append(writer)
            if len(self._slow) > MAX_SLOW:
                self._slow.pop(0).close()
            return
        found = b""
        try:
            async with asyncio.timeout(PATIENCE_S if script.expects else RAW_WAIT_S):
                while data := await reader.read(1 << 16):
                    found += data
                    if script.expects and script.expects in found:
                        break
        except (TimeoutError, ConnectionError):
            pass
        if script.expects not in found:
            self.tally.defects.append(f"{script.name}: {found!r}")
        self.tally.answers["HTTP/2: answered" if found else "HTTP/2: silence"] += 1
        writer.close()


def _wrong_end(method: Method | None, last: bytes) -> str | None:
    """What is wrong with the last message of an answer that ended well; None where nothing is."""
    if method is None:
        return "a method that there is not was served"
    try:
        message: Any = method.response.FromString(last)
    except DecodeError:
        return "the answer is no message of its type"
    if method.path in LASTS and message.WhichOneof("event") != LASTS[method.path]:
        return f"the stream ended without its {LASTS[method.path]}"
    return None
