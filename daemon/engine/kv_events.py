"""Tells the front which blocks come and go, in batches, while it watches a namespace.

A step never waits for it: changes are written down as they happen, sent when the engine polls, and a snapshot of many
blocks is taken at once but put into messages a part at a time. What must hold: a snapshot's first part, which tells the
front where its batches begin, is sent before the first of them.
"""

from collections import deque
from collections.abc import Callable, Sequence

from daemon.cache_messages import TierName
from daemon.kv_messages import MAX_EVENTS, KvBatch, KvEvent, KvSnapshot, KvToEngine, KvToFront, KvUnwatch, KvWatch
from tiers.events import BlockEvent, BlockEvents
from tiers.tree import PrefixTree

PARTS_A_POLL = 2  # of snapshots, about 1 ms together


class KvEvents:
    """Owns the numbers of the watched namespaces, and the snapshots that are not sent yet."""

    def __init__(self, tree: PrefixTree, send: Callable[[KvToFront], None]) -> None:
        self._events = BlockEvents(tree)
        self._send = send
        self._sequences: dict[str, int] = {}  # last batch of each watched namespace
        self._highest = 0  # of all numbers so far
        self._parts: deque[Callable[[], KvSnapshot]] = deque()

    @property
    def is_due(self) -> bool:
        """Something waits to be sent."""
        return bool(self._parts) or self._events.has_events

    def ask(self, message: KvToEngine, unix_s: float) -> None:
        """Begins a watch and its snapshot, or ends it."""
        match message:
            case KvUnwatch():
                self._sequences.pop(message.namespace, None)
                self._events.unwatch(message.namespace)
            case KvWatch():
                self._publish(unix_s)
                namespace = message.namespace
                if namespace not in self._sequences:
                    self._highest = self._sequences[namespace] = max(self._highest + 1, int(unix_s * 1e6))
                    self._events.watch(namespace)
                self._plan(message, self._events.copies(namespace), unix_s)

    def poll(self, unix_s: float) -> None:
        """Sends what happened since the last call, and some parts of snapshots."""
        self._publish(unix_s)
        for _ in range(min(PARTS_A_POLL, len(self._parts))):
            self._send(self._parts.popleft()())

    def _publish(self, unix_s: float) -> None:
        for namespace in self._sequences:
            events = self._events.take(namespace)
            for begin in range(0, len(events), MAX_EVENTS):
                self._sequences[namespace] += 1
                batch = _told(events[begin : begin + MAX_EVENTS])
                self._send(KvBatch(namespace, self._sequences[namespace], unix_s, batch))
            self._highest = max(self._highest, self._sequences[namespace])

    def _plan(self, message: KvWatch, copies: list[BlockEvent], unix_s: float) -> None:
        count = max(-(-len(copies) // MAX_EVENTS), 1)
        sequence = self._sequences[message.namespace]

        def part(index: int) -> KvSnapshot:
            events = _told(copies[index * MAX_EVENTS : (index + 1) * MAX_EVENTS])
            return KvSnapshot(message.query_id, sequence, unix_s, index, count, len(copies), events)

        self._send(part(0))
        self._parts.extend(lambda index=index: part(index) for index in range(1, count))


def _told(events: Sequence[BlockEvent]) -> tuple[KvEvent, ...]:
    return tuple(
        KvEvent(
            TierName(event.tier),
            _short(event.key),
            None if event.parent is None else _short(event.parent),
            event.tokens,
        )
        for event in events
    )


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)
