"""downcore bench longctx: what bounds a token, what the record says, what is refused before anything is started."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.longctx import Answered, BudgetFigures, Links, LongReport, LongSettings, limited, measure_links
from ops.bench.longctx_report import print_report, write_json
from ops.cli.errors import ExitCode
from ops.cli.main import run
from ops.cli.output import make_console

SETTINGS = LongSettings(
    context_tokens=4096,
    answer_tokens=8,
    shares=(0.1,),
    tiers=("host", "disk"),
    grid=256,
    threads=1,
    seed=0,
    with_whole=True,
    questions=("needle",),
    rounds=0,
)
LINKS = Links(memory=4e9, disk=2e9, pipeline=1e9)
ANSWER = Answered("needle", 4000, "12345", is_right=True, prefill_s=2.0, token_s=0.1)
DISK = BudgetFigures(
    tier="disk",
    share=0.1,
    pool_blocks=8,
    pool_bytes=1 << 20,
    context_blocks=64,
    device_blocks=8,
    host_blocks=0,
    disk_blocks=56,
    prefill_tokens_per_s=1000.0,
    token_s=0.5,
    streamed_bytes=200_000_000,
    limit_token_s=None,
    engine_peak_bytes=1 << 28,
    answers=(ANSWER,),
)


def test_a_token_is_bounded_by_the_slowest_of_link_pipeline_and_the_resident_step() -> None:
    on_host = replace(DISK, tier="host")
    assert limited(DISK, LINKS, resident_token_s=0.01).limit_token_s == pytest.approx(0.2)
    assert limited(on_host, LINKS, resident_token_s=0.01).limit_token_s == pytest.approx(0.05)
    assert limited(DISK, replace(LINKS, disk=5e8), resident_token_s=0.01).limit_token_s == pytest.approx(0.4)
    whole = limited(DISK, LINKS, resident_token_s=0.4)
    assert whole.limit_token_s == 0.4
    assert whole.of_limit == pytest.approx(1.25)


def test_the_record_has_every_figure_and_the_table_says_which_answers_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(DISK, tier="host", answers=(replace(ANSWER, is_right=False),))
    report = LongReport("tiny", "bfloat16", "cpu", SETTINGS, LINKS, (limited(DISK, LINKS, 0.01), wrong))
    path = write_json(report, tmp_path)
    assert path.name.startswith("longctx-")
    record = json.loads(path.read_text())
    assert record["budgets"][0]["of_limit"] == pytest.approx(2.5)
    assert record["budgets"][0]["disk_blocks"] == 56
    assert record["settings"]["context_tokens"] == 4096
    print_report(report, make_console())
    shown = capsys.readouterr().out
    assert "disk, 10% resident: needle of 4,000 tokens right" in shown
    assert "host, 10% resident: needle of 4,000 tokens WRONG" in shown


def test_links_are_measured_through_the_file_and_the_reader_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.bench.longctx.LINK_BYTES", 4 << 20)
    links = measure_links(tmp_path, 32 << 10, 4)
    assert min(links.memory, links.disk, links.pipeline) > 1e6
    assert links.pipeline < 10 * links.disk, "it reads the same file, and checks and copies besides"


def test_a_share_that_two_chunks_exceed_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["bench", "longctx", "--context", "4096", "--resident", "0.05"]) == ExitCode.USAGE
    assert "less than two chunks of 128" in capsys.readouterr().err
