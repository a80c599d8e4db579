"""Whatever path a client sends, in whatever bytes: it gets an answer, and the server goes on."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from downcore.v1 import generation_pb2 as pb

from tests.front.harness import Front, running_front, text_of
from tests.fuzz import http2

TWO = pb.StoppingParams(max_tokens=2)
UNIMPLEMENTED = b"grpc-status\x0212"
UNCOUNTED = ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


def answer(front: Front, *changed: tuple[bytes, bytes]) -> bytes:
    """What a call gets whose headers are these."""
    headers = tuple({**dict(http2.BASE), **dict(changed)}.items())
    data = (
        http2.PREFACE
        + http2.frame(http2.SETTINGS, 0, 0)
        + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.fields(headers))
        + http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(http2.MESSAGE))
    )
    found = b""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(front.socket))
        peer.sendall(data)
        while b"grpc-status" not in found and (more := peer.recv(1 << 16)):
            found += more
    return found


@pytest.mark.parametrize("path", [b"/\xff\xfe/\x80", b"/downcore.v1.GenerationService/Abort\xff", b"\xc3\x28", b"/a/b"])
def test_a_path_that_is_no_utf8_gets_an_answer_and_the_next_call_works(front: Front, path: bytes) -> None:
    assert b"grpc-status\x010" in answer(front)
    assert UNIMPLEMENTED in answer(front, (b":path", path))
    assert front.process.poll() is None
    assert text_of(front.generate("ok", stopping=TWO)) == "ok"


def test_nothing_that_a_peer_says_is_logged(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(front.socket))
            goaway = http2.frame(http2.GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\1\nSECRET\n\xff")
            peer.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0) + goaway)
            assert peer.recv(1)
        assert b"grpc-status" in answer(front, (b"authorization", b"Bearer SECRET\xff"), (b"x-thing", b"SECRET\xfe"))
        assert b"grpc-status" in answer(front, (b"grpc-timeout", b"SECRET"))
        assert text_of(front.generate("ok", stopping=TWO)) == "ok"
    assert not any("SECRET" in line or "Bearer" in line for line in front.log), front.log


def test_more_calls_than_the_limit_are_refused_and_room_comes_back(tmp_path: Path) -> None:
    async def codes() -> tuple[grpc.StatusCode, grpc.StatusCode]:
        async with grpc.aio.insecure_channel(f"unix:{front.socket}") as channel:
            hold = channel.stream_unary("/downcore.v1.GenerationService/Abort")
            held: list[Any] = [hold() for _ in range(513)]
            await asyncio.gather(*(call.wait_for_connection() for call in held), return_exceptions=True)
            full = await code(channel, grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: held.append(hold()))
            for call in held:
                call.cancel()
            return full, await code(channel, grpc.StatusCode.OK)

    with running_front(tmp_path, flags=("--max-open-requests", "1")) as front:  # and 512 calls of other kinds
        assert asyncio.run(codes()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK)


async def code(
    channel: grpc.aio.Channel, expected: grpc.StatusCode, otherwise: Callable[[], object] = lambda: None
) -> grpc.StatusCode:
    """Of a health check, once it is what it should be. `otherwise` is called where it is not yet.

    A call of somebody else's, such as the one that asks whether the front is ready, may have had a held one's place.
    """
    found = grpc.StatusCode.OK
    for _ in range(200):
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
        found = await call.code()
        if found is expected:
            break
        otherwise()
        await asyncio.sleep(0.02)
    return found


def test_calls_that_count_for_nobody_leave_the_places_of_requests_and_operators(tmp_path: Path) -> None:
    async def hold_all(path: str) -> list[Any]:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{front.socket}"))
        held: list[Any] = [channel.stream_stream(path)() for _ in range(600)]
        await asyncio.wait([asyncio.create_task(call.code()) for call in held], return_when=asyncio.FIRST_COMPLETED)
        return held

    async def body() -> None:
        async with stack:
            held = [await hold_all(path) for path in UNCOUNTED]
            await asyncio.to_thread(front.generate, stopping=pb.StoppingParams(max_tokens=1))
            assert (await asyncio.to_thread(front.info)).model == "scripted"
            for call in held[0]:
                call.cancel()
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{front.socket}"))
            assert await code(channel, grpc.StatusCode.OK) is grpc.StatusCode.OK

    stack = AsyncExitStack()
    with running_front(tmp_path, flags=("--max-open-requests", "1")) as front:
        asyncio.run(body())
