"""How tiers look to people: the overview, one in full, and rates between two looks."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from downcore.v1 import admin_pb2
from rich.table import Table

from ops.cli.output import counted, enum_name, human_bytes, human_count, human_seconds, make_wide_table

STAT_COLUMNS = (
    ("tier", -8), ("state", -10), ("read/s", 10), ("read lat", 9), ("write/s", 10), ("write lat", 9), ("dirty", 10),
    ("cached", 10), ("hit tok/s", 9), ("evict/s", 7), ("drop/s", 6), ("gated/s", 7),
)  # fmt: skip


def tier_table(tiers: Iterable[admin_pb2.Tier]) -> Table:
    """One row a tier. held + cached + free = capacity; hit is the share of looked-up prompt tokens found there."""
    numeric = ("capacity", "held", "cached", "free", "pinned", "dirty", "blocks", "slots", "hit", "evicted")
    table = make_wide_table(("tier", "state", *numeric), numeric=numeric)
    for tier in tiers:
        looked_up = tier.hit_tokens + tier.miss_tokens
        table.add_row(
            tier.name,
            state_name(tier),
            human_bytes(tier.capacity_bytes),
            human_bytes(tier.held_bytes),
            human_bytes(tier.cached_bytes),
            human_bytes(tier.free_bytes),
            _size(tier.pinned_bytes),
            _size(tier.dirty_bytes),
            f"{tier.blocks - tier.free_blocks:,}/{tier.blocks:,}",
            f"{tier.slots - tier.free_slots:,}/{tier.slots:,}" if tier.slots else "-",
            f"{tier.hit_tokens / looked_up:.0%}" if looked_up else "-",
            f"{tier.evicted_blocks:,}",
        )
    return table


def tier_facts(tier: admin_pb2.Tier) -> list[tuple[str, str]]:
    """One tier in full, what is wrong with it first."""
    state = state_name(tier) + (f": {tier.state_reason}" if tier.state_reason else "")
    facts = [
        ("tier", f"{tier.name} ({tier.medium})"),
        ("state", state),
        ("capacity", human_bytes(tier.capacity_bytes)),
        ("held", human_bytes(tier.held_bytes)),
        ("cached", f"{human_bytes(tier.cached_bytes)}, {human_bytes(tier.pinned_bytes)} of it pinned"),
        ("free", human_bytes(tier.free_bytes)),
        ("blocks", f"{tier.blocks:,}, {tier.cached_blocks:,} cached, {tier.free_blocks:,} free"),
    ]
    if tier.slots:
        facts.append(("slots", f"{tier.slots:,}, {tier.free_slots:,} free"))
    if tier.used_bytes or tier.HasField("quota_bytes"):
        of = f" of at most {human_bytes(tier.quota_bytes)}" if tier.HasField("quota_bytes") else ""
        facts.append(("taken", f"{human_bytes(tier.used_bytes)}{of}"))
    facts += _memory_facts(tier)
    looked_up = tier.hit_tokens + tier.miss_tokens
    share = f", {tier.hit_tokens / looked_up:.0%} of {looked_up:,} looked up" if looked_up else ""
    gated = f"; {tier.gate_refusals:,} not loaded, computing was faster" if tier.gate_refusals else ""
    return [
        *facts,
        ("hits", f"{counted(tier.hit_tokens, 'token')}{share}{gated}"),
        ("read", _traffic(tier.reads, tier.read_bytes, tier.read_s)),
        ("written", _traffic(tier.writes, tier.written_bytes, tier.write_s)),
        ("unwritten", f"{human_bytes(tier.dirty_bytes)} waiting, {counted(tier.dropped_writes, 'write')} dropped"),
        ("evicted", counted(tier.evicted_blocks, "block")),
        ("damage", f"{counted(tier.verify_failures, 'record')} did not check, {tier.quarantined:,} set aside now"),
    ]


@dataclass(frozen=True, slots=True)
class TierRates:
    """What a tier did between two looks, each second; latencies are means, None without an operation."""

    name: str
    state: str
    read_bytes_per_s: float
    read_latency_s: float | None
    written_bytes_per_s: float
    write_latency_s: float | None
    dirty_bytes: int
    cached_bytes: int
    hit_tokens_per_s: float
    evicted_blocks_per_s: float
    dropped_writes_per_s: float
    gate_refusals_per_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tier_rates(before: admin_pb2.Tier, after: admin_pb2.Tier, seconds: float) -> TierRates:
    """Rates between two looks at a tier, `seconds` apart. Counters that went back began anew with a new engine."""

    def grown(name: str) -> float:
        old, new = getattr(before, name), getattr(after, name)
        return new - old if new >= old else new

    def latency(count: str, total_s: str) -> float | None:
        return grown(total_s) / grown(count) if grown(count) else None

    return TierRates(
        name=after.name,
        state=state_name(after),
        read_bytes_per_s=grown("read_bytes") / seconds,
        read_latency_s=latency("reads", "read_s"),
        written_bytes_per_s=grown("written_bytes") / seconds,
        write_latency_s=latency("writes", "write_s"),
        dirty_bytes=after.dirty_bytes,
        cached_bytes=after.cached_bytes,
        hit_tokens_per_s=grown("hit_tokens") / seconds,
        evicted_blocks_per_s=grown("evicted_blocks") / seconds,
        dropped_writes_per_s=grown("dropped_writes") / seconds,
        gate_refusals_per_s=grown("gate_refusals") / seconds,
    )


def stat_header() -> str:
    """The names over `stat_line`."""
    return _columns([name for name, _ in STAT_COLUMNS])


def stat_line(rates: TierRates) -> str:
    """One tier's rates in columns of a fixed width, so that lines below each other compare."""
    return _columns(
        [
            rates.name,
            rates.state,
            _size(rates.read_bytes_per_s),
            _latency(rates.read_latency_s),
            _size(rates.written_bytes_per_s),
            _latency(rates.write_latency_s),
            _size(rates.dirty_bytes),
            _size(rates.cached_bytes),
            _rate(rates.hit_tokens_per_s),
            _rate(rates.evicted_blocks_per_s),
            _rate(rates.dropped_writes_per_s),
            _rate(rates.gate_refusals_per_s),
        ]
    )


def state_name(tier: admin_pb2.Tier) -> str:
    """ok, read-only or degraded; a daemon that says nothing of it has no trouble to tell."""
    if tier.state == admin_pb2.TIER_STATE_UNSPECIFIED:
        return "ok"
    return enum_name(admin_pb2.TierState.DESCRIPTOR, tier.state).lower().replace("_", "-")


def _memory_facts(tier: admin_pb2.Tier) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if tier.is_unified:
        facts.append(("memory", "shared with the tier before it, counted once"))
    if tier.HasField("driver_free_bytes"):
        facts.append(("driver free", human_bytes(tier.driver_free_bytes)))
    if tier.HasField("host_free_bytes"):
        facts.append(("host free", human_bytes(tier.host_free_bytes)))
    return facts


def _traffic(count: int, num_bytes: int, seconds: float) -> str:
    if not count:
        return "nothing"
    return f"{human_bytes(num_bytes)} in {counted(count, 'operation')}, {_latency(seconds / count)} each"


def _columns(cells: Sequence[str]) -> str:
    padded = [
        f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, (_, width) in zip(cells, STAT_COLUMNS, strict=True)
    ]
    return " ".join(padded).rstrip()


def _size(num_bytes: float) -> str:
    return human_bytes(int(num_bytes)) if num_bytes >= 1 else "-"


def _rate(per_second: float) -> str:
    if not per_second:
        return "-"
    return f"{per_second:.1f}" if per_second < 10 else human_count(per_second)


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else human_seconds(seconds)
