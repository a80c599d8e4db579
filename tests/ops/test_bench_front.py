"""downcore bench front: both sides stream what was asked, and what is counted is theirs."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ops.bench.front_report import FrontReport, as_plain, print_report, write_json
from ops.bench.front_run import PROMPT_IDS, FrontSettings, process_cpu_s
from ops.cli.bench_front import measure
from tests.front.harness import write_model_folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FrontReport:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": PROMPT_IDS.stop}))
    return measure(folder, FrontSettings((1, 4), 400, 1, 5, 0.0), Console(quiet=True))


def test_a_daemon_with_a_null_engine_is_measured_beside_a_bare_server(report: FrontReport) -> None:
    assert [row.streams for row in report.streams] == [1, 4]
    for row in report.streams:
        for side in (row.front, row.echo):
            assert side.messages_per_s > 0
            assert side.server_cpu_us > 1
        assert row.speed_ratio == pytest.approx(row.front.messages_per_s / row.echo.messages_per_s)
    assert 0 < report.pings.front_ms < 1000
    assert report.message_bytes > 8


def test_the_report_is_a_file_and_a_table(report: FrontReport, tmp_path: Path) -> None:
    written = json.loads(write_json(report, tmp_path).read_text())
    assert written["streams"] == json.loads(json.dumps(as_plain(report)["streams"]))
    console = Console(record=True, width=120, file=StringIO())
    print_report(report, console)
    assert "Unary ping" in console.export_text()


def test_processor_time_of_a_process_grows_with_what_it_computes() -> None:
    before_s = process_cpu_s(os.getpid())
    sum(range(3_000_000))
    assert process_cpu_s(os.getpid()) > before_s
