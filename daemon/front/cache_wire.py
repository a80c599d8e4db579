"""Between the engine's words for the cache and the clients': values only, no decisions."""

import msgspec
from downcore.v1 import admin_pb2
from downcore.v1 import cache_pb2 as pb

from daemon import cache_messages as cm
from daemon import messages
from daemon.front.warm import Receipt, WarmJob, WarmPart

TIERS = {
    pb.CACHE_TIER_DEVICE: cm.TierName.DEVICE,
    pb.CACHE_TIER_HOST: cm.TierName.HOST,
    pb.CACHE_TIER_DISK: cm.TierName.DISK,
}
ORDERS = {
    pb.PREFIX_ORDER_UNSPECIFIED: cm.PrefixOrder.RECENCY,
    pb.PREFIX_ORDER_RECENCY: cm.PrefixOrder.RECENCY,
    pb.PREFIX_ORDER_BYTES: cm.PrefixOrder.BYTES,
    pb.PREFIX_ORDER_HITS: cm.PrefixOrder.HITS,
}
WIRE_TIERS = {tier: number for number, tier in TIERS.items()}
_STAGES = {
    cm.WarmStage.QUEUED: pb.WARM_STAGE_QUEUED,
    cm.WarmStage.COMPUTING: pb.WARM_STAGE_COMPUTING,
    cm.WarmStage.WRITING: pb.WARM_STAGE_WRITING,
}
_GATES = {
    cm.GateDecision.NOTHING: pb.GATE_DECISION_NOTHING,
    cm.GateDecision.LOAD: pb.GATE_DECISION_LOAD,
    cm.GateDecision.COMPUTE: pb.GATE_DECISION_COMPUTE,
}
_TIER_STATES = {
    messages.TierState.OK: admin_pb2.TIER_STATE_OK,
    messages.TierState.READ_ONLY: admin_pb2.TIER_STATE_READ_ONLY,
    messages.TierState.DEGRADED: admin_pb2.TIER_STATE_DEGRADED,
}


def bytes_by_tier(found: cm.BytesByTier) -> pb.BytesByTier:
    return pb.BytesByTier(device=found.device, host=found.host, disk=found.disk)


def prefix(row: cm.PrefixRow) -> pb.Prefix:
    return pb.Prefix(
        key=row.key,
        parent_key=row.parent_key,
        namespace=row.namespace,
        tokens=row.tokens,
        blocks=row.blocks,
        checkpoints=row.checkpoints,
        bytes=bytes_by_tier(row.bytes),
        pinned=row.pinned,
        expires_time_s=row.expires_time_s,
        last_use_time_s=row.last_use_time_s,
        hits=row.hits,
    )


def lookup(found: cm.LookupAnswer) -> pb.LookupPrefixResponse:
    place = None
    if found.checkpoint_position is not None and found.checkpoint_tier is not None:
        place = pb.CheckpointPlace(position=found.checkpoint_position, tier=WIRE_TIERS[found.checkpoint_tier])
    return pb.LookupPrefixResponse(
        prompt_tokens=found.prompt_tokens,
        matched_tokens=found.matched_tokens,
        resume_tokens=found.resume_tokens,
        key=found.key,
        tiers=[
            pb.LookupTier(tier=WIRE_TIERS[row.tier], tokens=row.tokens, bytes=row.bytes, load_s=row.load_s)
            for row in found.tiers
        ],
        checkpoint=place,
        load_s=sum(row.load_s for row in found.tiers),
        compute_s=found.compute_s,
        gate=_GATES[found.gate],
        stop_reason=found.stop_reason,
        stop=found.stop,
    )


def evicted(found: cm.Evicted) -> pb.EvictPrefixResponse:
    return pb.EvictPrefixResponse(
        prefixes=found.prefixes,
        blocks=found.blocks,
        checkpoints=found.checkpoints,
        kept_blocks=found.kept_blocks,
        bytes=bytes_by_tier(found.bytes),
    )


def started(job: WarmJob) -> pb.WarmPrefixResponse:
    return _started(job.key, tuple(part.num_tokens for part in job.parts))


def progress(index: int, part: WarmPart) -> pb.WarmPrefixResponse:
    return pb.WarmPrefixResponse(
        progress=pb.WarmProgress(
            prompt_index=index,
            stage=pb.WARM_STAGE_DONE if part.is_done else _STAGES[part.stage],
            done_tokens=part.done_tokens,
            total_tokens=part.total_tokens,
        )
    )


def receipt(key: str, found: Receipt, *, is_repeated: bool) -> pb.WarmPrefixResponse:
    prefixes = [
        pb.WarmedPrefix(
            key=done.key,
            tokens=done.tokens,
            cached_tokens=done.cached_tokens,
            bytes=bytes_by_tier(done.bytes),
            durable=done.durable,
            pinned=done.pinned,
            expires_time_s=done.expires_time_s,
        )
        for done in found.done
    ]
    return pb.WarmPrefixResponse(
        receipt=pb.WarmReceipt(key=key, prefixes=prefixes, time_s=found.time_s, is_repeated=is_repeated)
    )


def repeated(key: str, found: Receipt) -> tuple[pb.WarmPrefixResponse, pb.WarmPrefixResponse]:
    """All that a call gets whose job has ended before."""
    return _started(key, found.prompt_tokens), receipt(key, found, is_repeated=True)


def tier(row: messages.TierRow) -> admin_pb2.Tier:
    values = msgspec.structs.asdict(row)
    values["state"] = _TIER_STATES[row.state]
    return admin_pb2.Tier(**values)


def verify_progress(found: cm.VerifyProgress) -> admin_pb2.VerifyTierResponse:
    return admin_pb2.VerifyTierResponse(
        progress=admin_pb2.VerifyProgress(
            done_records=found.done_records,
            total_records=found.total_records,
            done_bytes=found.done_bytes,
            total_bytes=found.total_bytes,
        )
    )


def verify_report(found: cm.VerifyDone) -> admin_pb2.VerifyTierResponse:
    return admin_pb2.VerifyTierResponse(
        report=admin_pb2.VerifyReport(
            records=found.records,
            bytes=found.bytes,
            seconds=found.seconds,
            damaged=found.damaged,
            damage=[admin_pb2.DamagedRecord(**msgspec.structs.asdict(record)) for record in found.damage],
        )
    )


def quota(row: cm.QuotaRow) -> admin_pb2.Quota:
    return admin_pb2.Quota(**msgspec.structs.asdict(row))


def _started(key: str, prompt_tokens: tuple[int, ...]) -> pb.WarmPrefixResponse:
    return pb.WarmPrefixResponse(started=pb.WarmStarted(key=key, prompt_tokens=prompt_tokens))
