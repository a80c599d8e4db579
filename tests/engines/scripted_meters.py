"""What the scripted engine says when it is scraped: figures that a test can know again, for the tiers that it has."""

from collections.abc import Sequence

from daemon.cache_messages import TierName
from daemon.meter_messages import EvictionRow, HistogramRow, Meters, NamespaceRow, TierMeterRow

HIT_TOKENS = {TierName.DEVICE: 700, TierName.HOST: 200, TierName.DISK: 100}
COMPUTED_TOKENS = 50
NAMESPACES = (NamespaceRow("big", 4096), NamespaceRow("middle", 1024), NamespaceRow("small", 64))


def _histogram(*counts: int) -> HistogramRow:
    return HistogramRow(tuple(0.1 * (i + 1) for i in range(len(counts) - 1)), counts, 0.05 * sum(counts))


def meters(tiers: Sequence[TierName], *, steps: int, sequences: dict[str, int]) -> Meters:
    """Of an engine with these tiers."""
    return Meters(
        tiers=tuple(
            TierMeterRow(
                tier=tier,
                hit_tokens=HIT_TOKENS[tier],
                read=_histogram(1, 2, 0),
                write=_histogram(0, 1, 1),
                stall=_histogram(3, 0, 0),
                late_loads=1,
                streamed_bytes=17,
                evictions=(EvictionRow("block", "room", 5), EvictionRow("checkpoint", "quota", 2)),
                lifetime=_histogram(2, 2, 2),
                reuse_gap=_histogram(4, 0, 1),
                load_bytes_per_s=1e9,
                load_latency_s=0.001,
            )
            for tier in tiers
        ),
        sequences=sequences,
        steps=steps,
        step=_histogram(5, 5, 0),
        decode_rows=_histogram(9, 0, 0),
        lookup=_histogram(6, 0, 0),
        computed_tokens=COMPUTED_TOKENS,
        lost_gap=_histogram(0, 1, 0),
        moved_preemptions=2,
        replayed_preemptions=1,
        unbalanced_proofs=0,
        prefill_tokens_per_s=1234.5,
        dropped_offers=8,
        namespaces=NAMESPACES,
        other_namespaces_bytes=0,
    )
