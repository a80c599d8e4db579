"""downcore bench load: what it counts, in both shapes, against a front with the scripted engine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import ops.bench
from ops.bench.load_report import distribution, make_report, write_json
from ops.bench.load_run import CUT_OFF, NOT_SENT, Load, LoadSettings, Outcome, Run
from ops.cli.bench_load import is_local
from ops.cli.errors import ExitCode
from ops.cli.main import run
from tests.front.harness import Front, running_front

TOKEN_S = 0.002
CLOSED = LoadSettings(
    concurrency=4, rate_per_s=None, duration_s=30.0, max_requests=24, max_open=64, prompt_tokens=20, shared_tokens=5,
    answer_tokens=10, timeout_s=20.0, seed=1,
)  # fmt: skip
OPEN = replace(CLOSED, concurrency=None, rate_per_s=200.0, max_requests=60)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with running_front(tmp_path_factory.mktemp("load"), ("--token-s", str(TOKEN_S))) as front:
        yield front


def loaded(front: Front, settings: LoadSettings) -> Run:
    async def main() -> Run:
        async with grpc.aio.insecure_channel(f"unix:{front.socket}") as channel:
            return await Load(channel, settings, vocab_size=512).run()

    return asyncio.run(main())


def test_a_closed_loop_keeps_its_number_open_and_times_every_token(front: Front) -> None:
    found = loaded(front, CLOSED)
    assert len(found.outcomes) == 24
    assert {outcome.error for outcome in found.outcomes} == {None}
    assert {(outcome.num_tokens, outcome.prompt_tokens) for outcome in found.outcomes} == {(10, 20)}
    events = sorted([(o.sent_s, 1) for o in found.outcomes] + [(o.ended_s, -1) for o in found.outcomes])
    num_open = most = 0
    for _, change in events:
        num_open += change
        most = max(most, num_open)
    assert most == 4
    for outcome in found.outcomes:
        first = outcome.first_token_s
        assert first is not None
        assert 0 < first <= outcome.total_s
        assert len(outcome.gaps_s()) == 10 - outcome.arrived_tokens[0]
        assert sum(outcome.gaps_s()) == pytest.approx(outcome.arrivals_s[-1] - outcome.arrivals_s[0])
    report = make_report("m", "t", CLOSED, found)
    assert report.total is not None
    assert report.total.p50_s >= 9 * TOKEN_S, "ten tokens cannot take less"


def test_an_open_loop_sends_at_random_times_that_the_seed_repeats(front: Front) -> None:
    found = loaded(front, OPEN)
    assert len(found.outcomes) == 60
    due = [outcome.due_s - found.began_s for outcome in found.outcomes]
    gaps = [after - before for before, after in pairwise(due)]
    assert min(gaps) < 0.25 / 200 < 1.5 / 200 < max(gaps), "a Poisson process, not a metronome"
    again = loaded(front, OPEN)
    assert [o.due_s - again.began_s for o in again.outcomes] == pytest.approx(due, abs=1e-6)
    assert all(outcome.sent_s >= outcome.due_s for outcome in found.outcomes)


def test_beyond_the_most_that_may_be_open_requests_are_not_sent_and_counted(front: Front) -> None:
    settings = replace(OPEN, max_open=2, answer_tokens=40)
    report = make_report("m", "t", settings, loaded(front, settings))
    assert report.requests == 60
    assert report.errors[NOT_SENT] == 60 - report.completed
    assert report.completed >= 2


def test_failures_are_counted_by_the_daemons_own_reason_and_are_in_no_latency(front: Front) -> None:
    settings = replace(CLOSED, prompt_tokens=2_000_000, shared_tokens=0, max_requests=1, concurrency=1)
    report = make_report("m", "t", settings, loaded(front, settings))
    assert report.errors == {"CONTEXT_TOO_LONG": 1}
    assert (report.completed, report.total, report.first_token) == (0, None, None)


def test_what_is_open_at_the_end_is_cut_off(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.bench.load_run.SETTLE_S", 0.1)
    settings = replace(CLOSED, duration_s=0.2, answer_tokens=100_000, max_requests=100)
    found = loaded(front, settings)
    assert [outcome.error for outcome in found.outcomes] == [CUT_OFF] * 4


def test_percentiles_are_values_that_were_measured() -> None:
    found = distribution([float(number) for number in range(1, 101)])
    assert found is not None
    assert (found.count, found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.max_s) == (100, 50, 90, 95, 99, 100)
    assert found.mean_s == 50.5
    single = distribution([7.0])
    assert single is not None
    assert (single.p50_s, single.p99_s) == (7.0, 7.0)
    assert distribution([]) is None


def test_latency_counts_from_when_a_request_was_due() -> None:
    outcome = Outcome(due_s=1.0, sent_s=3.0, ended_s=6.0, arrivals_s=[4.0, 6.0], arrived_tokens=[1, 2])
    assert (outcome.first_token_s, outcome.total_s, outcome.gaps_s()) == (3.0, 5.0, [1.0, 1.0])


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("unix:/run/x.sock", True), ("127.0.0.1:5", True), ("127.9.9.9:5", True), ("[::1]:5", True),
        ("localhost:5", True), ("10.0.0.1:5", False), ("example.org:5", False), ("localhost.example.org:5", False),
        ("0.0.0.0:5", False), ("[::]:5", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_local(target: str, local: bool) -> None:
    assert is_local(target) is local


def call(front: Front, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ops", "bench", "load", "--server", str(front.socket), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_figures_and_writes_them(front: Front, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    flags = ("--prompt-tokens", "8", "--answer-tokens", "5", "--requests", "20", "--save", str(path))
    done = call(front, "--concurrency", "4", *flags)
    assert (done.returncode, "20 completed" in done.stdout, "between tokens" in done.stdout) == (0, True, True)
    saved = json.loads(path.read_text())
    assert saved["completed"] == 20
    assert saved["first_token"]["count"] == len(saved["points"]["first_token_s"]) == 20
    row = json.loads(call(front, "--rate", "100", "--duration", "0.3", *flags[:4], "-o", "jsonl").stdout)
    assert row["settings"]["rate_per_s"] == 100
    assert row["requests"] == row["completed"] > 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--concurrency for a closed loop or --rate"),
        (("--concurrency", "2", "--rate", "3"), "--concurrency for a closed loop or --rate"),
        (("--concurrency", "2", "--shared-tokens", "300"), "more than --prompt-tokens"),
        (("--concurrency", "2", "--server", "192.0.2.1:50051"), "--allow-remote"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "load", *arguments]) == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_the_figures_can_be_drawn(front: Front, tmp_path: Path) -> None:
    found = loaded(front, replace(CLOSED, max_requests=12))
    path = tmp_path / "figures.json"
    write_json(make_report("m", "t", CLOSED, found), found, path)
    script = Path(ops.bench.__path__[0]) / "load_plot.py"
    subprocess.run([sys.executable, str(script), str(path), str(path.with_suffix(".png"))], check=True, timeout=60)
    picture: Any = path.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")
