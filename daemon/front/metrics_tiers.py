"""The engine's answer to a scrape, as families: one for each concept, the tiers told apart by a label."""

from collections.abc import Sequence

from daemon import messages
from daemon.cache_messages import TierName
from daemon.front.metrics_page import Page
from daemon.meter_messages import Meters, NamespaceRow, TierMeterRow

GONE = "none"  # in place of a tier, of prompts that were asked for before and are in no tier any more


def add_tiers(page: Page, rows: Sequence[messages.TierRow], meters: Meters) -> None:
    """All that has a tier."""
    for row in rows:
        _add_room(page, row)
        if row.name != TierName.DEVICE:
            _add_traffic(page, row)
    passed_on = meters.computed_tokens + sum(tier.hit_tokens for tier in meters.tiers)
    for tier in meters.tiers:
        passed_on -= tier.hit_tokens
        page.add("downcore_tier_hit_tokens_total", tier.hit_tokens, tier=tier.tier)
        page.add("downcore_tier_miss_tokens_total", passed_on, tier=tier.tier)
        _add_ages(page, tier)
        if tier.tier is not TierName.DEVICE:
            _add_loads(page, tier)
    page.add_histogram("downcore_tier_reuse_gap_seconds", meters.lost_gap, tier=GONE)
    page.add("downcore_dropped_offers_total", meters.dropped_offers)


def add_engine(page: Page, meters: Meters) -> None:
    """All that is about its steps."""
    for state in ("queued", "restoring", "prefilling", "decoding", "preempted"):
        page.add("downcore_sequences", meters.sequences.get(state, 0), state=state)
    page.add("downcore_steps_total", meters.steps)
    page.add_histogram("downcore_step_seconds", meters.step)
    page.add_histogram("downcore_step_decode_rows", meters.decode_rows)
    page.add_histogram("downcore_lookup_seconds", meters.lookup)
    page.add("downcore_preemptions_total", meters.moved_preemptions, how="moved")
    page.add("downcore_preemptions_total", meters.replayed_preemptions, how="replayed")
    page.add("downcore_unbalanced_proofs_total", meters.unbalanced_proofs)
    page.add("downcore_prefill_tokens_per_second", meters.prefill_tokens_per_s)


def add_namespaces(page: Page, meters: Meters, most: int) -> None:
    """The `most` largest by name, and all others together under the empty one."""
    named, others = meters.namespaces[:most], meters.namespaces[most:]
    rest_bytes = meters.other_namespaces_bytes + sum(row.cached_bytes for row in others)
    for row in (*named, *((NamespaceRow("", rest_bytes),) if rest_bytes else ())):
        page.add("downcore_namespace_cached_bytes", row.cached_bytes, namespace=row.namespace)


def _add_room(page: Page, row: messages.TierRow) -> None:
    tier = row.name
    page.add("downcore_tier_capacity_bytes", row.capacity_bytes, tier=tier)
    page.add("downcore_tier_used_bytes", row.held_bytes, tier=tier, use="held")
    page.add("downcore_tier_used_bytes", row.cached_bytes, tier=tier, use="cached")
    page.add("downcore_tier_medium_bytes", row.used_bytes or row.capacity_bytes, tier=tier)
    page.add("downcore_tier_pinned_bytes", row.pinned_bytes, tier=tier)
    page.add("downcore_tier_dirty_bytes", row.dirty_bytes, tier=tier)
    page.add("downcore_tier_blocks", row.free_blocks, tier=tier, use="free")
    page.add("downcore_tier_blocks", row.cached_blocks, tier=tier, use="cached")
    page.add("downcore_tier_blocks", row.blocks - row.cached_blocks - row.free_blocks, tier=tier, use="held")
    if row.slots:
        page.add("downcore_tier_slots", row.free_slots, tier=tier, use="free")
        page.add("downcore_tier_slots", row.slots - row.free_slots, tier=tier, use="taken")
    for state in messages.TierState:
        page.add("downcore_tier_state", row.state is state, tier=tier, state=state)


def _add_traffic(page: Page, row: messages.TierRow) -> None:
    tier = row.name
    page.add("downcore_tier_reads_total", row.reads, tier=tier)
    page.add("downcore_tier_read_bytes_total", row.read_bytes, tier=tier)
    page.add("downcore_tier_writes_total", row.writes, tier=tier)
    page.add("downcore_tier_written_bytes_total", row.written_bytes, tier=tier)
    page.add("downcore_tier_dropped_writes_total", row.dropped_writes, tier=tier)
    page.add("downcore_tier_verify_failures_total", row.verify_failures, tier=tier)
    page.add("downcore_tier_quarantined_records", row.quarantined, tier=tier)
    page.add("downcore_tier_gate_refusals_total", row.gate_refusals, tier=tier)


def _add_ages(page: Page, row: TierMeterRow) -> None:
    page.add_histogram("downcore_tier_block_lifetime_seconds", row.lifetime, tier=row.tier)
    page.add_histogram("downcore_tier_reuse_gap_seconds", row.reuse_gap, tier=row.tier)
    for eviction in row.evictions:
        page.add(
            "downcore_tier_evictions_total", eviction.count, tier=row.tier, kind=eviction.kind, reason=eviction.reason
        )


def _add_loads(page: Page, row: TierMeterRow) -> None:
    page.add_histogram("downcore_tier_read_seconds", row.read, tier=row.tier)
    page.add_histogram("downcore_tier_write_seconds", row.write, tier=row.tier)
    page.add_histogram("downcore_tier_stall_seconds", row.stall, tier=row.tier)
    page.add("downcore_tier_late_loads_total", row.late_loads, tier=row.tier)
    page.add("downcore_tier_streamed_bytes_total", row.streamed_bytes, tier=row.tier)
    if row.load_bytes_per_s is not None:
        page.add("downcore_tier_load_bytes_per_second", row.load_bytes_per_s, tier=row.tier)
    if row.load_latency_s is not None:
        page.add("downcore_tier_load_latency_seconds", row.load_latency_s, tier=row.tier)
