"""What the engine tells of itself when it is scraped: counters and histograms, beside the tables of daemon/messages.py.

It is an answer, made when it is asked for; a step sends nothing of this. Counters count from the engine's start.
"""

import msgspec

from daemon.cache_messages import TierName

MAX_NAMESPACES = 100  # of one answer; the rest is told as a sum


class HistogramRow(msgspec.Struct, frozen=True, array_like=True):
    """Values that fell up to each bound and not to the one before; `counts` has one more, for those beyond."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # of all values


class EvictionRow(msgspec.Struct, frozen=True, array_like=True):
    """How much left a tier for one reason."""

    kind: str  # block or checkpoint
    reason: str
    count: int


class TierMeterRow(msgspec.Struct, frozen=True):
    """What happened in one tier; times in seconds. tiers/meters.py says what each is."""

    tier: TierName
    hit_tokens: int
    read: HistogramRow
    write: HistogramRow
    stall: HistogramRow
    late_loads: int
    streamed_bytes: int
    evictions: tuple[EvictionRow, ...]
    lifetime: HistogramRow
    reuse_gap: HistogramRow
    load_bytes_per_s: float | None = None  # what the gate expects of a load; None: not measured yet
    load_latency_s: float | None = None
    picked: int = 0
    picked_hits: int = 0


class NamespaceRow(msgspec.Struct, frozen=True, array_like=True):
    """What one namespace has in all tiers together."""

    namespace: str
    cached_bytes: int


class Meters(msgspec.Struct, frozen=True):
    """The engine as a whole. Of the namespaces those with most bytes, at most MAX_NAMESPACES."""

    tiers: tuple[TierMeterRow, ...]
    sequences: dict[str, int]  # by state
    steps: int
    step: HistogramRow
    decode_rows: HistogramRow  # of steps that decoded
    lookup: HistogramRow
    computed_tokens: int  # of prompts, those that no tier had
    lost_gap: HistogramRow  # as reuse_gap, of prompts that no tier had any part of any more
    moved_preemptions: int
    replayed_preemptions: int
    unbalanced_proofs: int
    prefill_tokens_per_s: float
    dropped_offers: int
    namespaces: tuple[NamespaceRow, ...]
    other_namespaces_bytes: int


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """A request stood aside while this came from a tier; times in seconds from its arrival at the engine."""

    tier: TierName
    begin_s: float
    end_s: float
    tokens: int
