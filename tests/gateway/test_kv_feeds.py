"""Readers of a feed that come, go, lag and outlive the engine: each sees everything after its snapshot or its place."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as common

from daemon.cache_messages import TierName
from daemon.config import EngineConfig
from daemon.errors import ErrorReason, RequestError
from daemon.front import kv_feeds
from daemon.front.caller import local_principal
from daemon.front.config import FrontConfig
from daemon.front.kv_feeds import EVENT_BYTES, KvFeeds
from daemon.front.open_work import OpenWork
from daemon.front.requests import RequestTable
from daemon.front.vllm.service import VllmEngine
from daemon.front.warm import WarmJobs
from daemon.kv_messages import KvBatch, KvEvent, KvSnapshot, KvToEngine, KvUnwatch, KvWatch

TOKENS = bytes(16)
FIRST = 1000  # number of an engine's first state


class Engine:
    """What the engine would say: a block comes with each batch, and a snapshot has two parts."""

    def __init__(self) -> None:
        self.feeds = KvFeeds(self.told)
        self.sequence = FIRST
        self.watched: set[str] = set()
        self.asked: list[KvToEngine] = []

    def told(self, message: KvToEngine) -> None:
        self.asked.append(message)
        match message:
            case KvWatch():
                self.watched.add(message.namespace)
                asyncio.get_running_loop().call_soon(self.answer, message, self.sequence)
            case KvUnwatch():
                self.watched.remove(message.namespace)

    def answer(self, message: KvWatch, sequence: int) -> None:
        for index in range(2):
            part = KvSnapshot(message.query_id, sequence, 0.0, index, 2, 2, (event(index),))
            self.feeds.receive(part)

    def batch(self, count: int = 1, namespace: str = "a") -> None:
        for _ in range(count):
            self.sequence += 1
            if namespace in self.watched:
                self.feeds.receive(KvBatch(namespace, self.sequence, 0.0, (event(self.sequence),)))


def event(key: int) -> KvEvent:
    return KvEvent(TierName.DEVICE, key, None, TOKENS)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(bounded())


async def numbers(feed: AsyncGenerator[KvBatch | KvSnapshot], count: int) -> list[int]:
    """Numbers of the next messages, negative for parts of a snapshot."""
    seen: list[int] = []
    for _ in range(count):
        told = await anext(feed)
        seen.append(-told.sequence if isinstance(told, KvSnapshot) else told.sequence)
    return seen


def test_a_new_reader_has_a_snapshot_and_then_every_batch() -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed:
            assert await numbers(feed, 2) == [-FIRST, -FIRST]
            engine.batch(3)
            assert await numbers(feed, 3) == [FIRST + 1, FIRST + 2, FIRST + 3]
            waiting = asyncio.create_task(numbers(feed, 1))
            await asyncio.sleep(0)
            engine.batch()
            assert await waiting == [FIRST + 4]

    run(test())


def test_batches_that_come_between_the_parts_follow_them() -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed:
            first = asyncio.create_task(anext(feed))
            await asyncio.sleep(0)
            (asked,) = engine.asked
            assert isinstance(asked, KvWatch)
            engine.feeds.receive(KvSnapshot(asked.query_id, FIRST, 0.0, 0, 2, 2, ()))
            engine.batch(2)
            engine.feeds.receive(KvSnapshot(asked.query_id, FIRST, 0.0, 1, 2, 2, ()))
            told = await first
            assert isinstance(told, KvSnapshot)
            assert await numbers(feed, 3) == [-FIRST, FIRST + 1, FIRST + 2]

    run(test())


def test_a_reader_that_was_away_goes_on_at_its_place() -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed:
            await numbers(feed, 2)
        engine.batch(4)
        async with aclosing(engine.feeds.read("a", FIRST + 2)) as feed:
            assert await numbers(feed, 2) == [FIRST + 3, FIRST + 4]
        assert len(engine.asked) == 1, "it was asked for a snapshot"

    run(test())


@pytest.mark.parametrize("place", [FIRST - 1, FIRST + 5, 1])
def test_a_place_that_is_not_here_means_a_snapshot(place: int) -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed:
            await numbers(feed, 2)
            engine.batch(4)
            async with aclosing(engine.feeds.read("a", place)) as other:
                assert await numbers(other, 2) == [-FIRST - 4, -FIRST - 4]
                engine.batch()
                assert await numbers(other, 1) == [FIRST + 5]
            assert await numbers(feed, 5) == [FIRST + i for i in range(1, 6)], "another's snapshot disturbed it"

    run(test())


def test_a_slow_reader_is_given_a_snapshot_and_the_log_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feeds, "MAX_LOG_BYTES", 4 * (EVENT_BYTES + len(TOKENS)))

    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed:
            await numbers(feed, 2)
            engine.batch(4)
            assert await numbers(feed, 1) == [FIRST + 1], "four are kept"
            engine.batch(100)
            assert await numbers(feed, 2) == [-FIRST - 104, -FIRST - 104]
            engine.batch()
            assert await numbers(feed, 1) == [FIRST + 105]

    run(test())


def test_the_engine_is_left_alone_a_while_after_the_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feeds, "LINGER_S", 0.02)

    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed, aclosing(engine.feeds.read("b", 0)) as other:
            await numbers(feed, 2)
            await numbers(other, 2)
        assert engine.watched == {"a", "b"}
        async with aclosing(engine.feeds.read("b", FIRST)) as other:
            waiting = asyncio.create_task(numbers(other, 1))
            while "a" in engine.watched:
                await asyncio.sleep(0.005)
            assert engine.watched == {"b"}
            engine.batch(namespace="b")
            assert await waiting == [FIRST + 1]

    run(test())


def test_readers_end_with_their_engine_and_start_anew_with_the_next() -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feeds.read("a", 0)) as feed:
            await numbers(feed, 2)
            waiting = asyncio.create_task(numbers(feed, 1))
            await asyncio.sleep(0)
            engine.feeds.fail(RequestError(ErrorReason.ENGINE_UNAVAILABLE, "gone"))
            with pytest.raises(RequestError, match="gone"):
                await waiting
        engine.watched.clear()
        engine.sequence = 2 * FIRST  # numbers of a later engine lie above all of an earlier one's
        async with aclosing(engine.feeds.read("a", FIRST)) as feed:
            assert await numbers(feed, 2) == [-2 * FIRST, -2 * FIRST]

    run(test())


def test_there_are_no_more_readers_than_may_be() -> None:
    async def test() -> None:
        engine = Engine()
        feeds = [engine.feeds.read("a", 0) for _ in range(kv_feeds.MAX_READERS)]
        for feed in feeds:
            await anext(feed)
        async with aclosing(engine.feeds.read("b", 0)) as one_more:
            with pytest.raises(RequestError, match="subscribers"):
                await anext(one_more)
        await feeds[0].aclose()
        async with aclosing(engine.feeds.read("b", 0)) as now:
            assert await numbers(now, 1) == [-FIRST]
        for feed in feeds:
            await feed.aclose()

    run(test())


class Stuck:
    """The context of a call whose client takes nothing."""

    principal = local_principal("a")

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()


def test_a_subscriber_that_takes_nothing_is_ended_and_leaves_its_feed() -> None:
    async def test() -> None:
        engine = Engine()
        supervisor: Any = SimpleNamespace(feeds=engine.feeds, require_ready=lambda: None)
        config = FrontConfig(engine=EngineConfig("nowhere"), stall_timeout_s=0.05)
        service = VllmEngine(config, OpenWork(RequestTable(1), WarmJobs()), supervisor, *([None] * 2))  # type: ignore[arg-type]
        with pytest.raises(RequestError) as caught:
            await service.SubscribeKvEvents(common.SubscribeKvEventsRequest(), Stuck())
        assert caught.value.reason is ErrorReason.READER_STALLED
        assert engine.feeds.num_readers == 0

    run(test())
