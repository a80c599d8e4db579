"""Over the wire: a bad value harms its own call alone, and the answer names the field."""

from collections.abc import Generator
from typing import Any

import grpc
import pytest
from downcore.v1 import generation_pb2 as pb

from tests.front.harness import Front, details_of, running_front, text_of
from tests.front.test_validate import BAD, LIMITS, request_of

NEXT = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[98, 99]), stopping=pb.StoppingParams(max_tokens=2))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    """A front with the limits that the bad values are bad for."""
    engine = ("--vocab", str(LIMITS.vocab_size), "--context", str(LIMITS.max_context_tokens))
    flags = (
        "--max-prompt-bytes", str(LIMITS.max_prompt_bytes), "--max-tokens-limit", str(LIMITS.max_answer_tokens),
    )  # fmt: skip
    with running_front(tmp_path_factory.mktemp("small"), engine, flags) as front:
        yield front


@pytest.mark.parametrize(("field", "values"), BAD)
def test_each_bad_field_is_named_and_the_next_request_works(small: Front, field: str, values: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(small.generation.Generate(request_of(values), timeout=10))
    code = caught.value.code()  # type: ignore[attr-defined]
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    details = details_of(caught.value)
    assert details["ErrorInfo"].domain == "downcore"
    assert details["BadRequest"].field_violations[0].field == field
    assert field in caught.value.details()  # type: ignore[attr-defined]
    assert text_of(small.generation.Generate(NEXT, timeout=10)) == "ab"


def test_a_prompt_of_10_mb_is_refused_and_the_next_request_works(front: Front) -> None:
    for request in (
        pb.GenerateRequest(text="x" * 10_000_000),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 10_000_000)])),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(front.generation.Generate(request, timeout=20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert details_of(caught.value)["ErrorInfo"].reason == "TOO_LARGE"
        assert text_of(front.generate("ok", stopping=pb.StoppingParams(max_tokens=2))) == "ok"


def test_a_message_over_the_transports_limit_is_refused_and_the_next_request_works(front: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(front.generation.Generate(pb.GenerateRequest(text="x" * 17_000_000), timeout=20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert text_of(front.generate("ok", stopping=pb.StoppingParams(max_tokens=2))) == "ok"


@pytest.mark.parametrize(
    ("data", "field"), [(b"\x12\x03ab\xff", "text"), (b"\x22\x07\x0a\x05\x12\x03ab\xff", "chat.messages.content")]
)
def test_text_that_is_no_utf8_is_refused_and_its_field_named(front: Front, data: bytes, field: str) -> None:
    raw = front.channel.unary_stream("/downcore.v1.GenerationService/Generate", request_serializer=bytes)
    with pytest.raises(grpc.RpcError) as caught:
        list(raw(data, timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == field


def test_an_error_shows_no_path_and_no_traceback(front: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        front.generate("x", n=9)
    shown = caught.value.details() or ""  # type: ignore[attr-defined]
    assert shown
    assert "/" not in shown
    assert "Traceback" not in shown


def test_more_open_requests_than_the_limit_are_refused_with_a_time_to_try_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running_front(tmp_path_factory.mktemp("full"), flags=("--max-open-requests", "2")) as front:
        calls = [front.stream(stopping=pb.StoppingParams(max_tokens=100_000)) for _ in range(2)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            front.generate("third")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        details = details_of(caught.value)
        assert details["ErrorInfo"].reason == "QUEUE_FULL"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        for call in calls:
            call.cancel()
