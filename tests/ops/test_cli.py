"""The command line against a daemon without an engine: exit codes, JSON, streaming, cancelling."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2, generation_pb2
from grpc_health.v1 import health_pb2

from ops.cli.errors import ExitCode
from ops.cli.main import COMMANDS, run
from tests.ops.fake_server import WORDS, FakeDaemon


@pytest.fixture
def daemon(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeDaemon]:
    with FakeDaemon(socket_folder / "fake.sock") as fake:
        monkeypatch.setenv("DOWNCORE_SERVER", str(fake.socket))
        yield fake


@pytest.fixture
def call(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line: exit code, stdout, stderr."""

    def invoke(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def test_status_of_a_serving_daemon_is_ok(call: Any) -> None:
    code, out, _ = call("status")
    assert code == ExitCode.OK
    assert "SERVING" in out
    assert "134.5 M" in out
    assert "1h 2m 5s" in out


@pytest.mark.parametrize(
    ("state", "name"),
    [(admin_pb2.ENGINE_STATE_LOADING, "LOADING, 50%"), (admin_pb2.ENGINE_STATE_DOWN, "DOWN")],
)
def test_status_of_a_daemon_that_does_not_serve_is_degraded(
    call: Any, daemon: FakeDaemon, state: "admin_pb2.EngineState", name: str
) -> None:
    daemon.state = state
    code, out, _ = call("status")
    assert code == ExitCode.DEGRADED
    assert name in out


def test_json_keeps_numbers_as_numbers_and_enums_short(call: Any) -> None:
    code, out, _ = call("status", "-o", "json")
    assert code == ExitCode.OK
    info = json.loads(out)
    assert info["parameters"] == 134_515_008
    assert info["state"] == "SERVING"
    assert info["slot_bytes"] == 0


def test_tiers_are_listed_with_sizes_for_people_and_bytes_for_programs(call: Any) -> None:
    _, table, _ = call("tiers", "ls")
    assert "64.0 MiB" in table
    assert "20/40" in table
    assert "50%" in table
    code, out, _ = call("tiers", "ls", "-o", "json")
    assert code == ExitCode.OK
    assert json.loads(out)[0]["capacity_bytes"] == 64 << 20


def test_watching_tiers_gives_a_line_of_json_each_time(call: Any, daemon: FakeDaemon) -> None:
    code, out, _ = call("tiers", "watch", "--count", "3", "--interval", "0.5", "-o", "json")
    assert code == ExitCode.OK
    assert [json.loads(line)["tiers"][0]["name"] for line in out.splitlines()] == ["device"] * 3
    assert daemon.requests[-1].interval_s == 0.5


def test_sessions_are_listed_shown_and_aborted_by_sequence_or_request(call: Any) -> None:
    assert "req-1/1" in call("session", "ls")[1]
    code, out, _ = call("session", "show", "req-1", "-o", "json")
    assert code == ExitCode.OK
    assert [s["id"] for s in json.loads(out)] == ["req-1/0", "req-1/1"]
    resident, large = (call("session", "show", f"req-1/{index}")[1] for index in range(2))
    assert "16 of them shared" in resident
    assert "residency" not in resident
    assert "16 blocks device, 100 blocks host, 1,000 blocks disk" in large
    assert "3.0 MiB for the last token or chunk" in large
    assert "1.5 GiB/s, 75% of 2.0 GiB/s" in large
    assert call("session", "abort", "req-1", "--yes")[:2] == (ExitCode.OK, "aborted 2\n")


@pytest.mark.parametrize("verb", ["show", "abort"])
def test_a_session_that_is_not_there_is_not_found(call: Any, verb: str) -> None:
    code, _, err = call("session", verb, "nobody")
    assert code == ExitCode.NOT_FOUND
    assert err == "downcore: no sequence 'nobody'\n"


def test_a_ledger_that_does_not_balance_fails_with_its_findings(call: Any, daemon: FakeDaemon) -> None:
    assert call("ledger")[0] == ExitCode.OK
    daemon.balanced = False
    code, out, _ = call("ledger")
    assert code == ExitCode.FAILED
    assert "device blocks: 3 held by nobody" in out
    assert json.loads(call("ledger", "-o", "json")[1])["balanced"] is False


def test_ping_says_what_health_says(call: Any, daemon: FakeDaemon) -> None:
    code, out, _ = call("ping", "--count", "2", "--interval", "0")
    assert code == ExitCode.OK
    assert out.count("SERVING in ") == 2
    daemon.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    code, out, _ = call("ping", "-o", "json")
    assert code == ExitCode.DEGRADED
    assert json.loads(out)["status"] == "NOT_SERVING"


def test_a_drain_that_leaves_requests_open_is_a_timeout(call: Any) -> None:
    assert call("drain", "--wait", "5", "--yes")[:2] == (ExitCode.OK, "drained\n")
    assert call("drain", "--wait", "0.5", "--yes")[:2] == (ExitCode.TIMEOUT, "2 requests are still open\n")


def test_tokenize_shows_bytes_that_are_no_text(call: Any, daemon: FakeDaemon) -> None:
    code, out, _ = call("tokenize", "Hello")
    assert code == ExitCode.OK
    assert "19556" in out
    assert "\\xf0" in out
    assert daemon.requests[-1].text == "Hello"
    assert json.loads(call("tokenize", "Hello", "-o", "json")[1])["token_ids"] == [19556, 905]


def test_generate_prints_the_text_and_stats_apart(call: Any) -> None:
    code, out, err = call("generate", "Begin", "--stats")
    assert code == ExitCode.OK
    assert out == "".join(WORDS) + "\n"
    assert "1,024 of them from the cache (device)" in err
    assert "stop at '!'" in err


def test_generate_keeps_several_answers_apart(call: Any) -> None:
    _, out, _ = call("generate", "Begin", "--n", "2")
    text = "".join(WORDS)
    assert out == f"--- 0\n{text}\n--- 1\n{text}\n"


def test_generate_as_json_is_an_event_a_line(call: Any) -> None:
    _, out, _ = call("generate", "Begin", "-o", "json")
    events = [json.loads(line) for line in out.splitlines()]
    assert next(iter(events[0].keys() - {"request_id"})) == "started"
    assert "".join(event["chunk"]["text"] for event in events if "chunk" in event) == "".join(WORDS)
    assert events[-1]["summary"]["usage"]["cached_tokens"]["device"] == 1024


def test_generate_prints_a_line_a_token_with_logprobs(call: Any) -> None:
    _, out, _ = call("generate", "Begin", "--top-logprobs", "1")
    assert out.splitlines()[0] == ' -0.2500 "Four"   |   -0.2500 "Four"'
    assert len(out.splitlines()) == len(WORDS)


def test_every_sampling_flag_reaches_the_request_and_absent_ones_stay_absent(call: Any, daemon: FakeDaemon) -> None:
    flags = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --typical-p 0.8 --repetition-penalty 1.1"
    flags += (
        " --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 7=-1.5 --seed 11 --max-tokens 9 --min-tokens 2"
    )
    flags += " --stop X --stop Y --stop-id 4 --ignore-eos --n 2 --request-id mine --top-logprobs 5"
    assert call("generate", "Begin", *flags.split())[0] == ExitCode.OK
    request = daemon.requests[-1]
    expected = generation_pb2.GenerateRequest(
        request_id="mine",
        text="Begin",
        n=2,
        sampling=generation_pb2.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            typical_p=0.8,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias={7: -1.5},
            seed=11,
            logprobs=True,
            top_logprobs=5,
        ),
        stopping=generation_pb2.StoppingParams(
            max_tokens=9, min_tokens=2, stop=["X", "Y"], stop_token_ids=[4], ignore_eos=True
        ),
    )
    assert request == expected
    call("generate", "Begin")
    bare = daemon.requests[-1]
    assert not bare.sampling.HasField("temperature")
    assert not bare.HasField("n")
    assert not bare.stopping.HasField("max_tokens")


def test_chat_is_sent_as_messages(call: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("héllo")
    assert call("generate", "--chat", "--system", "Be brief.", "--prompt-file", str(prompt))[0] == ExitCode.OK
    messages = daemon.requests[-1].chat.messages
    assert [(m.role, m.content) for m in messages] == [("system", "Be brief."), ("user", "héllo")]


FAILURES = [
    (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.top_p", ExitCode.USAGE),
    (grpc.StatusCode.UNAUTHENTICATED, "", "", ExitCode.UNAUTHORISED),
    (grpc.StatusCode.PERMISSION_DENIED, "", "", ExitCode.UNAUTHORISED),
    (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "", ExitCode.NOT_FOUND),
    (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE", "", ExitCode.DEGRADED),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "", ExitCode.FAILED),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "", ExitCode.TIMEOUT),
]


@pytest.mark.parametrize(("status", "reason", "field", "expected"), FAILURES)
def test_a_failure_is_one_line_with_its_reason_and_its_exit_code(
    call: Any, daemon: FakeDaemon, status: grpc.StatusCode, reason: str, field: str, expected: ExitCode
) -> None:
    daemon.failure = (status, "that went wrong", reason, field)
    for arguments in (("generate", "Begin"), ("session", "ls")):
        code, out, err = call(*arguments)
        assert code == expected
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("downcore: that went wrong [")
        assert reason in err
        assert field in err


def test_no_answer_in_time_is_a_timeout(call: Any, daemon: FakeDaemon) -> None:
    daemon.hang = True
    code, _, err = call("status", "--timeout", "0.2")
    assert code == ExitCode.TIMEOUT
    assert "--timeout" in err


def test_no_daemon_is_unreachable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["status", "--server", str(tmp_path / "none.sock")]) == ExitCode.UNREACHABLE
    assert "no daemon answers at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["status", "-o", "yaml"],
        ["generate"],
        ["generate", "a", "--prompt-file", "b"],
        ["generate", "--prompt-file", "/nonexistent"],
        ["generate", "a", "--system", "b"],
        ["generate", "a", "--logit-bias", "x"],
        ["generate", "a", "--n", "9"],
        ["session", "show"],
        ["status", "--server", "nowhere"],
        ["status", "--server", "unix:"],
        ["status", "--server", "http://127.0.0.1:7001"],
        ["version", "extra"],
        [],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str]) -> None:
    assert run(arguments) == ExitCode.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--stop-id", "-5"],
        ["generate", "x", "--stop-id", "4294967296"],
        ["generate", "x", "--max-tokens", "99999999999"],
        ["generate", "x", "--min-tokens", "99999999999"],
        ["generate", "x", "--top-k", "99999999999"],
        ["generate", "x", "--logit-bias", "-3=1"],
        ["generate", "x", "--logit-bias", "4294967296=1"],
        ["generate", "\udcff"],
        ["generate", "x", "--stop", "\udcff"],
        ["tokenize", "\udcff"],
        ["tokenize", "x", "--system", "y"],
        ["session", "show", "\udcff"],
        ["quota", "set", "x", "--cached", "99999999p"],
        ["quota", "set", "x", "--cached", "9" * 400],
        ["token", "new", "x", "--expires", "999999w"],
        ["prefix", "warm", "\udcff"],
    ],
)
def test_a_value_that_cannot_be_said_is_a_usage_error(arguments: list[str]) -> None:
    assert run(arguments) == ExitCode.USAGE


@pytest.mark.parametrize("arguments", ["--help", "version", "generate --help", "completion bash"])
def test_a_reader_that_has_gone_already_is_no_reason_for_noise(arguments: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "ops", *arguments.split()]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (ExitCode.FAILED, b"")


def test_a_prompt_that_is_not_utf8_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "latin1"
    prompt.write_bytes(b"caf\xe9")
    assert run(["generate", "--prompt-file", str(prompt)]) == ExitCode.USAGE
    assert "not UTF-8" in capsys.readouterr().err


def test_ctrl_c_cancels_the_call_and_keeps_what_was_printed(daemon: FakeDaemon) -> None:
    daemon.endless = True
    command = [sys.executable, "-m", "ops", "generate", "Begin"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert daemon.streaming.wait(30)
        assert process.stdout.read(4) == b"Four"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert daemon.cancelled.wait(30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_ends_the_call_without_noise(daemon: FakeDaemon) -> None:
    daemon.endless = True
    command = f"{sys.executable} -m ops generate Begin | head -c 4; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, env=dict(os.environ), check=False)
    assert done.stdout == b"Four"
    assert done.stderr == b""
    assert done.returncode == ExitCode.FAILED
    assert daemon.cancelled.wait(30)


@pytest.mark.parametrize("name", [*COMMANDS, "--help"])
def test_no_command_imports_torch_or_the_daemon(name: str) -> None:
    heavy = ("torch", "transformers", "daemon", "kernels", "matplotlib")
    light = ("grpc", "typer", "rich", "gguf", "numpy") if name in ("version", "--help") else ()
    code = (
        "import sys, importlib\n"
        "from ops.cli.main import COMMANDS, run\n"
        f"name = {name!r}\n"
        "importlib.import_module(COMMANDS[name].module) if name in COMMANDS else run([name])\n"
        f"print('FOUND', [m for m in {(*heavy, *light)!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "FOUND []"
