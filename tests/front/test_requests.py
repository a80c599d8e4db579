"""The table of open requests and what one of them sends: by hand serialised chunks, bounds, ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from downcore.v1 import generation_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from daemon import messages
from daemon.config import EngineConfig
from daemon.errors import ErrorReason, RequestError
from daemon.front import chunk_wire, requests
from daemon.front.config import FrontConfig
from daemon.front.generation import GenerationService
from daemon.front.requests import OpenRequest, RequestTable
from daemon.front.text import TokenTable
from daemon.front.wire_ids import client_name

USAGE = messages.Usage(3, 1, 0, 0, 0.1, 0.2, 0.3)
TOKENS = TokenTable([bytes((i,)) for i in range(128)])


def in_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def opened(table: RequestTable, n: int = 1, stops: tuple[str, ...] = ()) -> OpenRequest:
    request = table.open("", "default", 0.0)
    request.expect(n, stops, 0, TOKENS)
    return request


def parsed(taken: list[pb.GenerateResponse | bytes]) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse.FromString(r) if isinstance(r, bytes) else r for r in taken]


@given(
    st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True),
    st.integers(0, 7),
    st.text(max_size=300),
    st.lists(st.integers(0, 2**31 - 1), max_size=200),
    st.lists(st.floats(-50, 0, width=32), max_size=5),
)
def test_a_chunk_written_by_hand_is_what_protobuf_reads(
    request_id: str, index: int, text: str, token_ids: list[int], logprobs: list[float]
) -> None:
    positions = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=7, logprob=v, token=b"x")) for v in logprobs]
    parts = [position.SerializeToString() for position in positions]
    data = chunk_wire.request_id_field(request_id) + chunk_wire.chunk_field(index, text, token_ids, parts)
    expected = pb.GenerateResponse(
        request_id=request_id,
        chunk=pb.GenerateChunk(index=index, text=text, token_ids=token_ids, logprobs=positions),
    )
    assert pb.GenerateResponse.FromString(data) == expected


@pytest.mark.parametrize("text", ["", "a", "é" * 50, "a" * 101, "a" * 127, "a" * 200])
@pytest.mark.parametrize("token_id", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 2**31 - 1])
def test_a_chunk_of_one_token_is_written_to_the_byte_as_protobuf_does(text: str, token_id: int) -> None:
    data = chunk_wire.request_id_field("r-1") + chunk_wire.chunk_field(0, text, [token_id], [])
    chunk = pb.GenerateChunk(text=text, token_ids=[token_id])
    assert data == pb.GenerateResponse(request_id="r-1", chunk=chunk).SerializeToString()


def test_tokens_that_pile_up_are_sent_as_one_chunk() -> None:
    async def body() -> None:
        table = RequestTable(4)
        request = opened(table)
        request.start(USAGE)
        for token_id in b"abc":
            request.add(messages.Token(request.wire_id, 0, token_id), False, 1.0)
        started, chunk = parsed(request.take("m", 5))
        assert started.started.cached_tokens.device == 1
        assert (chunk.chunk.text, list(chunk.chunk.token_ids)) == ("abc", list(b"abc"))
        assert request.take("m", 5) == []
        table.check()

    in_loop(body)


def test_without_coalescing_each_token_that_waits_has_a_chunk_of_its_own() -> None:
    async def body() -> None:
        table = RequestTable(4, coalesces=False)
        request = opened(table, n=2)
        request.start(USAGE)
        for token_id in b"ab":
            for index in range(2):
                request.add(messages.Token(request.wire_id, index, token_id + index), False, 1.0)
        request.finish(messages.Finished(request.wire_id, 1, messages.StopReason.LENGTH, 2))
        started, *chunks, finished = parsed(request.take("m", 5))
        assert started.HasField("started")
        said = [(c.chunk.index, c.chunk.text, list(c.chunk.token_ids)) for c in chunks]
        for index, expected in enumerate((["a", "b"], ["b", "c"])):
            own = [(text, ids) for i, text, ids in said if i == index]
            assert own == [(char, [ord(char)]) for char in expected]
        assert (finished.finished.index, finished.finished.completion_tokens) == (1, 2)
        assert request.take("m", 5) == []
        assert request.buffered_bytes == 0

    in_loop(body)


def test_a_buffer_over_its_bound_fails_its_request_and_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_BUFFERED_BYTES", 10 * requests.ID_BYTES + 10)

    async def body() -> None:
        table = RequestTable(4)
        request = opened(table)
        for _ in range(11):
            request.add(messages.Token(request.wire_id, 0, 97), False, 1.0)
        assert request.buffered_bytes == 0
        with pytest.raises(RequestError) as caught:
            await request.wait()
        assert caught.value.reason is ErrorReason.READER_STALLED
        table.check()

    in_loop(body)


def test_a_token_after_the_stop_string_is_dropped() -> None:
    async def body() -> None:
        table = RequestTable(4)
        request = opened(table, stops=("b",))
        told = [request.add(messages.Token(request.wire_id, 0, i), False, 1.0) for i in b"abcd"]
        assert told == [None, messages.StopSequence(request.wire_id, 0, 2), None, None]
        request.finish(messages.Finished(request.wire_id, 0, messages.StopReason.STOP_STRING, 2))
        chunk, finished = parsed(request.take("m", 5))
        assert (chunk.chunk.text, list(chunk.chunk.token_ids)) == ("a", list(b"ab"))
        assert finished.finished.stop_string == "b"
        assert request.all_sent

    in_loop(body)


def test_an_id_used_again_is_another_request_to_the_engine() -> None:
    async def body() -> None:
        table = RequestTable(4)
        first = table.open("same", "default", 0.0)
        table.close(first)
        second = table.open("same", "default", 0.0)
        assert first.wire_id != second.wire_id
        assert client_name(first.wire_id).name == client_name(second.wire_id).name == "same"
        assert table.find_wire(first.wire_id) is None
        assert table.find_wire(second.wire_id) is second
        table.check()

    in_loop(body)


def test_made_up_ids_avoid_those_in_use() -> None:
    async def body() -> None:
        table = RequestTable(8)
        table.open("r-2", "default", 0.0)
        names = {table.open("", "default", 0.0).request_id for _ in range(3)}
        assert len(names) == 3
        assert "r-2" not in names
        table.check()

    in_loop(body)


def test_waiting_for_idle_ends_with_the_last_request_or_with_its_time() -> None:
    async def body() -> None:
        table = RequestTable(4)
        request = opened(table)
        assert not await table.wait_idle(0.01)
        waiting = asyncio.create_task(table.wait_idle(10))
        await asyncio.sleep(0)
        table.close(request)
        assert await waiting

    in_loop(body)


def test_a_request_that_fails_while_its_client_reads_is_no_stalled_reader() -> None:
    async def body() -> None:
        table = RequestTable(4)
        config = FrontConfig(engine=EngineConfig(model_path="none"), stall_timeout_s=60.0)
        nothing: Any = None  # of supervisor, prompts and tokens: they have no part in this
        service = GenerationService(config, table, nothing, nothing, nothing)
        slow, failed, stalled = (opened(table) for _ in range(3))
        now_s = asyncio.get_running_loop().time()
        slow.write_began_s = failed.write_began_s = now_s
        stalled.write_began_s = now_s - 61.0
        failed.fail(RequestError(ErrorReason.ENGINE_UNAVAILABLE, "the engine has died"))
        assert service.end_stalled() == 1
        assert [request.error and request.error.reason for request in (slow, failed, stalled)] == [
            None, ErrorReason.ENGINE_UNAVAILABLE, ErrorReason.READER_STALLED,
        ]  # fmt: skip

    in_loop(body)
