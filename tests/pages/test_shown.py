"""The comparison of pages with outputs: what may differ, and what may not."""

import pytest

from tests.pages.shown import Shown

KEY, OTHER = "0123456789ab" + "0" * 52, "fedcba987654" + "1" * 52
TABLE = ("key           tokens  took", "────────────────────", f"{KEY[:12]}   1,024  7.9 s")


def test_times_keys_and_widths_may_differ() -> None:
    assert Shown().matches(TABLE, f"key  tokens   took  \n───\n{OTHER[:12]}  1,024  345 ms\n")


@pytest.mark.parametrize("wrong", ["1,025  7.9 s", "1,024  7.9 s  more", "1,024", "1,024  7.9 MiB"])
def test_what_counts_may_not(wrong: str) -> None:
    assert not Shown().matches(TABLE, f"key  tokens  took\n───\n{OTHER[:12]}  {wrong}\n")


def test_lines_that_are_not_shown_were_not_printed() -> None:
    assert Shown().matches((), "")
    assert not Shown().matches((), "warning\n")
    assert not Shown().matches(("drained",), "drained\nwarning\n")
    assert Shown().matches(("drained", "..."), "drained\nwarning\n")
    assert not Shown().matches(("...", "drained"), "warning\n")


def test_a_part_of_a_line_may_be_left_out() -> None:
    assert Shown().matches(("pid …, up",), "pid 17, up\n")
    assert not Shown().matches(("pid …, up",), "pid 17, down\n")


def test_a_key_is_the_same_wherever_the_page_has_the_same() -> None:
    shown = Shown()
    assert shown.matches((f"key {KEY[:12]}",), f"key {OTHER[:12]}\n")
    assert shown.typed(f"downcore prefix evict {KEY[:12]}") == f"downcore prefix evict {OTHER[:12]}"
    assert not shown.matches((f"key {KEY[:12]}",), f"key {KEY[:12]}\n")
    assert not shown.matches((f"key {KEY}",), f"key {KEY}\n")
    assert shown.matches((f"key {KEY}",), f"key {OTHER}\n")
    assert shown.typed(KEY) == OTHER
