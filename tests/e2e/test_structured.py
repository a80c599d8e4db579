"""Structured output from the wire to the weights and back: the model knows nothing, so that only masks make sense."""

import json
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from ops.cli.main import run
from tests.campaigns.budget import first_seed
from tests.campaigns.structures import Fuzz
from tests.e2e.daemon import TINY_FLAGS, Daemon, running, tiny_model, tokens_of
from tests.engine.schemas import has_schema
from tests.front.harness import details_of, eventually, text_of
from tests.front.hostile import hostile_structures, recursive_but_sound
from tests.ops.commands import check_command, commands_in

PAGE = Path(__file__).parents[2] / "ops" / "docs" / "structured-output.md"
PROMPT = pb.TokenIds(ids=[1 + (i * i) % 250 for i in range(100)])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("d")
    flags = (*TINY_FLAGS, "--pool-bytes", str(16 << 20), "--grammar-timeout-s", "1")
    with running(folder, tiny_model(folder / "model"), *flags) as daemon:
        yield daemon


def answers(daemon: Daemon, structure: pb.StructuredOutput, **fields: Any) -> list[pb.GenerateResponse]:
    options: dict[str, Any] = {
        "sampling": pb.SamplingParams(seed=1),
        "stopping": pb.StoppingParams(max_tokens=400),
        **fields,
    }
    return daemon.generate(token_ids=PROMPT, structured_output=structure, **options)


def reasons_of(responses: list[pb.GenerateResponse]) -> dict[int, pb.GenerateFinished]:
    return {r.finished.index: r.finished for r in responses if r.HasField("finished")}


def test_eight_answers_have_the_schema_and_report_what_was_allowed(daemon: Daemon) -> None:
    sampling = pb.SamplingParams(seed=5, temperature=1.5, logprobs=True, top_logprobs=20)
    responses = answers(daemon, pb.StructuredOutput(json_schema=json.dumps(SCHEMA)), n=8, sampling=sampling)
    texts = [text_of(responses, index) for index in range(8)]
    assert all(has_schema(json.loads(text), SCHEMA) for text in texts), texts
    assert len(set(texts)) == 8
    ended = reasons_of(responses)
    assert all(end.reason == pb.FINISH_REASON_STOP and end.stop_token_id == 0 for end in ended.values())
    positions = [position for r in responses if r.HasField("chunk") for position in r.chunk.logprobs]
    assert len(positions) == sum(end.completion_tokens for end in ended.values())
    for position in positions:
        assert all(math.isfinite(top.logprob) for top in position.top)
        assert sum(math.exp(top.logprob) for top in position.top) <= 1 + 1e-4
    first = next(r.chunk.logprobs[0] for r in responses if r.HasField("chunk"))
    assert (first.chosen.token, len(first.top)) == (b"{", 1)


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        (pb.StructuredOutput(regex="[a-c]{3}-[0-9]{2}"), r"[a-c]{3}-[0-9]{2}"),
        (pb.StructuredOutput(grammar='start: pair ("," pair)?\npair: /[xy]/ "=" /[01]+/'), r"[xy]=[01]+(,[xy]=[01]+)?"),
        (pb.StructuredOutput(choice=pb.Choices(values=['say "hi"\\', "日本", "a|b"])), r'say "hi"\\|日本|a\|b'),
        (recursive_but_sound(), ""),
    ],
)
def test_each_form_is_followed_to_its_end(daemon: Daemon, structure: pb.StructuredOutput, expected: str) -> None:
    for seed in range(4):
        responses = answers(daemon, structure, sampling=pb.SamplingParams(seed=seed))
        text = text_of(responses)
        if structure.WhichOneof("structure") == "json_schema":
            assert isinstance(json.loads(text), dict)
        else:
            assert re.fullmatch(expected, text), text
        assert reasons_of(responses)[0].reason == pb.FINISH_REASON_STOP


def test_an_object_of_json_is_one_as_far_as_it_goes(daemon: Daemon) -> None:
    structure = pb.StructuredOutput(json_object=pb.JsonObject())
    for seed in range(3):
        responses = answers(daemon, structure, sampling=pb.SamplingParams(seed=seed))
        text, reason = text_of(responses), reasons_of(responses)[0].reason
        assert text.startswith("{")
        if reason == pb.FINISH_REASON_STOP:
            assert isinstance(json.loads(text), dict)
        else:
            assert reason == pb.FINISH_REASON_LENGTH


def test_a_stop_string_within_a_string_ends_the_answer_there(daemon: Daemon) -> None:
    structure = pb.StructuredOutput(regex='"[a-c]{30}"')
    responses = answers(daemon, structure, n=4, stopping=pb.StoppingParams(max_tokens=60, stop=["ab", "cc"]))
    for index, end in reasons_of(responses).items():
        assert end.stop_string in ("ab", "cc")
        assert re.fullmatch('"[a-c]*', text_of(responses, index))


def test_a_stop_token_that_is_allowed_as_text_ends_the_answer_there(daemon: Daemon) -> None:
    structure = pb.StructuredOutput(regex="[a-c]{30}")
    responses = answers(daemon, structure, stopping=pb.StoppingParams(max_tokens=60, stop_token_ids=[1 + ord("b")]))
    assert re.fullmatch("[ac]*", text_of(responses))
    assert reasons_of(responses)[0].stop_token_id == 1 + ord("b")


def test_a_structure_beside_free_requests_changes_none_of_them(daemon: Daemon) -> None:
    free: dict[str, Any] = {
        "token_ids": PROMPT,
        "sampling": pb.SamplingParams(seed=9),
        "stopping": pb.StoppingParams(max_tokens=120, ignore_eos=True),
    }
    before = tokens_of(daemon.generate(**free))
    structure = pb.StructuredOutput(regex="[a-z]{300}")
    bound: list[str] = []
    neighbour = threading.Thread(target=lambda: bound.append(text_of(answers(daemon, structure))))
    neighbour.start()
    beside = tokens_of(daemon.generate(**free))
    neighbour.join()
    assert beside == before
    assert re.fullmatch("[a-z]{300}", bound[0])


def test_what_grows_too_large_on_its_way_ends_with_an_error_of_its_own(daemon: Daemon) -> None:
    """More of it is fixed than a check follows."""
    structure = pb.StructuredOutput(regex="q{60}" + "a?b?" * 700)
    with pytest.raises(grpc.RpcError) as caught:
        answers(daemon, structure)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(caught.value)["ErrorInfo"].reason == "TOO_LARGE"
    assert text_of(answers(daemon, pb.StructuredOutput(regex="ab"))) == "ab"


def test_hostile_structures_end_neither_process_and_leave_nothing(daemon: Daemon) -> None:
    engine_pid = daemon.info().engine_pid
    for name, hostile in hostile_structures().items():
        if hostile.reason is None:
            answers(daemon, hostile.structure, stopping=pb.StoppingParams(max_tokens=20))
        elif name in ("chain of rules", "deep items", "intersections", "terminals doubled to the limit"):
            with pytest.raises(grpc.RpcError) as caught:
                answers(daemon, hostile.structure)
            assert details_of(caught.value)["ErrorInfo"].reason == hostile.reason, name
    assert daemon.info().engine_pid == engine_pid
    assert daemon.process.poll() is None
    daemon.wait_idle()
    assert daemon.ledger().balanced, list(daemon.ledger().findings)


def test_structures_that_nobody_would_write_are_followed_or_refused(daemon: Daemon) -> None:
    tally = Fuzz(daemon, first_seed()).run(120)
    print(f"structures: {tally}")
    assert tally.followed > 5
    assert tally.refused["INVALID_ARGUMENT"] > 20


def test_cancelled_answers_give_everything_back(daemon: Daemon) -> None:
    structure = pb.StructuredOutput(regex="[a-z]{3000}")
    for i in range(24):
        request = pb.GenerateRequest(token_ids=PROMPT, structured_output=structure, n=1 + i % 4)
        call = daemon.generation.Generate(request, timeout=60)
        for _ in range(i % 6):
            next(call)
        call.cancel()
    daemon.wait_idle()
    eventually(lambda: daemon.ledger().balanced)


def test_a_new_engine_follows_structures_at_once(daemon: Daemon) -> None:
    call = daemon.generation.Generate(
        pb.GenerateRequest(token_ids=PROMPT, structured_output=pb.StructuredOutput(regex="[a-z]{3000}")), timeout=60
    )
    assert next(call).HasField("started")
    os.kill(daemon.info().engine_pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: daemon.info().state == admin_pb2.ENGINE_STATE_SERVING, 60)
    assert text_of(answers(daemon, pb.StructuredOutput(regex="ab"))) == "ab"


def test_every_command_of_the_page_is_run_and_its_answer_is_what_was_asked_for(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    (schema,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (grammar,) = re.findall(r"```lark\n(.*?)```", text, re.DOTALL)
    (tmp_path / "person.json").write_text(schema)
    (tmp_path / "sums.lark").write_text(grammar)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOWNCORE_SERVER", str(daemon.socket))
    shown: list[str] = []
    for command in commands_in(text):
        check_command(command)
        assert run(command[1:]) == 0
        shown.append(capsys.readouterr().out.rstrip("\n"))
    choice, date, person, total, any_object = shown
    assert choice in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", date)
    assert has_schema(json.loads(person), json.loads(schema))
    assert re.match(r"[1-9][0-9]{0,2}(\+|$)", total)
    assert any_object.startswith("{")


def test_two_structures_at_once_are_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "x", "--json", "--regex", "a", "--server", "/nowhere"]) == 2
    assert "exclude each other" in capsys.readouterr().err
