"""Blocks that come and go, in the messages of the gateway's event stream.

The gateway finds prefixes by the blocks' token ids, and takes the hashes as names alone. It is sent the caller's own
namespace and no other, so no salt is needed to tell tenants apart.
"""

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2 as common  # pyright: ignore[reportMissingTypeStubs]

from daemon.cache_messages import TierName
from daemon.front.prompts import ID_BYTES, from_little_endian
from daemon.kv_messages import KvBatch, KvEvent, KvSnapshot

TIERS = {
    TierName.DEVICE: common.KV_CACHE_TIER_DEVICE,
    TierName.HOST: common.KV_CACHE_TIER_HOST,
    TierName.DISK: common.KV_CACHE_TIER_DISK,
}
LEVELS = {tier: level for level, tier in enumerate(TierName)}  # how older consumers know a tier


def message_of(told: KvBatch | KvSnapshot) -> common.KvEventBatch:
    """The message for a batch, or for a part of a snapshot."""
    events = list(_events(told.events))
    match told:
        case KvBatch():
            for event_id, event in enumerate(events, start=1):
                event.event_id = event_id
            return common.KvEventBatch(sequence_number=told.sequence, timestamp=told.time_s, events=events, dp_rank=0)
        case KvSnapshot():
            if told.index == 0:
                events.insert(0, common.KvCacheEvent(cleared=common.KvCacheCleared()))
            return common.KvEventBatch(
                # The parts are numbered so that the last one has the number of the state that it completes.
                sequence_number=told.sequence - (told.count - 1 - told.index),
                timestamp=told.time_s,
                events=events,
                dp_rank=0,
                snapshot=common.KvSnapshotChunk(index=told.index, count=told.count, blocks=told.copies),
            )


def _events(told: Sequence[KvEvent]) -> Iterator[common.KvCacheEvent]:
    """Runs of blocks that came one below the other, or left, as one event each."""
    begin = 0
    for end in range(1, len(told) + 1):
        if end == len(told) or not _continues(told[end - 1], told[end]):
            run = told[begin:end]
            if run[0].tokens:
                yield common.KvCacheEvent(stored=_stored(run))
            else:
                yield common.KvCacheEvent(removed=_removed(run))
            begin = end


def _continues(before: KvEvent, event: KvEvent) -> bool:
    if event.tier is not before.tier or bool(event.tokens) != bool(before.tokens):
        return False
    return not event.tokens or event.parent == before.key


def _stored(run: Sequence[KvEvent]) -> common.KvBlocksStored:
    tier = run[0].tier
    return common.KvBlocksStored(
        blocks=[
            common.KvBlock(
                block_hash=event.key,
                token_ids=from_little_endian(event.tokens),
                block_size=len(event.tokens) // ID_BYTES,
                cache_level=LEVELS[tier],
            )
            for event in run
        ],
        parent_block_hash=run[0].parent,
        tier=TIERS[tier],
        locality=common.KV_CACHE_LOCALITY_LOCAL,
    )


def _removed(run: Sequence[KvEvent]) -> common.KvBlocksRemoved:
    tier = run[0].tier
    return common.KvBlocksRemoved(
        block_hashes=[event.key for event in run],
        cache_level=LEVELS[tier],
        tier=TIERS[tier],
        locality=common.KV_CACHE_LOCALITY_LOCAL,
    )
