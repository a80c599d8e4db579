"""The cache of the scripted engine: prefixes by key, without a byte of state, and jobs that take a step each tick.

Prefixes end at multiples of the grid; a token takes 4 bytes in every tier that has it. A Warm whose first token is
REFUSED is rejected. A Verify reads a record a tick and finds the first `num_damaged` of them damaged.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason

GRID = 1024  # tokens
BLOCK = 64  # tokens
TOKEN_BYTES = 4
RECORD_BYTES = 4096
REFUSED = 7
LOAD_S = {cm.TierName.DEVICE: 0.0, cm.TierName.HOST: 1e-6, cm.TierName.DISK: 1e-5}  # a token
COMPUTE_S = 1e-4  # a token


@dataclass
class Prefix:
    """A prefix that somebody has warmed."""

    namespace: str
    ids: bytes  # little-endian int32
    tiers: set[cm.TierName]
    last_use_s: float
    pinned: bool = False
    expires_s: float | None = None
    hits: int = 0

    @property
    def tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES


@dataclass
class Warming:
    """A Warm on its way."""

    warm: cm.Warm
    total_tokens: int
    done_tokens: int
    cached_tokens: int
    arrived_s: float
    stage: cm.WarmStage = cm.WarmStage.QUEUED


@dataclass
class Reading:
    """A Verify or a Flush on its way."""

    question: cm.Verify | cm.Flush
    done: int = 0


class ScriptedCache:
    """Takes every message of daemon/cache_messages.py; `tick` moves what is on its way."""

    def __init__(
        self,
        send: Callable[[messages.ToFront], None],
        *,
        tiers: tuple[cm.TierName, ...],
        num_prefixes: int,
        num_records: int,
        num_damaged: int,
    ) -> None:
        self.send = send
        self.tiers = tiers
        self.num_records = num_records
        self.num_damaged = num_damaged
        self.prefixes: dict[str, Prefix] = {}
        self.warming: dict[str, Warming] = {}
        self.reading: dict[int, Reading] = {}
        self.quotas: dict[str, tuple[int | None, int | None]] = {}
        for number in range(num_prefixes):
            ids = number.to_bytes(4, "little") * GRID
            prefix = Prefix("default", ids, {tiers[-1]}, 1_700_000_000.0 + number // 2, hits=number % 5)
            self.prefixes[key_of("default", ids)] = prefix

    @property
    def is_busy(self) -> bool:
        return bool(self.warming or self.reading)

    def handle(self, message: cm.CacheToEngine) -> None:
        match message:
            case cm.Warm():
                self.begin(message)
            case cm.Lookup():
                self.send(self.lookup(message))
            case cm.PinPrefix():
                self.pin(message)
            case cm.UnpinPrefix():
                self.answer_prefix(message, pinned=False, ttl_s=None)
            case cm.EvictPrefix():
                self.evict(message)
            case cm.ListPrefixes():
                self.send(self.listed(message))
            case cm.Flush() | cm.Verify():
                self.reading[message.query_id] = Reading(message)
            case cm.Cancel():
                del self.reading[message.query_id]
            case cm.SetQuota():
                self.quotas[message.namespace] = (message.cached_bytes, message.pinned_bytes)
                self.send(cm.QuotaList(message.query_id, (self.quota(message.namespace),)))
            case cm.RemoveQuota():
                if self.quotas.pop(message.namespace, None) is None:
                    text = "this namespace has no quota"
                    self.send(cm.Refused(message.query_id, ErrorReason.NOT_FOUND, text, "namespace"))
                else:
                    self.send(cm.QuotaList(message.query_id, ()))
            case cm.ListQuotas():
                names = sorted({*self.quotas, *(prefix.namespace for prefix in self.prefixes.values())})
                self.send(cm.QuotaList(message.query_id, tuple(self.quota(name) for name in names)))

    def abort(self, request_id: str) -> None:
        self.warming.pop(request_id, None)

    def tick(self) -> None:
        for warming in list(self.warming.values()):
            self.advance(warming)
        for reading in list(self.reading.values()):
            self.read(reading)

    def begin(self, warm: cm.Warm) -> None:
        if warm.prompt_ids[0] == REFUSED:
            self.send(messages.Rejected(warm.request_id, ErrorReason.NO_CAPACITY, "no block is left", "", 2.0))
            return
        total = len(warm.prompt_ids) // TOKEN_BYTES // GRID * GRID
        _, known = self.deepest(warm.namespace, warm.prompt_ids)
        cached = known.tokens if known is not None else 0
        self.warming[warm.request_id] = Warming(warm, total, cached, cached, time.monotonic())
        self.send(cm.WarmProgress(warm.request_id, cm.WarmStage.QUEUED, 0, total))

    def advance(self, warming: Warming) -> None:
        warm = warming.warm
        if warming.stage is cm.WarmStage.QUEUED:
            warming.stage = cm.WarmStage.COMPUTING
        elif warming.done_tokens < warming.total_tokens:
            warming.done_tokens += GRID
        elif warming.stage is cm.WarmStage.COMPUTING and warm.tier is not cm.TierName.DEVICE:
            warming.stage, warming.done_tokens = cm.WarmStage.WRITING, 0
        else:
            self.finish(warming)
            return
        progress = (warming.stage, warming.done_tokens, warming.total_tokens)
        self.send(cm.WarmProgress(warm.request_id, *progress))

    def finish(self, warming: Warming) -> None:
        warm, now_s = warming.warm, time.time()
        ids = warm.prompt_ids[: warming.total_tokens * TOKEN_BYTES]
        key = key_of(warm.namespace, ids)
        prefix = self.prefixes.setdefault(key, Prefix(warm.namespace, ids, set(), now_s))
        prefix.tiers |= {cm.TierName.DEVICE, warm.tier}
        prefix.pinned = prefix.pinned or warm.pin
        prefix.expires_s = now_s + warm.ttl_s if warm.ttl_s is not None else None
        del self.warming[warm.request_id]
        self.send(
            cm.WarmDone(
                warm.request_id, key, warming.total_tokens, warming.cached_tokens,
                self.bytes_of(prefix, prefix.tokens), cm.TierName.DISK in prefix.tiers, prefix.pinned, prefix.expires_s,
            )
        )  # fmt: skip

    def read(self, reading: Reading) -> None:
        reading.done += 1
        query_id, done, total = reading.question.query_id, reading.done, self.num_records
        if done <= total:
            if isinstance(reading.question, cm.Verify):
                self.send(cm.VerifyProgress(query_id, done, total, done * RECORD_BYTES, total * RECORD_BYTES))
            return
        del self.reading[query_id]
        if isinstance(reading.question, cm.Flush):
            is_durable = reading.question.tier is cm.TierName.DISK
            self.send(cm.Flushed(query_id, total, total * RECORD_BYTES, 0.25, is_durable))
            return
        damage = tuple(
            cm.Damage(f"segment 3 at {number * RECORD_BYTES}", "d" * 64, "checksum differs", RECORD_BYTES)
            for number in range(self.num_damaged)
        )
        self.send(cm.VerifyDone(query_id, total, total * RECORD_BYTES, 0.5, self.num_damaged, damage))

    def lookup(self, question: cm.Lookup) -> cm.LookupAnswer:
        key, found = self.deepest(question.namespace, question.prompt_ids)
        prompt_tokens = len(question.prompt_ids) // TOKEN_BYTES
        resume = min(found.tokens, (prompt_tokens - 1) // GRID * GRID) if found is not None else 0
        if found is None or not resume:
            return cm.LookupAnswer(
                question.query_id, prompt_tokens, 0, 0, "", (), None, None, 0.0, cm.GateDecision.NOTHING,
                "UNKNOWN", "no block of it is known",
            )  # fmt: skip
        tier = min(found.tiers, key=list(cm.TierName).index)
        load_s, compute_s = LOAD_S[tier] * resume, COMPUTE_S * resume
        gate = cm.GateDecision.NOTHING if tier is cm.TierName.DEVICE else cm.GateDecision.LOAD
        row = cm.LookupTier(tier, resume, resume * TOKEN_BYTES, load_s)
        return cm.LookupAnswer(
            question.query_id, prompt_tokens, found.tokens, resume, key, (row,), resume, tier, compute_s, gate,
            "WHOLE", "every grid position below the prompt's end is cached",
        )  # fmt: skip

    def pin(self, question: cm.PinPrefix) -> None:
        _, limit = self.quotas.get(question.namespace, (None, None))
        key, found = self.select(question.namespace, question.prefix)
        if found is not None and limit is not None and not found.pinned:
            wanted = row_bytes(self.row(key, found)) + self.used(question.namespace, pinned=True)
            if wanted > limit:
                text = f"pins would bind {wanted} bytes, the quota is {limit}"
                self.send(cm.Refused(question.query_id, ErrorReason.QUOTA_EXCEEDED, text))
                return
        self.answer_prefix(question, pinned=True, ttl_s=question.ttl_s)

    def answer_prefix(self, question: cm.PinPrefix | cm.UnpinPrefix, *, pinned: bool, ttl_s: float | None) -> None:
        key, found = self.select(question.namespace, question.prefix)
        if found is None:
            self.send(cm.Refused(question.query_id, ErrorReason.NOT_FOUND, "no such prefix", "prefix"))
            return
        found.pinned = pinned
        found.expires_s = time.time() + ttl_s if ttl_s is not None else None
        self.send(cm.PrefixAnswer(question.query_id, self.row(key, found)))

    def evict(self, question: cm.EvictPrefix) -> None:
        _, found = self.select(question.namespace, question.prefix)
        if found is None:
            self.send(cm.Refused(question.query_id, ErrorReason.NOT_FOUND, "no such prefix", "prefix"))
            return
        doomed = {
            key: prefix
            for key, prefix in self.prefixes.items()
            if prefix.namespace == found.namespace and prefix.ids.startswith(found.ids)
        }
        if any(prefix.pinned for prefix in doomed.values()):
            self.send(cm.Refused(question.query_id, ErrorReason.PREFIX_PINNED, "unpin it first", "prefix"))
            return
        rows = [self.row(key, prefix) for key, prefix in doomed.items()]
        sizes = cm.BytesByTier(
            sum(row.bytes.device for row in rows), sum(row.bytes.host for row in rows), sum(r.bytes.disk for r in rows)
        )
        blocks, checkpoints = sum(row.blocks for row in rows), sum(row.checkpoints for row in rows)
        for key in doomed:
            del self.prefixes[key]
        kept = found.tokens // BLOCK - next(row.blocks for row in rows if row.tokens == found.tokens)
        self.send(cm.Evicted(question.query_id, len(rows), blocks, checkpoints, kept, sizes))

    def listed(self, question: cm.ListPrefixes) -> cm.PrefixList:
        rows = [
            self.row(key, prefix)
            for key, prefix in self.prefixes.items()
            if prefix.namespace == question.namespace and key.startswith(question.key_prefix)
        ]
        value: Callable[[cm.PrefixRow], float] = {
            cm.PrefixOrder.RECENCY: lambda row: row.last_use_time_s,
            cm.PrefixOrder.BYTES: lambda row: float(row_bytes(row)),
            cm.PrefixOrder.HITS: lambda row: float(row.hits),
        }[question.order]
        rows.sort(key=lambda row: (-value(row), row.key))
        rest = rows
        if question.after_value is not None:
            place = (-question.after_value, question.after_key)
            rest = [row for row in rows if (-value(row), row.key) > place]
        page = tuple(rest[: question.limit])
        return cm.PrefixList(question.query_id, page, len(rows), len(rest) > len(page))

    def row(self, key: str, prefix: Prefix) -> cm.PrefixRow:
        parents = [
            (other.tokens, other_key)
            for other_key, other in self.prefixes.items()
            if other.namespace == prefix.namespace and other.tokens < prefix.tokens and prefix.ids.startswith(other.ids)
        ]
        parent_tokens, parent_key = max(parents, default=(0, ""))
        own = prefix.tokens - parent_tokens
        return cm.PrefixRow(
            key, parent_key, prefix.namespace, prefix.tokens, own // BLOCK, 1, self.bytes_of(prefix, own),
            prefix.pinned, prefix.last_use_s, prefix.hits, prefix.expires_s,
        )  # fmt: skip

    def bytes_of(self, prefix: Prefix, num_tokens: int) -> cm.BytesByTier:
        return cm.BytesByTier(**{tier.value: num_tokens * TOKEN_BYTES for tier in prefix.tiers})

    def quota(self, namespace: str) -> cm.QuotaRow:
        used, pinned = self.used(namespace, pinned=False), self.used(namespace, pinned=True)
        return cm.QuotaRow(namespace, *self.quotas.get(namespace, (None, None)), used, pinned, False)

    def used(self, namespace: str, *, pinned: bool) -> int:
        return sum(
            row_bytes(self.row(key, prefix))
            for key, prefix in self.prefixes.items()
            if prefix.namespace == namespace and (prefix.pinned or not pinned)
        )

    def deepest(self, namespace: str, ids: bytes) -> tuple[str, Prefix | None]:
        known = [key for key in keys_of(namespace, ids) if key in self.prefixes]
        return (known[-1], self.prefixes[known[-1]]) if known else ("", None)

    def select(self, namespace: str, selector: cm.Selector) -> tuple[str, Prefix | None]:
        if selector.prompt_ids is not None:
            return self.deepest(namespace, selector.prompt_ids)
        assert selector.key is not None
        found = self.prefixes.get(selector.key)
        return selector.key, found if found is not None and found.namespace == namespace else None


def keys_of(namespace: str, ids: bytes) -> list[str]:
    """The keys of all prefixes of a prompt, shortest first."""
    digest, chunk_bytes = hashlib.blake2b(namespace.encode(), digest_size=32), GRID * TOKEN_BYTES
    keys: list[str] = []
    for begin in range(0, len(ids) - chunk_bytes + 1, chunk_bytes):
        digest.update(ids[begin : begin + chunk_bytes])
        keys.append(digest.hexdigest())
    return keys


def key_of(namespace: str, ids: bytes) -> str:
    return keys_of(namespace, ids)[-1]


def row_bytes(row: cm.PrefixRow) -> int:
    return row.bytes.device + row.bytes.host + row.bytes.disk
