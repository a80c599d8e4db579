"""The engine's counters as one answer, read from where they are counted."""

from typing import Protocol

from daemon.cache_messages import TierName
from daemon.engine.rate import PrefillRate
from daemon.engine.scheduler import Scheduler
from daemon.meter_messages import MAX_NAMESPACES, EvictionRow, HistogramRow, Meters, NamespaceRow, TierMeterRow
from tiers.cache import TieredCache
from tiers.meters import Histogram, TierMeters


class Metered(Protocol):
    """What the report is read from."""

    cache: TieredCache
    scheduler: Scheduler
    rate: PrefillRate
    steps: int


def report(engine: Metered) -> Meters:
    """Everything that is counted, as it is now."""
    cache, meters = engine.cache, engine.scheduler.meters
    charged = cache.device.tree.charged
    namespaces = charged.most_common(MAX_NAMESPACES)
    return Meters(
        tiers=tuple(_tier(cache, name, tier) for name, tier in cache.meters.items()),
        sequences=engine.scheduler.num_by_state(),
        steps=engine.steps,
        step=_row(meters.step_s),
        decode_rows=_row(meters.decode_rows),
        lookup=_row(cache.lookup_s),
        computed_tokens=meters.computed_tokens,
        lost_gap=_row(meters.lost_gap_s),
        moved_preemptions=meters.moved_preemptions,
        replayed_preemptions=meters.replayed_preemptions,
        unbalanced_proofs=meters.unbalanced_proofs,
        prefill_tokens_per_s=engine.rate.tokens_per_s,
        dropped_offers=cache.writedown.stats.dropped_offers,
        namespaces=tuple(NamespaceRow(name, num_bytes) for name, num_bytes in namespaces),
        other_namespaces_bytes=charged.total() - sum(num_bytes for _, num_bytes in namespaces),
    )


def _tier(cache: TieredCache, name: str, meters: TierMeters) -> TierMeterRow:
    gate = cache.gates.get(name)
    return TierMeterRow(
        tier=TierName(name),
        hit_tokens=meters.hit_tokens,
        read=_row(meters.read_s),
        write=_row(meters.write_s),
        stall=_row(meters.stall_s),
        late_loads=meters.late_loads,
        streamed_bytes=meters.streamed_bytes,
        evictions=tuple(EvictionRow(*key, count) for key, count in sorted(meters.evictions.items())),
        lifetime=_row(meters.lifetime_s),
        reuse_gap=_row(meters.reuse_gap_s),
        load_bytes_per_s=gate.bytes_per_s if gate is not None else None,
        load_latency_s=gate.latency_s if gate is not None else None,
        picked=meters.picked,
        picked_hits=meters.picked_hits,
    )


def _row(histogram: Histogram) -> HistogramRow:
    return HistogramRow(histogram.bounds, tuple(histogram.counts), histogram.total)
