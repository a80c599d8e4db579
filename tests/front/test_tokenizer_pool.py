"""What a model folder's template does to its worker stays there: the request fails alone, the next one works."""

from collections.abc import Generator

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from tests.front.harness import Front, details_of, eventually, running_front, text_of


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with running_front(tmp_path_factory.mktemp("impatient"), flags=("--tokenizer-timeout-s", "0.5")) as front:
        yield front


def chat(content: str, role: str = "user") -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content)])


def next_works(front: Front) -> bool:
    return text_of(front.generate(chat=chat("hi"), stopping=pb.StoppingParams(max_tokens=8))) == "<user>hi"


def test_a_template_that_never_ends_is_killed_and_its_request_fails_alone(impatient: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        impatient.generate(chat=chat("hang"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    details = details_of(caught.value)
    assert details["ErrorInfo"].reason == "TOKENIZER_TIMEOUT"
    assert details["BadRequest"].field_violations[0].field == "chat"
    assert any("tokenizer worker replaced" in line for line in impatient.log)
    assert next_works(impatient)


def test_a_template_that_eats_memory_fails_and_the_next_request_works(impatient: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        impatient.generate(chat=chat("grow"))
    assert details_of(caught.value)["ErrorInfo"].reason == "INVALID_ARGUMENT"
    assert next_works(impatient)


def test_a_template_cannot_reach_out_of_its_sandbox(impatient: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        impatient.generate(chat=chat("escape"))
    assert details_of(caught.value)["ErrorInfo"].reason == "INVALID_ARGUMENT"
    assert "unsafe" in caught.value.details()  # type: ignore[attr-defined]
    assert next_works(impatient)


def test_a_templates_own_refusal_reaches_the_client(impatient: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        impatient.generate(chat=chat("hi", role="stranger"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "no strangers" in caught.value.details()  # type: ignore[attr-defined]
    assert next_works(impatient)


def test_abort_reaches_a_request_that_is_being_tokenized(impatient: Front) -> None:
    call = impatient.stream(request_id="stuck", chat=chat("hang"), timeout=10)
    eventually(lambda: impatient.generation.Abort(pb.AbortRequest(request_id="stuck"), timeout=5).found)
    got = list(call)
    assert [response.WhichOneof("event") for response in got] == ["finished", "summary"]
    assert got[0].finished.reason == pb.FINISH_REASON_ABORTED
    assert next_works(impatient)


def test_a_choice_that_is_aborted_before_the_engine_has_it_is_not_made(impatient: Front) -> None:
    busy = impatient.stream(request_id="busy", chat=chat("hang"))
    eventually(lambda: is_open(impatient, "busy"))
    call = impatient.stream("abcd", request_id="pair", n=2, stopping=pb.StoppingParams(stop=["bcdabc"]))
    eventually(lambda: is_open(impatient, "pair"))
    assert impatient.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="pair/0"), timeout=5).aborted == 1
    with pytest.raises(grpc.RpcError):
        list(busy)
    got = list(call)
    ends = {r.finished.index: r.finished for r in got if r.HasField("finished")}
    assert (ends[0].reason, ends[0].completion_tokens) == (pb.FINISH_REASON_ABORTED, 0)
    assert (ends[1].reason, ends[1].stop_string) == (pb.FINISH_REASON_STOP, "bcdabc")
    assert got[-1].summary.usage.completion_tokens == ends[1].completion_tokens
    eventually(lambda: not impatient.sequences())


def is_open(front: Front, request_id: str) -> bool:
    """The request is on the table; nothing of it is ended by asking."""
    with pytest.raises(grpc.RpcError) as caught:
        front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id=f"{request_id}/7"), timeout=5)
    return "no running sequence" in caught.value.details()  # type: ignore[attr-defined]
