"""Bytes that open requests hold together: bounded, told, and given back whatever becomes of a request."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import cache_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.errors import ErrorReason, RequestError
from daemon.front.held import HeldBytes, Holding
from tests.front.harness import Front, details_of, eventually, ids_of, running_front
from tests.front.scraping import get, metrics_port, values

MOST = 1_000_000
LARGE = "x" * (MOST // 10)  # with its token ids, four bytes each, half of what may be held
LONG = pb.StoppingParams(max_tokens=1 << 19)


def test_what_is_held_is_given_back_once_and_moves_whole() -> None:
    held = HeldBytes(10)
    one, other = Holding(held), Holding(held)
    one.add(8)
    one.add(20)  # alone it may
    with pytest.raises(RequestError) as caught:
        other.add(1)
    assert (caught.value.reason, held.num_bytes) == (ErrorReason.QUEUE_FULL, 28)
    moved = one.move()
    one.release()
    assert held.num_bytes == 28
    moved.release()
    moved.release()
    other.add(10)
    assert held.num_bytes == 10


@pytest.fixture
def narrow(tmp_path: Path) -> Generator[Front]:
    flags = ("--max-held-bytes", str(MOST), "--metrics-tcp", "127.0.0.1:0")
    with running_front(tmp_path, engine=("--max-running", "1", "--tick-s", "0.03"), flags=flags) as front:
        yield front


def held_bytes(front: Front) -> float:
    return values(get(metrics_port(front.log), "/metrics").body, "downcore_held_request_bytes")


def refused(front: Front, **fields: Any) -> str:
    """What a request is told that is refused for want of room, now and not for ever."""
    with pytest.raises(grpc.RpcError) as caught:
        front.generate(**fields)
    details = details_of(caught.value)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert details["ErrorInfo"].reason == "QUEUE_FULL"
    assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    return caught.value.details() or ""  # type: ignore[attr-defined]


def test_requests_that_would_hold_too_much_together_are_refused_and_small_ones_are_not(narrow: Front) -> None:
    running = narrow.stream(LARGE, stopping=LONG)
    next(running)
    waiting = narrow.stream("hello", stopping=LONG)
    eventually(lambda: len(narrow.sequences()) == 2)
    assert held_bytes(narrow) >= 5 * len(LARGE)
    assert f"of at most {MOST}" in refused(narrow, text=LARGE)
    assert f"of at most {MOST}" in refused(narrow, token_ids=pb.TokenIds(ids=ids_of(LARGE) * 2))
    running.cancel()
    next(waiting)
    waiting.cancel()
    eventually(lambda: held_bytes(narrow) == 0)
    assert narrow.generate(LARGE * 5, stopping=pb.StoppingParams(max_tokens=1))[-1].HasField("summary"), "one alone"
    eventually(lambda: held_bytes(narrow) == 0)


def test_a_job_holds_its_prompts_after_its_call_has_ended(narrow: Front) -> None:
    request = cache_pb2.WarmPrefixRequest(key="job", prompts=[cache_pb2.Prompt(text=LARGE)], detached=True)
    call = narrow.cache.WarmPrefix(request, timeout=20)
    assert next(call).HasField("started")
    call.cancel()
    assert held_bytes(narrow) >= 5 * len(LARGE)
    assert list(narrow.cache.WarmPrefix(request, timeout=20))[-1].HasField("receipt")
    eventually(lambda: held_bytes(narrow) == 0)
