"""AdminService: what the engine holds, and ending things. It takes no part in generation, so it can be served apart."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from downcore.v1 import admin_pb2 as pb
from downcore.v1.cache_pb2 import CacheTier

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front import cache_wire, validate
from daemon.front.config import FrontConfig
from daemon.front.open_work import OpenWork
from daemon.front.requests import OpenRequest, client_name, client_owner
from daemon.front.service import write
from daemon.front.supervisor import EngineState, Supervisor

MAX_WATCHERS = 64
DEFAULT_WATCH_S = 1.0
_STATES = {
    "queued": pb.SEQUENCE_STATE_QUEUED,
    "restoring": pb.SEQUENCE_STATE_RESTORING,
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
        work: OpenWork,
        supervisor: Supervisor,
        *,
        abort: Callable[[OpenRequest], int],
        on_drain: Callable[[], None],
    ) -> None:
        self._config = config
        self._version = version
        self._work = work
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
            response.tiers.extend(cache_wire.WIRE_TIERS[tier] for tier in info.tiers)
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
        found = self._work.requests.find(name) if name else None
        wire_id = f"{found.wire_id}{slash}{index}" if found is not None else ""
        answer = await self._supervisor.query(messages.QueryKind.SEQUENCES, wire_id)
        sequences = [_sequence(row) for row in answer.sequences]
        # Of a warming job the engine knows each prompt by an id of its own.
        wanted = [s for s in sequences if request.id in ("", s.id, s.request_id)]
        return pb.ListSequencesResponse(sequences=wanted)

    async def GetLedger(self, request: pb.GetLedgerRequest, context: Any) -> pb.GetLedgerResponse:
        answer = await self._supervisor.query(messages.QueryKind.LEDGER)
        entries = [
            pb.LedgerEntry(
                tier=row.tier, kind=row.kind, owner=client_owner(row.owner), bytes=row.bytes, count=row.count
            )
            for row in answer.ledger
        ]
        return pb.GetLedgerResponse(entries=entries, balanced=answer.balanced, findings=answer.findings)

    async def AbortSequence(self, request: pb.AbortSequenceRequest, context: Any) -> pb.AbortSequenceResponse:
        validate.check(request, validate.ABORT_SEQUENCE, validate.NO_LIMITS)
        name, slash, index = request.id.partition("/")
        found = self._work.requests.find(name)
        if found is None:
            return pb.AbortSequenceResponse(aborted=self._abort_job(name, slash))
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
        self._work.requests.draining = True
        self._on_drain()
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._config.drain_window_s
        drained = await self._work.wait_idle(timeout_s)
        return pb.DrainResponse(drained=drained, open_requests=len(self._work))

    async def FlushTier(self, request: pb.FlushTierRequest, context: Any) -> pb.FlushTierResponse:
        validate.check(request, validate.FLUSH_TIER, validate.NO_LIMITS)
        done = await self._supervisor.flush(self._tier(request.tier))
        return pb.FlushTierResponse(records=done.records, bytes=done.bytes, seconds=done.seconds, durable=done.durable)

    async def VerifyTier(self, request: pb.VerifyTierRequest, context: Any) -> None:
        validate.check(request, validate.VERIFY_TIER, validate.NO_LIMITS)
        async with aclosing(self._supervisor.verify(self._tier(request.tier))) as events:
            async for event in events:
                is_progress = isinstance(event, cm.VerifyProgress)
                response = cache_wire.verify_progress(event) if is_progress else cache_wire.verify_report(event)
                await write(context, response, self._config.stall_timeout_s)

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.SetQuotaResponse:
        validate.check(request, validate.SET_QUOTA, validate.NO_LIMITS)
        cached = request.cached_bytes if request.HasField("cached_bytes") else None
        pinned = request.pinned_bytes if request.HasField("pinned_bytes") else None
        answer = await self._supervisor.ask(
            lambda query_id: cm.SetQuota(query_id, request.namespace, cached, pinned), cm.QuotaList
        )
        (row,) = answer.rows
        return pb.SetQuotaResponse(quota=cache_wire.quota(row))

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        answer = await self._supervisor.ask(cm.ListQuotas, cm.QuotaList)
        return pb.ListQuotasResponse(quotas=[cache_wire.quota(row) for row in answer.rows])

    async def RemoveQuota(self, request: pb.RemoveQuotaRequest, context: Any) -> pb.RemoveQuotaResponse:
        validate.check(request, validate.REMOVE_QUOTA, validate.NO_LIMITS)
        await self._supervisor.ask(lambda query_id: cm.RemoveQuota(query_id, request.namespace), cm.QuotaList)
        return pb.RemoveQuotaResponse()

    def _abort_job(self, key: str, slash: str) -> int:
        """Ends a warming job as a whole. Returns: how many of its prompts were not done."""
        job = self._work.jobs.find(key)
        if job is None or job.is_over:
            raise RequestError(ErrorReason.NOT_FOUND, "no open request and no warming job has this id", field="id")
        if slash:
            raise RequestError(ErrorReason.INVALID_ARGUMENT, "a warming job ends as a whole: give its key", field="id")
        num_open = sum(not part.is_done for part in job.parts)
        job.cancel(RequestError(ErrorReason.ABORTED, "an operator has ended this job"))
        return max(num_open, 1)

    def _tier(self, number: CacheTier) -> cm.TierName:
        """The tier of a checked request; raises RequestError where this daemon has none such."""
        tier = cache_wire.TIERS[number]
        if tier not in self._supervisor.require_ready().tiers:
            raise RequestError(ErrorReason.TIER_UNAVAILABLE, f"this daemon has no {tier} tier", field="tier")
        return tier

    def _state(self) -> pb.EngineState:
        if self._work.requests.draining:
            return pb.ENGINE_STATE_DRAINING
        if self._supervisor.is_serving:
            return pb.ENGINE_STATE_SERVING
        if self._supervisor.state is EngineState.LOADING:
            return pb.ENGINE_STATE_LOADING
        return pb.ENGINE_STATE_DOWN

    async def _tiers(self) -> list[pb.Tier]:
        answer = await self._supervisor.query(messages.QueryKind.TIERS)
        return [cache_wire.tier(row) for row in answer.tiers]


def _sequence(row: messages.SequenceRow) -> pb.Sequence:
    values = msgspec.structs.asdict(row)
    client = client_name(values.pop("request_id"))
    state = _STATES.get(values.pop("state"), pb.SEQUENCE_STATE_UNSPECIFIED)
    if client.warm_index is not None:
        values["index"] = client.warm_index
    return pb.Sequence(
        id=f"{client.name}/{values['index']}",
        request_id=client.name,
        state=state,
        is_warming=client.warm_index is not None,
        **values,
    )
