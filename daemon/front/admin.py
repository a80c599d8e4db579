"""AdminService: what the engine holds, and ending things. It takes no part in generation, so it can be served apart."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
from downcore.v1 import admin_pb2 as pb

from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front import validate
from daemon.front.config import FrontConfig
from daemon.front.requests import OpenRequest, RequestTable, client_id
from daemon.front.supervisor import EngineState, Supervisor

MAX_WATCHERS = 64
DEFAULT_WATCH_S = 1.0
_WIRE_OWNER = re.compile(r"~[0-9]+(?=/|$)")
_STATES = {
    "queued": pb.SEQUENCE_STATE_QUEUED,
    "prefilling": pb.SEQUENCE_STATE_PREFILLING,
    "decoding": pb.SEQUENCE_STATE_DECODING,
    "preempted": pb.SEQUENCE_STATE_PREEMPTED,
}


class AdminService:
    """The methods of downcore.v1.AdminService. `abort` ends a request, `on_drain` is told when draining begins."""

    def __init__(
        self,
        config: FrontConfig,
        version: str,
        table: RequestTable,
        supervisor: Supervisor,
        *,
        abort: Callable[[OpenRequest], int],
        on_drain: Callable[[], None],
    ) -> None:
        self._config = config
        self._version = version
        self._table = table
        self._supervisor = supervisor
        self._abort = abort
        self._on_drain = on_drain
        self._started_s = time.monotonic()
        self._num_watchers = 0

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        supervisor, info = self._supervisor, self._supervisor.info
        response = pb.GetServerInfoResponse(
            version=self._version,
            state=self._state(),
            engine_pid=supervisor.pid,
            engine_starts=supervisor.starts,
            steps=supervisor.steps,
            uptime_s=time.monotonic() - self._started_s,
            loaded=supervisor.loaded,
        )
        if info is not None:
            for name in (
                "model", "family", "parameters", "dtype", "device", "max_context_tokens", "block_size", "grid",
                "state_fingerprint", "numerics_profile", "vocab_size", "bytes_per_token", "slot_bytes",
            ):  # fmt: skip
                setattr(response, name, getattr(info, name))
        return response

    async def ListTiers(self, request: pb.ListTiersRequest, context: Any) -> pb.ListTiersResponse:
        return pb.ListTiersResponse(tiers=await self._tiers())

    async def WatchTiers(self, request: pb.WatchTiersRequest, context: Any) -> None:
        validate.check(request, validate.WATCH_TIERS, validate.NO_LIMITS)
        if self._num_watchers >= MAX_WATCHERS:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_WATCHERS} clients watch already")
        self._num_watchers += 1
        try:
            while True:
                await context.write(pb.WatchTiersResponse(tiers=await self._tiers(), time_s=time.time()))
                await asyncio.sleep(request.interval_s or DEFAULT_WATCH_S)
        finally:
            self._num_watchers -= 1

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        validate.check(request, validate.LIST_SEQUENCES, validate.NO_LIMITS)
        name, slash, index = request.id.partition("/")
        wire_id = ""
        if name:
            found = self._table.find(name)
            if found is None:
                return pb.ListSequencesResponse()
            wire_id = f"{found.wire_id}{slash}{index}"
        answer = await self._supervisor.query(messages.QueryKind.SEQUENCES, wire_id)
        return pb.ListSequencesResponse(sequences=[_sequence(row) for row in answer.sequences])

    async def GetLedger(self, request: pb.GetLedgerRequest, context: Any) -> pb.GetLedgerResponse:
        answer = await self._supervisor.query(messages.QueryKind.LEDGER)
        entries = [
            pb.LedgerEntry(
                tier=row.tier, kind=row.kind, owner=_WIRE_OWNER.sub("", row.owner), bytes=row.bytes, count=row.count
            )
            for row in answer.ledger
        ]
        return pb.GetLedgerResponse(entries=entries, balanced=answer.balanced, findings=answer.findings)

    async def AbortSequence(self, request: pb.AbortSequenceRequest, context: Any) -> pb.AbortSequenceResponse:
        validate.check(request, validate.ABORT_SEQUENCE, validate.NO_LIMITS)
        name, slash, index = request.id.partition("/")
        found = self._table.find(name)
        if found is None:
            raise RequestError(ErrorReason.NOT_FOUND, "no open request has this id", field="id")
        if not slash:
            return pb.AbortSequenceResponse(aborted=self._abort(found))
        ended = found.abort((int(index),))
        if not ended:
            raise RequestError(ErrorReason.NOT_FOUND, "no running sequence has this id", field="id")
        if found.submitted:
            for stop in ended:
                self._supervisor.send(stop)
        return pb.AbortSequenceResponse(aborted=len(ended))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        validate.check(request, validate.DRAIN, validate.NO_LIMITS)
        self._table.draining = True
        self._on_drain()
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._config.drain_window_s
        drained = await self._table.wait_idle(timeout_s)
        return pb.DrainResponse(drained=drained, open_requests=len(self._table))

    def _state(self) -> pb.EngineState:
        if self._table.draining:
            return pb.ENGINE_STATE_DRAINING
        if self._supervisor.is_serving:
            return pb.ENGINE_STATE_SERVING
        if self._supervisor.state is EngineState.LOADING:
            return pb.ENGINE_STATE_LOADING
        return pb.ENGINE_STATE_DOWN

    async def _tiers(self) -> list[pb.Tier]:
        answer = await self._supervisor.query(messages.QueryKind.TIERS)
        return [pb.Tier(**msgspec.structs.asdict(row)) for row in answer.tiers]


def _sequence(row: messages.SequenceRow) -> pb.Sequence:
    values = msgspec.structs.asdict(row)
    name = client_id(values.pop("request_id"))
    state = _STATES.get(values.pop("state"), pb.SEQUENCE_STATE_UNSPECIFIED)
    return pb.Sequence(id=f"{name}/{row.index}", request_id=name, state=state, **values)
