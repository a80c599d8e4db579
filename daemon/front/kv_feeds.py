"""Feeds of the blocks that come to the engine's tiers and leave them, for subscribers that come, go and lag.

A namespace has one feed while somebody reads it and for a while after: the latest batches, within a bound. A reader has
nothing but its place in them. One whose place is not there, because it is new, was away or is slow, is given a snapshot
and goes on from there. What must hold: a reader sees every batch after its snapshot or its place, once and in order;
with nobody reading, the engine is not asked to tell anything.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from daemon.errors import ErrorReason, RequestError
from daemon.kv_messages import KvBatch, KvSnapshot, KvToEngine, KvToFront, KvUnwatch, KvWatch

MAX_READERS = 32  # of all feeds
MAX_LOG_BYTES = 16 << 20  # of one feed
EVENT_BYTES = 64  # what an event counts for, besides its tokens
LINGER_S = 30.0  # a feed is kept so long after its last reader, who may only be reconnecting


class _Feed:
    """One namespace's latest batches: those after number `base`, which is None until the engine has answered."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.log: deque[KvBatch] = deque()
        self.log_bytes = 0
        self.base: int | None = None
        self.num_readers = 0
        self.error: RequestError | None = None
        self.ending: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # replaced at each change

    def reaches(self, place: int) -> bool:
        """All batches after this one are here."""
        return self.base is not None and self.base <= place <= self.base + len(self.log)

    def after(self, place: int) -> KvBatch | None:
        """The batch after this one, which `reaches` says is here; None where it is yet to come."""
        assert self.base is not None
        return self.log[place - self.base] if place < self.base + len(self.log) else None

    def add(self, batch: KvBatch) -> None:
        """Takes the next batch; one from before the feed began is dropped."""
        if self.base is None:
            return
        assert batch.sequence == self.base + len(self.log) + 1, "a batch is missing"
        self.log.append(batch)
        self.log_bytes += _size(batch)
        while self.log_bytes > MAX_LOG_BYTES:
            self.log_bytes -= _size(self.log.popleft())
            self.base += 1
        self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self) -> None:
        """Returns after the next change; raises RequestError once the feed is over."""
        if self.error is None:
            await self._changed.wait()
        if self.error is not None:
            raise self.error


class KvFeeds:
    """Owns the feeds. Talks to the engine through `send`, is told through `receive`."""

    def __init__(self, send: Callable[[KvToEngine], None]) -> None:
        self._send = send
        self._feeds: dict[str, _Feed] = {}
        self._snapshots: dict[int, tuple[_Feed, deque[KvSnapshot]]] = {}  # by query id: parts not read yet
        self._last_id = 0

    @property
    def num_readers(self) -> int:
        return sum(feed.num_readers for feed in self._feeds.values())

    async def read(self, namespace: str, place: int) -> AsyncGenerator[KvBatch | KvSnapshot]:
        """The batches of a namespace after `place`, without end; where they are not at hand, a snapshot's parts first.

        Raises:
            RequestError: there are too many readers, or the engine died.
        """
        feed = self._join(namespace)
        try:
            while True:
                if not feed.reaches(place):
                    async for part in self._snapshot(feed):
                        yield part
                        place = part.sequence
                elif (batch := feed.after(place)) is not None:
                    yield batch
                    place = batch.sequence
                else:
                    await feed.wait()
        finally:
            self._leave(feed)

    def receive(self, message: KvToFront) -> None:
        """Takes what the engine sent."""
        match message:
            case KvBatch():
                feed = self._feeds.get(message.namespace)
                if feed is not None:
                    feed.add(message)
            case KvSnapshot():
                feed, parts = self._snapshots.get(message.query_id, (None, None))
                if feed is not None and parts is not None:
                    if feed.base is None:
                        feed.base = message.sequence
                    parts.append(message)
                    feed.wake()

    def fail(self, error: RequestError) -> None:
        """The engine is gone: every feed is over."""
        for feed in self._feeds.values():
            feed.error = error
            feed.wake()
            if feed.ending is not None:
                feed.ending.cancel()
        self._feeds.clear()

    async def _snapshot(self, feed: _Feed) -> AsyncGenerator[KvSnapshot]:
        self._last_id += 1
        query_id = self._last_id
        parts: deque[KvSnapshot] = deque()
        self._snapshots[query_id] = feed, parts
        try:
            self._send(KvWatch(query_id, feed.namespace))
            while True:
                while parts:
                    part = parts.popleft()
                    yield part
                    if part.index == part.count - 1:
                        return
                await feed.wait()
        finally:
            del self._snapshots[query_id]

    def _join(self, namespace: str) -> _Feed:
        if self.num_readers >= MAX_READERS:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_READERS} subscribers read already")
        feed = self._feeds.setdefault(namespace, _Feed(namespace))
        feed.num_readers += 1
        if feed.ending is not None:
            feed.ending.cancel()
            feed.ending = None
        return feed

    def _leave(self, feed: _Feed) -> None:
        feed.num_readers -= 1
        if not feed.num_readers and feed.error is None:
            feed.ending = asyncio.get_running_loop().call_later(LINGER_S, self._end, feed)

    def _end(self, feed: _Feed) -> None:
        del self._feeds[feed.namespace]
        self._send(KvUnwatch(feed.namespace))


def _size(batch: KvBatch) -> int:
    return sum(EVENT_BYTES + len(event.tokens) for event in batch.events)
