"""downcore events and downcore top, against a front with the scripted engine."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from ops.cli.errors import ExitCode
from ops.cli.events import KINDS, About
from ops.cli.main import run
from ops.cli.top import Look, rates_between
from tests.front.harness import Front, eventually, running_front
from tests.ops.terminal import at_terminal

FIRST = ["ENGINE_STARTED", "ENGINE_READY", "SERVING"]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with running_front(tmp_path_factory.mktemp("events"), ("--tiers", "device,host,disk")) as front:
        eventually(lambda: front.health_status() == 1)
        yield front


def test_events_are_listed_in_every_form(call: Any) -> None:
    code, table, _ = call("events")
    assert (code, "engine-ready" in table) == (ExitCode.OK, True)
    assert [event["kind"] for event in json.loads(call("events", "-o", "json")[1])][:3] == FIRST
    assert [json.loads(line)["kind"] for line in call("events", "-o", "jsonl")[1].splitlines()][:3] == FIRST
    rows = list(csv.DictReader(io.StringIO(call("events", "-o", "csv")[1])))
    assert [row["kind"] for row in rows][:3] == FIRST
    assert rows[0]["message"].startswith("engine started: pid ")
    only = json.loads(call("events", "--about", "health", "-o", "json")[1])
    assert {event["kind"] for event in only} == {"SERVING"}
    assert len(json.loads(call("events", "-n", "1", "-o", "json")[1])) == 1


def test_every_kind_of_event_is_about_one_thing() -> None:
    named = [kind for about in About for kind in about.kinds]
    assert sorted(named) == sorted(kind.name for kind in KINDS.values if kind.number)


def test_following_goes_on_over_a_restart_of_the_daemon(tmp_path: Path) -> None:
    first = Front(tmp_path)
    eventually(lambda: first.health_status() == 1)
    environ = {**os.environ, "DOWNCORE_SERVER": str(first.socket)}
    command = [sys.executable, "-m", "ops", "events", "-f", "--about", "engine", "-o", "jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as follower:
        try:
            assert follower.stdout is not None
            told = [json.loads(follower.stdout.readline()) for _ in range(2)]
            assert [event["kind"] for event in told] == FIRST[:2]
            assert first.close() == 0
            with running_front(tmp_path):
                again = [json.loads(follower.stdout.readline()) for _ in range(2)]
                assert [event["kind"] for event in again] == FIRST[:2]
                assert again[0]["log_id"] != told[0]["log_id"]
                follower.send_signal(signal.SIGINT)
                assert follower.wait(20) == ExitCode.INTERRUPTED
        finally:
            follower.kill()


def test_without_a_daemon_following_fails_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", "-f", "--server", str(tmp_path / "none.sock")]) == ExitCode.UNREACHABLE
    assert "no daemon answers" in capsys.readouterr().err


def look(time_s: float, starts: int, steps: int, answers: int) -> Look:
    info = admin_pb2.GetServerInfoResponse(
        state=admin_pb2.ENGINE_STATE_SERVING, engine_starts=starts, steps=steps, answer_tokens=answers
    )
    tier = admin_pb2.Tier(name="device", capacity_bytes=100, free_bytes=25, read_bytes=steps)
    queued = admin_pb2.Sequence(id="a/0", state=admin_pb2.SEQUENCE_STATE_QUEUED)
    return Look(time_s, info, (tier,), (queued, admin_pb2.Sequence(id="b/0", state=admin_pb2.SEQUENCE_STATE_DECODING)))


def test_rates_are_growth_over_time_and_a_counter_that_went_back_began_anew() -> None:
    rates = rates_between(look(10.0, 1, 100, 1000), look(12.0, 1, 150, 1400))
    assert (rates.steps_per_s, rates.answer_tokens_per_s) == (25.0, 200.0)
    assert (rates.running, rates.waiting, rates.state) == (1, 1, "SERVING")
    assert rates.tiers[0].read_bytes_per_s == 25.0
    assert rates_between(look(10.0, 1, 100, 1000), look(12.0, 2, 30, 1000)).steps_per_s == 15.0


def test_top_shows_what_runs(call: Any, front: Front) -> None:
    stream = front.stream(request_id="shown", stopping=pb.StoppingParams(max_tokens=500_000), timeout=60)
    next(stream)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    try:
        code, out, _ = call("top", "-n", "3", "-w", "0.3", "-o", "jsonl")
        rows = [json.loads(line) for line in out.splitlines()]
        assert (code, len(rows)) == (ExitCode.OK, 3)
        assert [sequence["request_id"] for sequence in rows[-1]["sequences"]] == ["shown"]
        assert rows[-1]["running"] == 1
        assert rows[-1]["answer_tokens_per_s"] > 50
        assert rows[-1]["tiers"]["disk"]["state"] == "read-only"
        header, row = call("top", "-n", "1", "-w", "0.1")[1].splitlines()
        assert header.split()[:3] == ["time", "state", "running"]
        assert row.split()[1:4] == ["SERVING", "1", "0"]
        code, shown = at_terminal(front.socket, "top", "-n", "2", "-w", "0.2")
        assert code == ExitCode.OK
        assert "1 running, 0 waiting" in shown
        assert "shown/0" in shown
        assert "disk 50% of 8.0 KiB" in shown
    finally:
        front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="shown"), timeout=10)
        reader.join(20)


def test_top_goes_on_while_the_engine_is_being_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_front(tmp_path, ("--load-s", "1.0")) as front:
        os.kill(front.info().engine_pid, signal.SIGKILL)
        eventually(lambda: front.info().engine_starts == 2)
        assert run(["top", "-n", "1", "-w", "0.1", "-o", "jsonl", "--server", str(front.socket)]) == ExitCode.OK
        row = json.loads(capsys.readouterr().out)
        assert (row["state"], row["tiers"], row["sequences"]) == ("LOADING", {}, [])
        eventually(lambda: front.health_status() == 1)
