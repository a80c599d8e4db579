"""Every field of a gateway's request is translated, refused by its name, or about text, which the gateway makes."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from downcore.v1 import generation_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from daemon.errors import ErrorReason, RequestError
from daemon.front.vllm.translate import Answer, renamed, to_generate

ABOUT_TEXT = {
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "grammar_from_first_token",
}  # fmt: skip
OF_TRANSPORT = {"stream"}  # says how the answer is sent


def filled(message_type: Any, name: str) -> Any:
    """A message in which this field alone is set, to something that is no default."""
    message = message_type()
    descriptor = message_type.DESCRIPTOR.fields_by_name[name]
    field = getattr(message, name)
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        field[3] = 1.5
    elif descriptor.is_repeated:
        if descriptor.message_type is not None:
            field.add()
        else:
            field.append("x" if descriptor.type == FieldDescriptor.TYPE_STRING else 3)
    elif descriptor.message_type is not None:
        field.SetInParent()
    else:
        setattr(
            message, name, {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BOOL: True}.get(descriptor.type, 3)
        )
    return message


def outcome(make: Callable[[], pb.GenerateRequest]) -> pb.GenerateRequest | str:
    """What a request becomes, or the field that it is refused for."""
    try:
        return make()
    except RequestError as error:
        return error.field if error.reason is ErrorReason.INVALID_ARGUMENT else error.reason


@pytest.mark.parametrize("name", [field.name for field in vllm.SamplingParams.DESCRIPTOR.fields])
def test_every_sampling_field_is_translated_or_refused_by_name(name: str) -> None:
    found = outcome(lambda: to_generate(vllm.GenerateRequest(sampling_params=filled(vllm.SamplingParams, name))))
    is_ignored = found == to_generate(vllm.GenerateRequest(sampling_params=vllm.SamplingParams()))
    assert is_ignored == (name in ABOUT_TEXT)
    if isinstance(found, str):
        assert found == f"sampling_params.{name}"


@pytest.mark.parametrize("name", sorted(set(vllm.GenerateRequest.DESCRIPTOR.fields_by_name) - {"sampling_params"}))
def test_every_request_field_is_translated_or_refused_by_name(name: str) -> None:
    found = outcome(lambda: to_generate(filled(vllm.GenerateRequest, name)))
    assert (found == to_generate(vllm.GenerateRequest())) == (name in OF_TRANSPORT)
    if isinstance(found, str):
        assert found == name


def test_values_arrive_as_they_were_meant() -> None:
    sampling = vllm.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[4, 5], ignore_eos=True,
        n=3, logprobs=2, seed=11, logit_bias={6: -1.5},
    )  # fmt: skip
    tokenized = vllm.TokenizedInput(input_ids=[1, 2, 3], original_text="never read")
    got = to_generate(vllm.GenerateRequest(request_id="r", tokenized=tokenized, sampling_params=sampling))
    assert got == pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(
            temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
            repetition_penalty=1.5, logprobs=True, top_logprobs=2, seed=11, logit_bias={6: -1.5},
        ),
        stopping=pb.StoppingParams(
            max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[4, 5], ignore_eos=True
        ),
        n=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "structure"),
    [
        (vllm.SamplingParams(json_schema="{}"), pb.StructuredOutput(json_schema="{}")),
        (vllm.SamplingParams(regex="a+"), pb.StructuredOutput(regex="a+")),
        (vllm.SamplingParams(grammar="start: x"), pb.StructuredOutput(grammar="start: x")),
        (vllm.SamplingParams(json_object=True), pb.StructuredOutput(json_object=pb.JsonObject())),
        (
            vllm.SamplingParams(choice=vllm.ChoiceConstraint(choices=["a", "b"])),
            pb.StructuredOutput(choice=pb.Choices(values=["a", "b"])),
        ),
    ],
)
def test_a_constraint_is_a_structure(sampling: vllm.SamplingParams, structure: pb.StructuredOutput) -> None:
    assert to_generate(vllm.GenerateRequest(sampling_params=sampling)).structured_output == structure
    none = to_generate(vllm.GenerateRequest(sampling_params=vllm.SamplingParams(json_object=False)))
    assert not none.HasField("structured_output")


def test_absent_values_are_left_to_their_defaults() -> None:
    got = to_generate(vllm.GenerateRequest(text="t", sampling_params=vllm.SamplingParams()))
    for name in ("temperature", "top_p", "repetition_penalty", "seed"):
        assert not got.sampling.HasField(name)
    assert not got.sampling.logprobs
    assert not got.stopping.HasField("max_tokens")
    assert not got.HasField("n")
    assert got.text == "t"


def test_zero_logprobs_are_those_of_the_chosen_tokens_alone() -> None:
    got = to_generate(vllm.GenerateRequest(sampling_params=vllm.SamplingParams(logprobs=0, temperature=0)))
    assert (got.sampling.logprobs, got.sampling.top_logprobs) == (True, 0)
    assert got.sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (vllm.SamplingParams(logprobs=-1), "logprobs"),
        (vllm.SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (vllm.SamplingParams.FromString(b"\xc8\x01\x01\xe8\x07\x01"), "125"),
    ],
)
def test_what_cannot_be_said_here_is_refused_by_name(sampling: vllm.SamplingParams, field: str) -> None:
    assert outcome(lambda: to_generate(vllm.GenerateRequest(sampling_params=sampling))) == f"sampling_params.{field}"


def test_a_rank_that_is_not_there_is_refused() -> None:
    assert outcome(lambda: to_generate(vllm.GenerateRequest(data_parallel_rank=1))) == "data_parallel_rank"
    assert isinstance(outcome(lambda: to_generate(vllm.GenerateRequest(data_parallel_rank=0))), pb.GenerateRequest)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.top_p", "sampling_params.top_p"), ("stopping.max_tokens", "sampling_params.max_tokens"),
        ("sampling.top_logprobs", "sampling_params.logprobs"), ("n", "sampling_params.n"),
        ("structured_output.regex", "sampling_params.regex"), ("structured_output", "sampling_params"),
        ("token_ids.ids", "tokenized.input_ids"), ("text", "text"), ("request_id", "request_id"), ("", ""),
    ],
)  # fmt: skip
def test_errors_name_the_gateways_field(ours: str, theirs: str) -> None:
    error = renamed(RequestError(ErrorReason.QUEUE_FULL, "why", field=ours, retry_after_s=2.0))
    assert (error.reason, error.message, error.field, error.retry_after_s) == (
        ErrorReason.QUEUE_FULL, "why", theirs, 2.0,
    )  # fmt: skip


def position(token_id: int, *top: int) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=token_id, logprob=-0.5),
        top=[pb.TokenLogprob(token_id=other, logprob=-1.0 - other) for other in top],
    )


def events(end: pb.GenerateFinished) -> list[pb.GenerateResponse]:
    started = pb.GenerateStarted(prompt_tokens=5, cached_tokens=pb.CachedTokens(device=1, host=2, disk=4))
    chunks = [
        pb.GenerateChunk(index=1, text="a", token_ids=[7, 8], logprobs=[position(7, 3, 4), position(8, 5, 6)]),
        pb.GenerateChunk(index=1, text="only text"),
        pb.GenerateChunk(index=1, token_ids=[9], logprobs=[position(9, 1, 2)]),
    ]
    return [
        pb.GenerateResponse(started=started),
        *(pb.GenerateResponse(chunk=chunk) for chunk in chunks),
        pb.GenerateResponse(finished=end),
        pb.GenerateResponse(summary=pb.GenerateSummary()),
    ]


def translated(end: pb.GenerateFinished, *, is_stream: bool) -> list[vllm.GenerateResponse]:
    answer = Answer(is_stream=is_stream, eos_token_ids=(0,))
    return [message for event in events(end) if (message := answer.take(event)) is not None]


def test_a_stream_is_its_new_tokens_and_an_end_without_any() -> None:
    end = pb.GenerateFinished(index=1, reason=pb.FINISH_REASON_STOP, stop_string="s", completion_tokens=3)
    first, second, last = translated(end, is_stream=True)
    assert (list(first.chunk.token_ids), first.chunk.completion_tokens, first.chunk.index) == ([7, 8], 2, 1)
    assert (first.chunk.prompt_tokens, first.chunk.cached_tokens) == (5, 7)
    assert list(first.chunk.output_logprobs.token_ids) == [7, 8]
    assert list(first.chunk.output_logprobs.token_logprobs) == [-0.5, -0.5]
    assert [list(top.token_ids) for top in first.chunk.output_logprobs.top_logprobs] == [[3, 4], [5, 6]]
    assert list(first.chunk.output_logprobs.top_logprobs[1].values) == [-6.0, -7.0]
    assert list(second.chunk.token_ids) == [9]
    assert not last.complete.output_ids
    assert (last.complete.completion_tokens, last.complete.finish_reason) == (3, "stop")
    assert last.complete.matched_stop_str == "s"
    assert (last.complete.prompt_tokens, last.complete.cached_tokens, last.complete.index) == (5, 7, 1)


def test_without_a_stream_everything_comes_with_the_end() -> None:
    end = pb.GenerateFinished(index=1, reason=pb.FINISH_REASON_STOP, stop_token_id=9, completion_tokens=3)
    (only,) = translated(end, is_stream=False)
    assert list(only.complete.output_ids) == [7, 8, 9]
    assert list(only.complete.output_logprobs.token_ids) == [7, 8, 9]
    assert [list(top.token_ids) for top in only.complete.output_logprobs.top_logprobs] == [[3, 4], [5, 6], [1, 2]]
    assert only.complete.matched_token_id == 9


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (pb.GenerateFinished(index=1, reason=pb.FINISH_REASON_STOP, stop_token_id=0), "stop"),
        (pb.GenerateFinished(index=1, reason=pb.FINISH_REASON_LENGTH), "length"),
        (pb.GenerateFinished(index=1, reason=pb.FINISH_REASON_ABORTED), "abort"),
    ],
)
def test_the_models_own_end_and_limits_match_no_stop(end: pb.GenerateFinished, reason: str) -> None:
    (only,) = translated(end, is_stream=False)
    assert only.complete.finish_reason == reason
    assert only.complete.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("depth", [0, 1])
def test_millions_of_unknown_fields_are_refused_at_once(depth: int) -> None:
    unknown = b"\x98\x7d\x01" * 3_000_000
    request = vllm.GenerateRequest()
    if depth:
        request.sampling_params.MergeFromString(unknown)
    else:
        request.MergeFromString(unknown)
    began_s = time.thread_time()
    with pytest.raises(RequestError) as caught:
        to_generate(request)
    assert time.thread_time() - began_s < 1.0  # as a list they take four
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_more_biases_than_may_be_are_refused_before_they_are_copied() -> None:
    given = vllm.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(RequestError) as caught:
        to_generate(vllm.GenerateRequest(sampling_params=given))
    assert caught.value.field == "sampling_params.logit_bias"
    assert "at most 1024" in caught.value.message
