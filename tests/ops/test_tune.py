"""What tuning takes and writes: a choice that gains and loses nowhere, a file that a second run goes on with."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels.launch_table import read_table
from ops.bench.tune_record import Record, Trial, line

VERSIONS = {"triton": "3.6.0"}


@dataclass(frozen=True, slots=True)
class Tiles:
    columns: int


DEFAULT = Trial(Tiles(1), {4096: 100.0, 64: 10.0})


@pytest.mark.parametrize(
    ("us", "gains"),
    [
        ({4096: 90.0, 64: 10.0}, True),
        ({4096: 90.0, 64: 10.2}, True),
        ({4096: 50.0, 64: 10.4}, False),  # a decode step would pay for a chunk
        ({4096: 50.0}, False),  # given up half-way
        ({4096: 100.0, 64: 10.0}, False),
        ({4096: 99.0, 64: 9.9}, False),  # no more than chance
    ],
)
def test_a_choice_is_taken_where_it_gains_and_loses_nowhere(us: dict[int, float], gains: bool) -> None:
    assert Trial(Tiles(2), us).gains(DEFAULT) is gains


def test_ratios_are_means_of_all_numbers_of_rows() -> None:
    assert Trial(Tiles(2), {4096: 50.0, 64: 5.0}).ratio(DEFAULT) == pytest.approx(0.5)
    assert Trial(Tiles(2), {4096: 25.0, 64: 10.0}).ratio(DEFAULT) == pytest.approx(0.5)
    assert DEFAULT.ratio(DEFAULT) == pytest.approx(1)


def test_a_second_run_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sm_00.json"
    first = Record(path, "a card", VERSIONS, again=False)
    faster = Trial(Tiles(2), {4096: 50.0, 64: 5.0})
    few, any_rows = (faster.entry("norm", {"width": 64}, most, DEFAULT) for most in (8, None))
    assert first.lacks("norm", {"width": 64})
    first.add([few, any_rows])
    first.add([faster.entry("copy", {}, None, DEFAULT)])
    second = Record(path, "a card", VERSIONS, again=False)
    assert not second.lacks("norm", {"width": 64})
    assert second.lacks("norm", {"width": 32})
    assert Record(path, "a card", VERSIONS, again=True).lacks("norm", {"width": 64})
    second.add([DEFAULT.entry("norm", {"width": 64}, most, DEFAULT) for most in (8, None)])
    table = read_table(path)
    assert table is not None
    assert [(entry.kernel, entry.most_rows, entry.choice) for entry in table.entries] == [
        ("copy", None, {"columns": 2}),
        ("norm", 8, {"columns": 1}),
        ("norm", None, {"columns": 1}),
    ]


@pytest.mark.parametrize(("device", "versions"), [("another", VERSIONS), ("a card", {"triton": "3.7.0"})])
def test_what_another_device_or_version_found_is_not_kept(
    device: str, versions: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "sm_00.json"
    Record(path, "a card", VERSIONS, again=False).add([DEFAULT.entry("norm", {}, None, DEFAULT)])
    other = Record(path, device, versions, again=False)
    assert other.lacks("norm", {})
    other.add([DEFAULT.entry("copy", {}, None, DEFAULT)])
    table = read_table(path)
    assert table is not None
    assert (table.device, table.versions, len(table.entries)) == (device, versions, 1)


def test_a_row_says_what_it_gained() -> None:
    told = line(Trial(Tiles(2), {4096: 50.0, 64: 5.0}).entry("norm", {"width": 64}, 8, DEFAULT))
    for part in ("norm 64", "to 8", "columns 2", "4096: 50.0 us of 100.0 (-50.0%)", "64: 5.0 us of 10.0"):
        assert part in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    run = subprocess.run([sys.executable, "-m", "ops.bench.tune"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "there is no card to tune for\n")
