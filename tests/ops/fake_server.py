"""A daemon without an engine: the services over a Unix socket in this process, with answers that the test sets."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from downcore.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

WORDS = ("Four", " score", " and", " seven")


class FakeDaemon:
    """Runs in a thread of its own inside a with statement. Its fields are the answers."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.state = admin_pb2.ENGINE_STATE_SERVING
        self.balanced = True
        self.sequences = [_sequence("req-1/0"), _sequence("req-1/1")]
        self.failure: tuple[grpc.StatusCode, str, str, str] | None = None  # code, message, reason, field
        self.endless = False  # Generate never ends by itself
        self.hang = False  # unary calls never answer
        self.requests: list[Any] = []
        self.streaming = threading.Event()
        self.cancelled = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "FakeDaemon":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(self), self._server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(_Generation(self), self._server)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    def set_health(self, status: int) -> None:
        """What grpc.health.v1 says from now on."""
        asyncio.run_coroutine_threadsafe(self.health.set("", status), self._loop).result(10)

    async def enter(self, request: Any, context: Any) -> None:
        """What every call does first."""
        self.requests.append(request)
        if self.hang:
            await asyncio.Event().wait()
        if self.failure is not None:
            code, message, reason, field = self.failure
            if not reason:
                await context.abort(code, message)
            await context.abort_with_status(rpc_status.to_status(_status(code, message, reason, field)))


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        return admin_pb2.GetServerInfoResponse(
            version="0.1.0",
            model="tiny",
            family="llama",
            parameters=134_515_008,
            dtype="bfloat16",
            device="cpu",
            max_context_tokens=8192,
            block_size=64,
            grid=1024,
            state_fingerprint="f" * 64,
            numerics_profile="n" * 64,
            state=self._daemon.state,
            engine_pid=42,
            engine_starts=2,
            steps=12_345,
            uptime_s=3725.0,
            bytes_per_token=23_040,
            loaded=0.5,
        )

    async def ListTiers(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        return admin_pb2.ListTiersResponse(tiers=[_tier()])

    async def WatchTiers(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._daemon.enter(request, context)
        while True:
            yield admin_pb2.WatchTiersResponse(tiers=[_tier()], time_s=1.0)

    async def ListSequences(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        found = [s for s in self._daemon.sequences if request.id in ("", s.id, s.request_id)]
        return admin_pb2.ListSequencesResponse(sequences=found)

    async def GetLedger(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        entry = admin_pb2.LedgerEntry(tier="device", kind="blocks", owner="free", bytes=1_474_560, count=1)
        findings = [] if self._daemon.balanced else ["device blocks: 3 held by nobody"]
        return admin_pb2.GetLedgerResponse(entries=[entry], balanced=self._daemon.balanced, findings=findings)

    async def AbortSequence(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        found = [s for s in self._daemon.sequences if request.id in (s.id, s.request_id)]
        return admin_pb2.AbortSequenceResponse(aborted=len(found))

    async def ListQuotas(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        quotas = [admin_pb2.Quota(namespace="team", cached_bytes=1 << 30), admin_pb2.Quota(namespace="free")]
        return admin_pb2.ListQuotasResponse(quotas=quotas)

    async def Drain(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        return admin_pb2.DrainResponse(drained=request.timeout_s > 1, open_requests=0 if request.timeout_s > 1 else 2)


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._daemon.enter(request, context)
        number = request.n or 1
        cached = generation_pb2.CachedTokens(device=1024)
        yield _event(started=generation_pb2.GenerateStarted(prompt_tokens=1100, cached_tokens=cached, seed=7))
        try:
            for word in WORDS:
                for index in reversed(range(number)):
                    yield _event(chunk=_chunk(index, word, logprobs=request.sampling.logprobs))
            self._daemon.streaming.set()
            while self._daemon.endless:
                yield _event(chunk=_chunk(0, ".", logprobs=False))
                await asyncio.sleep(0)
        finally:
            if self._daemon.endless:
                self._daemon.cancelled.set()
        for index in reversed(range(number)):
            reason = generation_pb2.FINISH_REASON_STOP
            yield _event(
                finished=generation_pb2.GenerateFinished(
                    index=index, reason=reason, completion_tokens=4, stop_string="!"
                )
            )
        usage = generation_pb2.Usage(prompt_tokens=1100, cached_tokens=cached, completion_tokens=4 * number)
        timings = generation_pb2.Timings(queue_s=0.001, prefill_s=0.2, first_token_s=0.25, total_s=0.5)
        yield _event(summary=generation_pb2.GenerateSummary(usage=usage, timings=timings))

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self._daemon.enter(request, context)
        return generation_pb2.TokenizeResponse(token_ids=[19556, 905], tokens=[b"Hello", b" \xf0\x9f"])


def _event(**event: Any) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(request_id="req-1", **event)


def _chunk(index: int, text: str, *, logprobs: bool) -> generation_pb2.GenerateChunk:
    chunk = generation_pb2.GenerateChunk(index=index, text=text, token_ids=[5])
    if logprobs:
        token = generation_pb2.TokenLogprob(token_id=5, logprob=-0.25, token=text.encode())
        chunk.logprobs.append(generation_pb2.PositionLogprobs(chosen=token, top=[token]))
    return chunk


def _tier() -> admin_pb2.Tier:
    return admin_pb2.Tier(
        name="device",
        medium="ram",
        capacity_bytes=64 << 20,
        held_bytes=16 << 20,
        cached_bytes=16 << 20,
        free_bytes=32 << 20,
        hit_tokens=1024,
        miss_tokens=1024,
        blocks=40,
        free_blocks=20,
        cached_blocks=10,
        slots=64,
        free_slots=63,
    )


def _sequence(sequence_id: str) -> admin_pb2.Sequence:
    return admin_pb2.Sequence(
        id=sequence_id,
        request_id=sequence_id.split("/")[0],
        state=admin_pb2.SEQUENCE_STATE_DECODING,
        prompt_tokens=1100,
        completion_tokens=3,
        computed_tokens=1103,
        cached_tokens=1024,
        blocks=18,
        shared_blocks=16,
        held_bytes=26_542_080,
        age_s=1.5,
        max_tokens=64,
        residency=LARGE if sequence_id.endswith("/1") else None,
    )


LARGE = admin_pb2.Residency(
    device_blocks=16,
    host_blocks=100,
    disk_blocks=1000,
    streamed_bytes=3 << 20,
    streamed_bytes_per_s=3 << 29,
    link_bytes_per_s=1 << 31,
)


def _status(code: grpc.StatusCode, message: str, reason: str, field: str) -> status_pb2.Status:
    details = [any_pb2.Any(), any_pb2.Any()]
    details[0].Pack(error_details_pb2.ErrorInfo(reason=reason, domain="downcore"))
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
    details[1].Pack(error_details_pb2.BadRequest(field_violations=[violation] if field else []))
    number, _ = code.value
    return status_pb2.Status(code=number, message=message, details=details)
