"""The table of rules: each field has its bounds, and a complaint names the field."""

import math
from typing import Any

import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.errors import ErrorReason, RequestError
from daemon.front import validate
from daemon.front.wire import Malformed, parser

LIMITS = validate.Limits(vocab_size=100, max_context_tokens=50, max_answer_tokens=40, max_prompt_bytes=1000)
NAN, INF = math.nan, math.inf
BAD: list[tuple[str, dict[str, Any]]] = [
    ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "x" * 129}),
    ("request_id", {"request_id": "a~1"}),
    ("n", {"n": 0}),
    ("n", {"n": 9}),
    ("n", {"n": 1_000_000}),
    ("token_ids.ids", {"token_ids": pb.TokenIds()}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[1, 100])}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[2**32 - 1])}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[1] * 50)}),
    ("text", {"text": ""}),
    ("text", {"text": "x" * 1001}),
    ("text", {"text": "é" * 501}),
    ("chat.messages", {"chat": pb.Chat()}),
    ("chat.messages", {"chat": pb.Chat(messages=[pb.ChatMessage(content="x")])}),
    ("chat.messages", {"chat": pb.Chat(messages=[pb.ChatMessage(role="r" * 65)])}),
    ("chat.messages", {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 1001)])}),
    ("chat.messages", {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")] * 4097)}),
    *(("sampling.temperature", {"sampling": {"temperature": v}}) for v in (-0.1, 100.5, NAN, INF, -INF)),
    ("sampling.top_k", {"sampling": {"top_k": 101}}),
    *(("sampling.top_p", {"sampling": {"top_p": v}}) for v in (0.0, -1.0, 1.01, NAN)),
    *(("sampling.min_p", {"sampling": {"min_p": v}}) for v in (-0.01, 1.01, NAN)),
    *(("sampling.typical_p", {"sampling": {"typical_p": v}}) for v in (0.0, 1.01, NAN)),
    *(("sampling.repetition_penalty", {"sampling": {"repetition_penalty": v}}) for v in (0.0, -1.0, 10.1, NAN, INF)),
    *(("sampling.presence_penalty", {"sampling": {"presence_penalty": v}}) for v in (-2.1, 2.1, NAN)),
    *(("sampling.frequency_penalty", {"sampling": {"frequency_penalty": v}}) for v in (-2.1, 2.1, NAN)),
    *(("sampling.logit_bias", {"sampling": {"logit_bias": {5: v}}}) for v in (-100.5, 100.5, NAN, INF)),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {100: 1.0}}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": dict.fromkeys(range(1025), 0.0)}}),
    ("sampling.top_logprobs", {"sampling": {"logprobs": True, "top_logprobs": 21}}),
    ("sampling.top_logprobs", {"sampling": {"top_logprobs": 2}}),
    ("structured_output", {"structured_output": {}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": ""}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": "x" * 65537}}),
    ("structured_output.regex", {"structured_output": {"regex": "é" * 40000}}),
    ("structured_output.grammar", {"structured_output": {"grammar": ""}}),
    ("structured_output.choice.values", {"structured_output": {"choice": {}}}),
    ("structured_output.choice.values", {"structured_output": {"choice": {"values": ["a", ""]}}}),
    ("structured_output.choice.values", {"structured_output": {"choice": {"values": ["a"] * 1025}}}),
    ("structured_output.choice.values", {"structured_output": {"choice": {"values": ["x" * 40000] * 2}}}),
    ("stopping.max_tokens", {"stopping": {"max_tokens": 0}}),
    ("stopping.max_tokens", {"stopping": {"max_tokens": 41}}),
    ("stopping.min_tokens", {"stopping": {"min_tokens": 41}}),
    ("stopping.min_tokens", {"stopping": {"max_tokens": 3, "min_tokens": 4}}),
    ("stopping.stop", {"stopping": {"stop": [""]}}),
    ("stopping.stop", {"stopping": {"stop": ["é" * 129]}}),
    ("stopping.stop", {"stopping": {"stop": ["x"] * 17}}),
    ("stopping.stop_token_ids", {"stopping": {"stop_token_ids": [100]}}),
    ("stopping.stop_token_ids", {"stopping": {"stop_token_ids": [1] * 65}}),
    *(("namespace", {"namespace": v}) for v in ("/", "a/", "/a", "a//b", "a b", "ä", "x" * 129)),
]
TOO_LARGE = {
    "text",
    "chat.messages",
    *(f"structured_output.{form}" for form in ("json_schema", "regex", "grammar", "choice.values")),
}


def request_of(values: dict[str, Any]) -> pb.GenerateRequest:
    if not {"text", "token_ids", "chat"} & set(values):
        values = {**values, "text": "hello"}
    return pb.GenerateRequest(**values)


@pytest.mark.parametrize(("field", "values"), BAD)
def test_a_bad_value_is_refused_and_its_field_named(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        validate.check(request_of(values), validate.GENERATE, LIMITS)
    assert caught.value.field == field
    allowed = {ErrorReason.INVALID_ARGUMENT, ErrorReason.CONTEXT_TOO_LONG}
    if field in TOO_LARGE:
        allowed.add(ErrorReason.TOO_LARGE)
    assert caught.value.reason in allowed


def test_every_rule_of_generate_has_a_bad_value_here() -> None:
    assert {rule.field for rule in validate.GENERATE} - {field for field, _ in BAD} == {"prompt"}


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        validate.check(pb.GenerateRequest(), validate.GENERATE, LIMITS)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"n": 8, "request_id": "A.b_c-9"},
        {"token_ids": pb.TokenIds(ids=[99] * 49)},
        {"text": "x" * 1000},
        {
            "sampling": {
                "temperature": 0, "top_k": 100, "top_p": 1, "min_p": 1, "typical_p": 1, "repetition_penalty": 10,
                "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {99: -100}, "seed": 2**64 - 1,
                "logprobs": True, "top_logprobs": 20,
            }
        },
        {"stopping": {"max_tokens": 40, "min_tokens": 40, "stop": ["x" * 256] * 16, "stop_token_ids": [99] * 64}},
    ],
)  # fmt: skip
def test_values_at_their_bounds_pass(values: dict[str, Any]) -> None:
    validate.check(request_of(values), validate.GENERATE, LIMITS)


@pytest.mark.parametrize(
    ("request_", "rules", "field"),
    [
        (admin_pb2.WatchTiersRequest(interval_s=0.05), validate.WATCH_TIERS, "interval_s"),
        (admin_pb2.WatchTiersRequest(interval_s=NAN), validate.WATCH_TIERS, "interval_s"),
        (admin_pb2.DrainRequest(timeout_s=-1), validate.DRAIN, "timeout_s"),
        (admin_pb2.DrainRequest(timeout_s=INF), validate.DRAIN, "timeout_s"),
        (admin_pb2.AbortSequenceRequest(id=""), validate.ABORT_SEQUENCE, "id"),
        (admin_pb2.AbortSequenceRequest(id="a/b"), validate.ABORT_SEQUENCE, "id"),
        (admin_pb2.ListSequencesRequest(id="a/0/1"), validate.LIST_SEQUENCES, "id"),
        (pb.AbortRequest(), validate.ABORT, "request_id"),
        (pb.TokenizeRequest(text=""), validate.TOKENIZE, "text"),
        (pb.TokenizeRequest(), validate.TOKENIZE, "prompt"),
    ],
)
def test_the_other_methods_have_rules_too(request_: Any, rules: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate.check(request_, rules, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x0a\x02\xff\xfe", "request_id"),
        (b"\x12\x03ab\xff", "text"),
        (b"\x22\x07\x0a\x05\x12\x03ab\xff", "chat.messages.content"),
        (b"\x32\x04\x1a\x02\xc3\x28", "stopping.stop"),
        (b"\x12\x7fshort", ""),
        (b"\xff\xff\xff", ""),
    ],
)
def test_bytes_that_are_no_request_become_a_value_that_names_the_field(data: bytes, field: str) -> None:
    parsed = parser(pb.GenerateRequest)(data)
    assert isinstance(parsed, Malformed)
    assert parsed.field == field
    assert parsed.error().reason is ErrorReason.INVALID_ARGUMENT
