"""The table of launch choices: what is chosen, what is refused, and the rule that no row's bytes follow its batch."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

import daemon
import kernels
from kernels.launch_table import Bucket, Entry, Table, TableError, Timing, Tunable, buckets, one_bucket, read_table

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Tiles:
    columns: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TwoProducts:
    rows: int
    up: Tiles


NORM = Tunable("norm", ("width",), lambda width: one_bucket(Tiles(width, 4)), neutral=False)
COPY = Tunable("copy", ("width",), lambda _: (Bucket(8, Tiles(1, 1)), Bucket(None, Tiles(2, 2))), neutral=True)


def entry(kernel="norm", width=64, most_rows=None, **choice):
    return Entry(kernel, {"width": width}, most_rows, choice or {"columns": 32, "num_warps": 2}, (Timing(1, 1.0, 2.0),))


def table(*entries):
    return Table("a card", "2026-11-30", {}, entries)


def test_a_shape_of_the_table_has_its_choice_and_others_the_default() -> None:
    of = table(entry(width=64), entry("copy", width=32))
    assert buckets(NORM, of, (64,)) == one_bucket(Tiles(32, 2))
    assert buckets(NORM, of, (32,)) == one_bucket(Tiles(32, 4))
    assert buckets(NORM, None, (64,)) == one_bucket(Tiles(64, 4))


def test_a_device_without_a_table_has_the_default() -> None:
    assert NORM.look_up(CPU, width=64) == Tiles(64, 4)
    assert [COPY.look_up(CPU, num_rows=rows, width=1).columns for rows in (1, 8, 9, 10**9)] == [1, 1, 2, 2]


def test_choices_of_choices_are_read() -> None:
    of_two = Tunable("norm", ("width",), lambda _: one_bucket(TwoProducts(16, Tiles(1, 1))), neutral=False)
    chosen = table(entry(rows=32, up={"columns": 8, "num_warps": 2}))
    assert buckets(of_two, chosen, (64,)) == one_bucket(TwoProducts(32, Tiles(8, 2)))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([entry(columns=32)], "num_warps"),
        ([entry(columns=32, num_warps=2, num_stages=3)], "fields"),
        ([entry(columns="32", num_warps=2)], "columns"),
        ([entry(columns=32.0, num_warps=2)], "columns"),
        ([Entry("norm", {"heads": 64}, None, {"columns": 1, "num_warps": 1}, ())], "chosen by width"),
        ([Entry("norm", {"width": 64, "num_rows": 1}, None, {"columns": 1, "num_warps": 1}, ())], "chosen by width"),
        ([entry(), entry()], "bounds rise"),
    ],
)  # fmt: skip
def test_what_is_no_choice_is_refused(entries: list[Entry], told: str) -> None:
    with pytest.raises(TableError, match=told):
        buckets(NORM, table(*entries), (64,))


def test_what_reaches_bytes_may_not_follow_the_number_of_rows() -> None:
    of = [entry(most_rows=16), entry(columns=8, num_warps=1)]
    with pytest.raises(TableError, match="reaches bytes"):
        buckets(NORM, table(*of), (64,))
    by_default = Tunable("norm", (), lambda: (Bucket(8, Tiles(1, 1)), Bucket(None, Tiles(2, 1))), neutral=False)
    with pytest.raises(TableError, match="reaches bytes"):
        by_default.look_up(CPU)
    neutral = Tunable("norm", ("width",), NORM.default, neutral=True)
    assert [one.most_rows for one in buckets(neutral, table(*of), (64,))] == [16, None]


@pytest.mark.parametrize("bounds", [[16], [16, 8, None], [8, 8, None], [None, None], [None, 8]])
def test_any_number_of_rows_has_one_choice(bounds: list[int | None]) -> None:
    with pytest.raises(TableError, match="bounds rise"):
        buckets(COPY, table(*(entry("copy", most_rows=most) for most in bounds)), (64,))


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sm_00.json"
    assert read_table(path) is None
    whole = msgspec.to_builtins(table(entry()))
    path.write_bytes(msgspec.json.encode(whole))
    assert read_table(path) == table(entry())
    for name, value in (("device", None), ("device", 3), ("colour", "red"), ("entries", [{"kernel": "norm"}])):
        other = {**whole, name: value}
        path.write_bytes(msgspec.json.encode(other))
        with pytest.raises(TableError, match=r"sm_00\.json"):
            read_table(path)
    path.write_bytes(b"{")
    with pytest.raises(TableError, match=r"sm_00\.json"):
        read_table(path)


def test_nothing_is_measured_while_serving() -> None:
    sources = [path for package in (kernels, daemon) for path in Path(package.__path__[0]).rglob("*.py")]
    assert len(sources) > 100
    assert [path for path in sources if "triton.autotune" in path.read_text() or "do_bench" in path.read_text()] == []
