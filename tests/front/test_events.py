"""What an operator is told: the log's numbers, its bound and its readers, and the events of a daemon's life."""

import asyncio
import os
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from downcore.v1 import admin_pb2 as pb
from downcore.v1 import generation_pb2

from daemon.front.events import Entry, EventLog
from tests.front.harness import Front, eventually, running_front


async def numbers(entries: AsyncIterator[Entry], count: int) -> list[tuple[int, int]]:
    """Sequence numbers and how many were missed before each, of the next `count`."""
    return [(entry.event.sequence, entry.missed) for entry in [await anext(entries) for _ in range(count)]]


def test_events_are_numbered_without_a_gap_and_the_oldest_are_forgotten() -> None:
    async def main() -> None:
        log = EventLog(max_events=4)
        for number in range(6):
            log.add(pb.EVENT_KIND_SERVING, str(number))
        async with aclosing(log.read(0, follow=False)) as entries:
            assert [(e.event.sequence, e.missed) async for e in entries] == [(3, 2), (4, 0), (5, 0), (6, 0)]
        async with aclosing(log.read(5, follow=False)) as entries:
            assert [(e.event.sequence, e.event.message) async for e in entries] == [(6, "5")]
        async with aclosing(log.read(99, follow=False)) as entries:
            assert [e async for e in entries] == []

    asyncio.run(main())


def test_a_follower_gets_what_comes_and_is_told_what_it_missed() -> None:
    async def main() -> None:
        log = EventLog(max_events=3)
        log.add(pb.EVENT_KIND_SERVING, "")
        async with aclosing(log.read(0, follow=True)) as entries:
            assert await numbers(entries, 1) == [(1, 0)]
            waiting = asyncio.ensure_future(anext(entries))
            await asyncio.sleep(0)
            assert not waiting.done()
            log.add(pb.EVENT_KIND_SERVING, "")
            assert (await waiting).event.sequence == 2
            for _ in range(10):  # while the reader is busy
                log.add(pb.EVENT_KIND_SERVING, "")
            assert await numbers(entries, 3) == [(10, 7), (11, 0), (12, 0)]

    asyncio.run(main())


def test_a_log_that_fills_takes_no_memory_that_it_has_not_had_from_the_start() -> None:
    async def main() -> None:
        tracemalloc.start()
        log = EventLog(max_events=512)
        made_bytes, _ = tracemalloc.get_traced_memory()
        for number in range(1024):
            log.add(pb.EVENT_KIND_ENGINE_STARTED, f"engine started: pid {number}", count=number)
        filled_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert filled_bytes <= made_bytes

    asyncio.run(main())


def watch(front: Front, **fields: object) -> list[pb.WatchEventsResponse]:
    request = pb.WatchEventsRequest(**fields)  # type: ignore[arg-type]
    return list(front.admin.WatchEvents(request, timeout=10))


def kinds(front: Front, **fields: object) -> list[str]:
    return [pb.EventKind.Name(answer.event.kind).removeprefix("EVENT_KIND_") for answer in watch(front, **fields)]


def test_a_daemons_life_is_told_in_order(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        eventually(lambda: "SERVING" in kinds(front))
        assert kinds(front) == ["ENGINE_STARTED", "ENGINE_READY", "SERVING"]
        first = watch(front)[-1]
        follower = front.admin.WatchEvents(
            pb.WatchEventsRequest(follow=True, after_sequence=first.event.sequence, log_id=first.log_id), timeout=20
        )
        os.kill(front.info().engine_pid, signal.SIGKILL)
        told = [pb.EventKind.Name(next(follower).event.kind)[11:] for _ in range(5)]
        assert sorted(told[:2]) == ["ENGINE_GONE", "NOT_SERVING"]
        assert told[2:] == ["ENGINE_STARTED", "ENGINE_READY", "SERVING"]
        follower.cancel()
        (gone,) = watch(front, kinds=[pb.EVENT_KIND_ENGINE_GONE])
        assert (gone.event.count, gone.missed) == (1, 0)
        assert abs(gone.event.time_s - time.time()) < 60
        front.admin.Drain(pb.DrainRequest(timeout_s=0), timeout=10)
        front.admin.Drain(pb.DrainRequest(timeout_s=0), timeout=10)
        assert kinds(front).count("DRAINING") == 1


def test_a_number_of_another_log_is_not_resumed_from(front: Front) -> None:
    everything = watch(front)
    assert watch(front, after_sequence=10_000, log_id="0123456789abcdef") == everything
    assert watch(front, after_sequence=10_000, log_id=everything[0].log_id) == []


def test_requests_that_an_operator_ends_are_told(front: Front) -> None:
    call = front.stream(request_id="ended", stopping=generation_pb2.StoppingParams(max_tokens=50_000))
    next(call)
    front.admin.AbortSequence(pb.AbortSequenceRequest(id="ended"), timeout=10)
    (ended,) = watch(front, kinds=[pb.EVENT_KIND_REQUESTS_ENDED])
    assert (ended.event.count, ended.event.message) == (1, "an operator ended 1 sequences")
    list(call)


def test_requests_that_are_refused_for_want_of_room_are_told_together(tmp_path: Path) -> None:
    with running_front(tmp_path, flags=("--max-open-requests", "1")) as front:
        call = front.stream(request_id="first", stopping=generation_pb2.StoppingParams(max_tokens=50_000))
        next(call)
        for _ in range(5):
            with pytest.raises(grpc.RpcError):
                front.generate("refused")
        shed = pb.EVENT_KIND_REQUESTS_SHED
        eventually(lambda: sum(answer.event.count for answer in watch(front, kinds=[shed])) == 5)
        assert len(watch(front, kinds=[shed])) <= 2
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "field"), [({"kinds": [0]}, "kinds"), ({"kinds": [999]}, "kinds"), ({"log_id": "x y"}, "log_id")]
)
def test_a_wrong_question_is_refused(front: Front, fields: dict[str, object], field: str) -> None:
    with pytest.raises(grpc.RpcError, match=field):
        watch(front, **fields)
