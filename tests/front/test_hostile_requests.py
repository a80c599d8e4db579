"""What a request of the largest size may cost: little time before it is refused, and no memory after."""

import asyncio
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.errors import ErrorReason, RequestError
from daemon.front import guard, status
from daemon.front import tokenizer_messages as tm
from daemon.front.access import GENERATION
from daemon.front.caller import local_principal
from daemon.front.door import Door
from daemon.front.guard import Guard
from daemon.front.held import HeldBytes
from daemon.front.limits import Uses
from daemon.front.service import methods_of
from daemon.front.tokenizer_worker import Worker
from daemon.front.validate import NO_LIMITS, WATCH_EVENTS, check
from daemon.front.wire import Malformed, parser
from tests.front.harness import Front, details_of, write_model_folder

MANY = 5_000_000  # fields that fit into a message
UNKNOWN_FIELD = b"\x98\x06\x01"  # number 99, a varint
CLIENT_METADATA_BYTES = 8 << 10  # what gRPC clients take of headers or trailers, unless told otherwise


def cpu_s(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


@pytest.mark.parametrize(
    "field", [UNKNOWN_FIELD, b"\x9a\x06\x00", b"\x32\x02\x1a\x00"], ids=["varint", "bytes", "stop"]
)
def test_a_malformed_request_of_millions_of_fields_is_refused_at_once(field: bytes) -> None:
    data = field * (MANY * 3 // len(field)) + b"\xff"
    parse = parser(pb.GenerateRequest)
    assert parse(data) == Malformed("")
    assert cpu_s(lambda: parse(data)) < 1.0  # all of them, one by one, take four


def test_the_field_that_is_no_utf8_is_named_behind_thousands_of_others() -> None:
    data = UNKNOWN_FIELD * 5_000 + b"\x12\x03ab\xff"
    assert parser(pb.GenerateRequest)(data) == Malformed("text")


def test_a_rule_of_few_entries_reads_none_of_millions() -> None:
    request = admin_pb2.WatchEventsRequest.FromString(b"\x22\x80\xad\xe2\x04" + b"\x01" * 10_000_000)
    with pytest.raises(RequestError) as caught:
        check(request, WATCH_EVENTS, NO_LIMITS)
    assert caught.value.field == "kinds"


class Request:
    """A parsed request that can be watched."""


class Refusing:
    """A servicer that refuses whatever it is asked, by way of another error."""

    async def Generate(self, request: Any, context: Any) -> None:
        try:
            raise ValueError("within")
        except ValueError as error:
            raise RequestError(ErrorReason.INVALID_ARGUMENT, "no") from error

    Tokenize = Abort = Generate


def requests_left(method: str) -> int:
    """How many of eight refused requests are still in memory, with the collector off."""
    seen: list[weakref.ref[Request]] = []

    def parse(data: bytes) -> Any:
        request = Request()
        seen.append(weakref.ref(request))
        return request

    async def body() -> int:
        server = grpc.aio.server()
        methods = {path: replace(served, parse=parse) for path, served in methods_of(GENERATION, Refusing()).items()}
        door = Door(None, local_principal("n"), sees_certificates=False)
        server.add_generic_rpc_handlers((Guard(methods, door, Uses(HeldBytes(1 << 30)), Counter(), Counter()),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(8):
                call: Any = channel.stream_stream(f"/{GENERATION}/{method}")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    [response async for response in call(iter((b"",)), timeout=5)]
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await server.stop(0)
        return sum(ref() is not None for ref in seen)

    gc.collect()
    gc.disable()
    try:
        left = asyncio.run(body())
    finally:
        gc.enable()
    assert len(seen) == 8
    return left


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_a_refused_requests_memory_is_returned_without_the_collector(method: str) -> None:
    assert requests_left(method) == 0


@pytest.mark.parametrize("text", ["x" * 5_000, "é" * 5_000, "\U0001f600" * 5_000, "\ud800" * 5_000])
def test_a_status_fits_into_the_trailers_that_clients_take(text: str) -> None:
    made = status.status_of(RequestError(ErrorReason.INVALID_ARGUMENT, text, field="structured_output.json_schema"))
    message = made.message.encode()
    percent = sum(1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in message)
    assert percent + len(made.SerializeToString()) * 4 // 3 < CLIENT_METADATA_BYTES // 2
    assert made.message.startswith("structured_output.json_schema: ")


def test_a_method_that_there_is_not_is_answered_from_the_catalogue(front: Front) -> None:
    for path in ("/downcore.v1.GenerationService/Nothing", "/../../etc/passwd", "/x", f"/{'a' * 4000}/b"):
        with pytest.raises(grpc.RpcError) as caught:
            front.channel.unary_unary(path)(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        assert details_of(caught.value)["ErrorInfo"].reason == "UNIMPLEMENTED"


def test_a_call_without_a_request_is_answered(front: Front) -> None:
    for method in ("Generate", "Tokenize", "Abort"):
        call = front.channel.stream_stream(f"/{GENERATION}/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter(()), timeout=10))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert details_of(caught.value)["ErrorInfo"].reason == "INVALID_ARGUMENT"


def test_a_request_that_never_comes_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_READ_S", 0.1)

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def abort(code: grpc.StatusCode, *_: Any, **__: Any) -> None:
        codes.append(code)

    codes: list[grpc.StatusCode] = []
    door = Door(None, local_principal("n"), sees_certificates=False)
    uses = Uses(HeldBytes(1 << 30))
    made = Guard(methods_of(GENERATION, Refusing()), door, uses, Counter(), Counter())
    handler = made.service(SimpleNamespace(method=f"/{GENERATION}/Abort", invocation_metadata=()))
    context = SimpleNamespace(read=never, write=None, abort=abort, invocation_metadata=lambda: ())
    asyncio.run(handler.stream_unary(None, context))
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert [use.num_requests for use in uses.by_name.values()] == [0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.nothing.more }}",
        "{{ 1 // 0 }}",
        "{{ 9 ** 9 ** 9 % 7 if false else [1] | sum(start='x') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception() }}",
        "{{ lipsum.__globals__.os.popen('id').read() }}",
        "{{ '\\ud800' }}",
        "{{ cycler().next() }}",
        "{% for a in range(10 ** 9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{{ messages | map(attribute='content') | first | format(1, 2) }}{{ '%d' | format('x') }}",
        "{{ ('%99999999999d' | format(1)) }}",
        "{{ self._TemplateReference__context.eval_ctx.environment.from_string('x').render() }}",
    ],
)
def test_whatever_a_template_does_its_worker_answers_and_goes_on(tmp_path: Path, template: str) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    worker = Worker(folder)
    reply = worker.reply(tm.EncodeChat((tm.Turn("user", "hi"),), 1 << 20))
    assert isinstance(reply, tm.Failed), reply
    assert "/" not in reply.message
    assert isinstance(worker.reply(tm.EncodeText("hi")), tm.Encoded)
