"""What the daemon logs: lines that programs read, and never a word of a prompt or an answer."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import cache_pb2
from downcore.v1 import generation_pb2 as pb

from daemon import logs
from daemon.errors import ErrorReason
from daemon.front.ended import End, Ended
from daemon.front.request_log import RequestLog
from tests.front.harness import Front, eventually, ids_of, running_front

PLANTED = "xylophonic-zeppelin"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def ended(**changes: Any) -> Ended:
    values: dict[str, Any] = {
        "request_id": "r", "principal": "p", "trace": None, "ends": (End.STOP,), "error": None, "usage": None,
        "completion_tokens": 3, "arrived_s": 1.0, "submitted_s": None, "first_token_s": None, "last_token_s": None,
        "ended_s": 2.0,
    }  # fmt: skip
    return Ended(**{**values, **changes})


def requests_of(front: Front) -> list[dict[str, Any]]:
    """The request log's lines."""
    return [line for line in map(json.loads, front.log) if line["logger"] == "downcore.requests"]


def test_no_word_of_a_prompt_or_an_answer_is_logged_whatever_becomes_of_it(tmp_path: Path) -> None:
    engine = ("--tiers", "device,host,disk", "--prefixes", "3", "--context", "100000")
    with running_front(
        tmp_path, engine=engine, flags=("--log-level", "debug", "--tokenizer-timeout-s", "0.3")
    ) as front:
        text = f"tell of {PLANTED} " * 80
        assert PLANTED in "".join(r.chunk.text for r in front.generate(text, stopping=pb.StoppingParams(max_tokens=99)))
        front.generate(
            text, stopping=pb.StoppingParams(max_tokens=9, stop=[PLANTED]), sampling=pb.SamplingParams(logprobs=True)
        )
        call = front.stream(text, stopping=pb.StoppingParams(max_tokens=50_000))
        next(call)
        call.cancel()
        turns = [pb.ChatMessage(role="user", content=PLANTED), pb.ChatMessage(role="user", content="hang")]
        bad: list[dict[str, Any]] = [
            {"chat": pb.Chat(messages=turns)},
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="stranger", content=PLANTED)])},
            {"text": text, "n": 99},
            {"text": text, "request_id": PLANTED + " with a space"},
            {"text": text, "timeout": 0.01, "stopping": pb.StoppingParams(max_tokens=50_000)},
            {"text": PLANTED * 40_000},
        ]
        for fields in bad:
            with pytest.raises(grpc.RpcError):
                front.generate(**fields)
        prompt = cache_pb2.Prompt(text=text * 20)
        list(front.cache.WarmPrefix(cache_pb2.WarmPrefixRequest(prompts=[prompt]), timeout=20))
        front.cache.LookupPrefix(cache_pb2.LookupPrefixRequest(prompt=prompt), timeout=20)
        eventually(lambda: len(requests_of(front)) >= 6)
    output = "".join(front.log) + front.ready_line
    for word in (PLANTED, PLANTED[:10], str(ids_of(PLANTED))[1:30]):
        assert word not in output
    assert "tokenizer worker replaced" in output, "the template that hangs has left its line"
    assert all({"time", "level", "process", "logger", "message"} <= json.loads(line).keys() for line in front.log)


def test_a_request_is_one_line_with_its_caller_end_counts_times_and_trace(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        request = pb.GenerateRequest(text="abc", request_id="mine", n=2, stopping=pb.StoppingParams(max_tokens=4))
        list(front.generation.Generate(request, timeout=20, metadata=(("traceparent", TRACE),)))
        with pytest.raises(grpc.RpcError):
            front.generate("abc", timeout=0.05, stopping=pb.StoppingParams(max_tokens=50_000))
        eventually(lambda: len(requests_of(front)) == 2)
    good, late = requests_of(front)
    expected = {
        "request_id": "mine", "principal": "local", "ends": "length+length", "prompt_tokens": 3, "cached_device": 0,
        "completion_tokens": 8, "trace_id": TRACE[3:35], "span_id": TRACE[36:52],
    }  # fmt: skip
    assert expected.items() <= good.items()
    assert 0 < good["first_token_s"] <= good["duration_s"] < 20
    # The server's clock and the client's say at once that it is over: either may be heard first.
    assert (late.get("error"), late["ends"]) in {("DEADLINE_EXCEEDED", "failed"), (None, "cancelled")}


def test_only_the_part_that_the_setting_says_is_logged_of_what_ends_well_and_all_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "downcore.requests")
    for fraction, expected in ((0.0, 0), (0.25, 10), (1.0, 40)):
        log = RequestLog(fraction)
        caplog.clear()
        for _ in range(40):
            log(ended())
        assert len(caplog.records) == expected
        log(ended(error=ErrorReason.INTERNAL, ends=(End.FAILED,)))
        assert caplog.records[-1].levelname == "WARNING"
        assert len(caplog.records) == expected + 1


def test_an_errors_own_words_are_kept_from_the_log_of_a_process_that_has_text() -> None:
    try:
        try:
            raise KeyError(PLANTED)
        except KeyError as inner:
            raise ValueError(f"cannot read {PLANTED}") from inner
    except ValueError as error:
        record = logging.LogRecord(
            "downcore.front", logging.ERROR, "f.py", 1, "a method failed", None, (type(error), error, None)
        )
    quiet = logs.JsonFormatter("front", tells_errors=False).format(record)
    assert PLANTED not in quiet
    assert [name in quiet for name in ("KeyError", "ValueError", "test_logs.py")] == [True] * 3, "types and places"
    assert PLANTED not in logs.TextFormatter("front", tells_errors=False).format(record)
    assert PLANTED in logs.JsonFormatter("engine", tells_errors=True).format(record)


def test_a_failing_callback_is_logged_without_what_it_was_called_with(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.on_loop_error)
        loop.call_soon(lambda text: 1 // 0, PLANTED)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(body())
    (record,) = caplog.records
    line = logs.JsonFormatter("front", tells_errors=False).format(record)
    assert "ZeroDivisionError" in line
    assert PLANTED not in line


@pytest.mark.parametrize(("log_format", "is_json"), [("text", False), ("json", True), ("auto", True)])
def test_lines_are_json_off_a_terminal_unless_told(log_format: str, is_json: bool) -> None:
    program = (
        "import logging; from daemon import logs;"
        f"logs.configure('front', level='info', log_format={log_format!r});"
        "logging.getLogger('downcore.front').info('said', extra={logs.FIELDS: {'count': 3}})"
    )
    line = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stderr
    if is_json:
        assert {"message": "said", "count": 3, "level": "info"}.items() <= json.loads(line).items()
    else:
        assert line.endswith("INFO downcore.front: said count=3\n")
