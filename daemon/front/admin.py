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
from daemon.front.caller import is_part
from daemon.front.config import FrontConfig
from daemon.front.events import EventLog
from daemon.front.open_work import OpenWork
from daemon.front.requests import OpenRequest
from daemon.front.service import write
from daemon.front.supervisor import EngineState, Supervisor
from daemon.front.wire_ids import client_name, client_owner

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
        events: EventLog,
        *,
        abort: Callable[[OpenRequest], int],
        on_drain: Callable[[], None],
    ) -> None:
        self._config = config
        self._version = version
        self._work = work
        self._supervisor = supervisor
        self._events = events
        self._abort = abort
        self._on_drain = on_drain
        self._started_s = time.monotonic()
        self._num_watchers = 0

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        supervisor, info, meters = self._supervisor, self._supervisor.info, self._work.requests.meters
        response = pb.GetServerInfoResponse(
            version=self._version,
            state=self._state(),
            engine_pid=supervisor.pid,
            engine_starts=supervisor.starts,
            steps=supervisor.steps,
            answer_tokens=meters.answer_tokens,
            prompt_tokens=meters.prompt_tokens,
            cached_tokens=meters.cached_tokens.total(),
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
                response = pb.WatchTiersResponse(tiers=await self._tiers(), time_s=time.time())
                await write(context, response, self._config.stall_timeout_s)
                await asyncio.sleep(request.interval_s or DEFAULT_WATCH_S)
        finally:
            self._num_watchers -= 1

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        validate.check(request, validate.LIST_SEQUENCES, validate.NO_LIMITS)
        name, slash, index = request.id.partition("/")
        found = self._work.requests.find_all(name) if name else []
        wire_id = f"{found[0].wire_id}{slash}{index}" if len(found) == 1 else ""
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
        aborted = self._abort_named(request.id, request.namespace)
        self._events.add(pb.EVENT_KIND_REQUESTS_ENDED, f"an operator ended {aborted} sequences", count=aborted)
        return pb.AbortSequenceResponse(aborted=aborted)

    def _abort_named(self, sequence_id: str, namespace: str) -> int:
        """Ends a sequence, a request or a job. Returns: how many sequences that were."""
        name, slash, index = sequence_id.partition("/")
        found = [request for request in self._work.requests.find_all(name) if is_part(namespace, request.owner)]
        if not found:
            return self._abort_jobs(name, slash, namespace)
        if not slash:
            return sum(map(self._abort, found))
        ended = [stop for request in found for stop in self._abort_choice(request, int(index))]
        if not ended:
            raise RequestError(ErrorReason.NOT_FOUND, "no running sequence has this id", field="id")
        return len(ended)

    def _abort_choice(self, request: OpenRequest, index: int) -> list[messages.StopSequence]:
        ended = request.abort((index,))
        if request.submitted:
            for stop in ended:
                self._supervisor.send(stop)
        return ended

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        validate.check(request, validate.DRAIN, validate.NO_LIMITS)
        if not self._work.requests.draining:
            self._work.requests.draining = True
            self._events.add(pb.EVENT_KIND_DRAINING, f"an operator drains: {len(self._work)} still open")
        self._on_drain()
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._config.drain_window_s
        drained = await self._work.wait_idle(timeout_s)
        if drained:
            self._events.add(pb.EVENT_KIND_DRAINED, "nothing is open any more")
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

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> None:
        validate.check(request, validate.WATCH_EVENTS, validate.NO_LIMITS)
        if self._num_watchers >= MAX_WATCHERS:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_WATCHERS} clients watch already")
        self._num_watchers += 1
        after = request.after_sequence if request.log_id in ("", self._events.id) else 0
        missed = 0
        try:
            async with aclosing(self._events.read(after, follow=request.follow)) as entries:
                async for entry in entries:
                    missed += entry.missed
                    if request.kinds and entry.event.kind not in request.kinds:
                        continue
                    response = pb.WatchEventsResponse(event=entry.event, log_id=self._events.id, missed=missed)
                    await write(context, response, self._config.stall_timeout_s)
                    missed = 0
        finally:
            self._num_watchers -= 1

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

    def _abort_jobs(self, key: str, slash: str, namespace: str) -> int:
        """Ends warming jobs as a whole. Returns: how many of their prompts were not done."""
        found = self._work.jobs.find_all(key)
        jobs = [job for job in found if not job.is_over and is_part(namespace, job.owner)]
        if not jobs:
            raise RequestError(ErrorReason.NOT_FOUND, "no open request and no warming job has this id", field="id")
        if slash:
            raise RequestError(ErrorReason.INVALID_ARGUMENT, "a warming job ends as a whole: give its key", field="id")
        num_open = sum(max(sum(not part.is_done for part in job.parts), 1) for job in jobs)
        for job in jobs:
            job.cancel(RequestError(ErrorReason.ABORTED, "an operator has ended this job"))
        return num_open

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
    stream = values.pop("stream")
    if client.warm_index is not None:
        values["index"] = client.warm_index
    return pb.Sequence(
        id=f"{client.name}/{values['index']}",
        request_id=client.name,
        state=state,
        is_warming=client.warm_index is not None,
        residency=None if stream is None else _residency(row.stream),
        **values,
    )


def _residency(row: messages.StreamRow | None) -> pb.Residency:
    assert row is not None
    return pb.Residency(
        device_blocks=row.device_blocks,
        host_blocks=row.host_blocks,
        disk_blocks=row.disk_blocks,
        streamed_bytes=row.streamed_bytes,
        streamed_bytes_per_s=row.bytes_per_s or 0.0,
        link_bytes_per_s=row.link_bytes_per_s or 0.0,
    )
