"""What operators and jobs ask about prefixes, tiers and quotas, answered from the engine's own books.

Each question gets one final answer. Three take time and are kept open: a flush until the lower tiers have everything, a
scrub of the disk while an I/O thread reads every record, and a change of a pin or a quota until the disk has it; but
not for long, since what it asks for holds from the beginning.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from daemon.cache_messages import (
    BytesByTier,
    CacheAnswer,
    Cancel,
    Evicted,
    EvictPrefix,
    Flush,
    Flushed,
    GateDecision,
    ListPrefixes,
    ListQuotas,
    Lookup,
    LookupAnswer,
    LookupTier,
    PinPrefix,
    PrefixAnswer,
    PrefixList,
    PrefixOrder,
    PrefixRow,
    QuotaList,
    Refused,
    RemoveQuota,
    Selector,
    SetQuota,
    TierName,
    UnpinPrefix,
    Verify,
)
from daemon.engine.kv_events import KvEvents
from daemon.engine.quotas import Quotas
from daemon.engine.rate import PrefillRate
from daemon.engine.scrub import Scrubs
from daemon.engine.warming import NOTHING_PINS
from daemon.errors import ErrorReason
from daemon.kv_messages import KvToFront, KvUnwatch, KvWatch
from tiers.index import Quota
from tiers.match import MatchEnd
from tiers.prefixes import Bytes, PinnedError, Prefixes
from tiers.tree import Node

Answerable = (
    Lookup | PinPrefix | UnpinPrefix | EvictPrefix | ListPrefixes
    | Flush | Verify | Cancel | SetQuota | RemoveQuota | ListQuotas
)  # fmt: skip
Question = Answerable | KvWatch | KvUnwatch
FLUSH_TIMEOUT_S = 300.0
KEPT_WITHIN_S = 2.0  # after which the answer to a change does not wait for the disk any longer


@dataclass(slots=True)
class OpenFlush:
    """A flush that waits for its last batch."""

    query_id: int
    began: float
    writes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class OpenChange:
    """A change that holds, and that the disk does not have yet."""

    answer: Callable[[], CacheAnswer]
    until: float


class Questions:
    """Owns the questions that take time."""

    def __init__(
        self,
        prefixes: Prefixes,
        quotas: Quotas,
        rate: PrefillRate,
        send: Callable[[CacheAnswer | KvToFront], None],
    ) -> None:
        self.prefixes = prefixes
        self.cache = prefixes.cache
        self.rate = rate
        self.send = send
        self.quotas = quotas
        self.changes: dict[int, OpenChange] = {}  # by query
        self.flushes: list[OpenFlush] = []
        self.scrubs = Scrubs(self.cache, send)
        self.kv_events = KvEvents(prefixes.tree, send)

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for what the next poll brings."""
        return bool(self.flushes or self.changes) or self.kv_events.is_due

    def close(self) -> None:
        """Nothing that is still open goes on; who asked learns it from the end of the engine."""
        self.scrubs.close()
        self.flushes.clear()
        self.changes.clear()

    def ask(self, question: Question, unix_s: float) -> None:
        """Answers now, or keeps the question open."""
        if isinstance(question, KvWatch | KvUnwatch):
            self.kv_events.ask(question, unix_s)
            return
        try:
            answer = self._answer(question, unix_s)
        except _RefusedError as refused:
            answer = Refused(question.query_id, refused.reason, str(refused))
        if answer is not None:
            self.send(answer)

    def poll(self, unix_s: float) -> None:
        """Goes on with what takes time: flushes, pins and times to live that end, quotas that are exceeded."""
        self.prefixes.expire(unix_s)
        self.quotas.keep(unix_s)
        self.kv_events.poll(unix_s)
        for flush in list(self.flushes):
            if self.cache.writedown.is_idle:
                self.flushes.remove(flush)
                self.send(self._flushed(flush))
            elif time.monotonic() - flush.began > FLUSH_TIMEOUT_S:
                self.flushes.remove(flush)
                reason = f"not all was written within {FLUSH_TIMEOUT_S:.0f} s"
                self.send(Refused(flush.query_id, ErrorReason.TIER_UNAVAILABLE, reason))
        for query_id, change in list(self.changes.items()):
            if time.monotonic() > change.until:
                del self.changes[query_id]
                self.send(change.answer())

    def _answer(self, question: Answerable, unix_s: float) -> CacheAnswer | None:
        match question:
            case Lookup():
                return self._look_up(question)
            case PinPrefix():
                self._pin(question, unix_s)
                return None
            case UnpinPrefix():
                node = self._find(question.namespace, question.prefix)
                self.prefixes.unpin(node, self._row_when_told(question.query_id, node))
                return None
            case EvictPrefix():
                return self._evict(question)
            case ListPrefixes():
                return self._list(question)
            case Flush():
                return self._flush(question)
            case Verify():
                return self._verify(question)
            case Cancel():
                self.scrubs.cancel(question.query_id)
                self.flushes = [flush for flush in self.flushes if flush.query_id != question.query_id]
                self.changes.pop(question.query_id, None)
                return None
            case SetQuota():
                self._set_quota(question, unix_s)
                return None
            case RemoveQuota():
                query_id = question.query_id
                told = self._answer_when_told(query_id, lambda: QuotaList(query_id, ()))
                if not self.quotas.remove(question.namespace, told):
                    del self.changes[query_id]
                    raise _RefusedError(ErrorReason.NOT_FOUND, "this namespace has no quota")
                return None
            case ListQuotas():
                return QuotaList(question.query_id, self.quotas.rows())

    def _set_quota(self, question: SetQuota, unix_s: float) -> None:
        query_id, namespace = question.query_id, question.namespace
        told = self._answer_when_told(query_id, lambda: QuotaList(query_id, (self.quotas.row(namespace),)))
        self.quotas.set(Quota(namespace, question.cached_bytes, question.pinned_bytes), unix_s, told)

    def _answer_when_told(self, query_id: int, answer: Callable[[], CacheAnswer]) -> Callable[[bool], None]:
        """Keeps a question open until what this returns is called, and for KEPT_WITHIN_S at most."""
        self.changes[query_id] = OpenChange(answer, time.monotonic() + KEPT_WITHIN_S)

        def told(_: bool) -> None:
            if query_id in self.changes:
                self.send(self.changes.pop(query_id).answer())

        return told

    def _row_when_told(self, query_id: int, node: Node) -> Callable[[bool], None]:
        return self._answer_when_told(query_id, lambda: PrefixAnswer(query_id, self._row(node)))

    def _look_up(self, question: Lookup) -> LookupAnswer:
        device = self.cache.device
        token_ids = list(memoryview(question.prompt_ids).cast("i"))
        match = device.lookup(token_ids, question.namespace)
        path = device.walk(token_ids, question.namespace)
        verdict = self.cache.weigh(match, is_forecast=True)
        is_load = verdict is not None and verdict.is_load
        size = device.layout.block_size
        resume_len = match.resume_len
        nodes = list(match.nodes)
        if is_load and match.deeper is not None:
            resume_len = match.deeper.resume_len
            nodes += match.deeper.nodes
        end = device.end_of(resume_len, match.known_len, len(token_ids))
        if end is MatchEnd.UNKNOWN and self.cache.disk is not None:
            following = device.next_key(token_ids, question.namespace, path)
            end = MatchEnd.OTHER_PROFILE if following in self.cache.disk.other_profile else end
        at = nodes[-1] if nodes else None
        where = None
        if at is not None and device.layout.slots:
            where = _tier_of(on_device=at.checkpoint is not None, in_host=at.host_state is not None)
        return LookupAnswer(
            query_id=question.query_id,
            prompt_tokens=len(token_ids),
            matched_tokens=len(path) * size,
            resume_tokens=resume_len,
            key=at.key.hex() if at is not None else "",
            tiers=self._by_tier(nodes),
            checkpoint_position=resume_len if where is not None else None,
            checkpoint_tier=where,
            compute_s=self.rate.seconds(0, resume_len),
            gate=GateDecision.NOTHING if verdict is None else _DECISIONS[is_load],
            stop_reason=end.name if is_load or verdict is None else "RECOMPUTE",
            stop=str(end) if is_load or verdict is None else str(verdict),
        )

    def _by_tier(self, nodes: list[Node]) -> tuple[LookupTier, ...]:
        size = self.cache.device.layout.block_size
        tokens = dict.fromkeys(TierName, 0)
        num_bytes = dict.fromkeys(TierName, 0)
        for node in nodes:
            tier = _tier_of(on_device=node.block_id is not None, in_host=node.host_block is not None)
            tokens[tier] += size
            num_bytes[tier] += self.cache.block_bytes_in(node)
        if nodes and nodes[-1].has_state:
            last = nodes[-1]
            tier = _tier_of(on_device=last.checkpoint is not None, in_host=last.host_state is not None)
            num_bytes[tier] += self.cache.state_bytes_in(last)
        return tuple(
            LookupTier(tier, tokens[tier], num_bytes[tier], self.cache.load_s(tier.value, num_bytes[tier]))
            for tier in TierName
            if num_bytes[tier]
        )

    def _find(self, namespace: str, selector: Selector) -> Node:
        if selector.key is not None:
            node = self.prefixes.by_key(namespace, bytes.fromhex(selector.key))
        else:
            assert selector.prompt_ids is not None
            node = self.prefixes.by_prompt(namespace, list(memoryview(selector.prompt_ids).cast("i")))
        if node is None:
            raise _RefusedError(ErrorReason.NOT_FOUND, "no such prefix in this namespace")
        return node

    def _pin(self, question: PinPrefix, unix_s: float) -> None:
        node = self._find(question.namespace, question.prefix)
        if not self.prefixes.can_pin:
            raise _RefusedError(ErrorReason.TIER_UNAVAILABLE, NOTHING_PINS)
        refusal = self.quotas.pin_refusal(node)
        if refusal is not None:
            raise _RefusedError(ErrorReason.QUOTA_EXCEEDED, refusal)
        expires = None if question.ttl_s is None else unix_s + question.ttl_s
        self.prefixes.pin(node, expires, self._row_when_told(question.query_id, node))
        self.cache.offer(node)  # a pin binds records: what has none yet gets one

    def _evict(self, question: EvictPrefix) -> Evicted:
        node = self._find(question.namespace, question.prefix)
        try:
            gone = self.prefixes.evict(node)
        except PinnedError:
            raise _RefusedError(ErrorReason.PREFIX_PINNED, "it, or a prefix that continues it, is pinned") from None
        return Evicted(
            question.query_id,
            gone.num_prefixes,
            gone.num_blocks,
            gone.num_checkpoints,
            gone.num_kept,
            _by_tier(gone.num_bytes),
        )

    def _list(self, question: ListPrefixes) -> PrefixList:
        rows = [
            self._row(node)
            for node in self.prefixes.all(question.namespace)
            if node.key.hex().startswith(question.key_prefix)
        ]
        value = _VALUES[question.order]
        rows.sort(key=lambda row: (-value(row), row.key))
        total = len(rows)
        if question.after_value is not None:
            after = (-question.after_value, question.after_key)
            rows = [row for row in rows if (-value(row), row.key) > after]
        return PrefixList(question.query_id, tuple(rows[: question.limit]), total, len(rows) > question.limit)

    def _row(self, node: Node) -> PrefixRow:
        own = self.prefixes.chain(node)
        parent = self.prefixes.parent(node)
        return PrefixRow(
            key=node.key.hex(),
            parent_key=parent.key.hex() if parent is not None else "",
            namespace=node.namespace,
            tokens=node.depth * self.cache.device.layout.block_size,
            blocks=len(own),
            checkpoints=sum(each.has_state for each in own),
            bytes=_by_tier(self.prefixes.bytes_of(own)),
            pinned=node in self.prefixes.pins,
            last_use_time_s=node.used_s,
            hits=node.hits,
            expires_time_s=self.prefixes.pins.get(node, self.prefixes.times_to_live.get(node)),
        )

    def _flush(self, question: Flush) -> None:
        has = {TierName.DEVICE: True, TierName.HOST: self.cache.host is not None, TierName.DISK: self.cache.disk}
        if not has[question.tier]:
            raise _RefusedError(ErrorReason.TIER_UNAVAILABLE, f"there is no {question.tier} tier")
        writes, written = self.cache.written()
        self.prefixes.offer_unwritten()
        self.flushes.append(OpenFlush(question.query_id, time.monotonic(), writes, written))

    def _flushed(self, flush: OpenFlush) -> Flushed:
        writes, written = self.cache.written()
        return Flushed(
            flush.query_id,
            writes - flush.writes,
            written - flush.written_bytes,
            time.monotonic() - flush.began,
            durable=self.cache.disk is not None and not self.prefixes.unwritten(),
        )

    def _verify(self, question: Verify) -> None:
        disk = self.cache.disk
        if question.tier is not TierName.DISK or disk is None:
            raise _RefusedError(ErrorReason.TIER_UNAVAILABLE, f"there is nothing to verify in a {question.tier} tier")
        self.scrubs.start(question.query_id, disk)


class _RefusedError(Exception):
    def __init__(self, reason: ErrorReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _used(row: PrefixRow) -> float:
    return row.last_use_time_s


def _size(row: PrefixRow) -> float:
    return row.bytes.device + row.bytes.host + row.bytes.disk


def _hits(row: PrefixRow) -> float:
    return row.hits


_VALUES = {PrefixOrder.RECENCY: _used, PrefixOrder.BYTES: _size, PrefixOrder.HITS: _hits}
_DECISIONS = {True: GateDecision.LOAD, False: GateDecision.COMPUTE}


def _tier_of(*, on_device: bool, in_host: bool) -> TierName:
    """The fastest tier that has something, of which at least the disk has it."""
    return TierName.DEVICE if on_device else TierName.HOST if in_host else TierName.DISK


def _by_tier(num_bytes: Bytes) -> BytesByTier:
    return BytesByTier(num_bytes.device, num_bytes.host, num_bytes.disk)
