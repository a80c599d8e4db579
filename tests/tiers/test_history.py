"""What is remembered of prompts beyond the cache."""

import pytest

from tiers.history import FIRST_GAP_S, History


def test_a_prompt_that_goes_on_from_another_leaves_no_path() -> None:
    history = History()
    assert history.visit("abc", 0.0).num_known == 0
    seen = history.visit("abcd", 10.0)
    assert (seen.num_known, seen.leaves_path) == (3, False)


def test_a_prompt_that_turns_off_where_another_went_on_leaves_its_path_there() -> None:
    history = History()
    history.visit("abcd", 0.0)
    seen = history.visit("abxy", 10.0)
    assert (seen.num_known, seen.leaves_path) == (2, True)
    assert history.visit("abz", 20.0).num_known == 2


def test_the_gap_of_a_conversation_is_learnt_from_its_returns() -> None:
    history = History()
    gaps = [history.visit(range(1 + turn), turn * 7.0).gap_s for turn in range(40)]
    assert gaps[0] == pytest.approx(FIRST_GAP_S)
    assert gaps[-1] == pytest.approx(7.0, rel=0.1)
    assert gaps == sorted(gaps, reverse=True)
    assert history.typical_gap_s < FIRST_GAP_S


def test_a_branch_does_not_inherit_the_gap_of_the_path_it_leaves() -> None:
    history = History()
    for turn in range(20):
        history.visit(range(3 + turn), turn * 2.0)
    assert history.visit([0, 1, 2, "x"], 50.0).gap_s == pytest.approx(history.typical_gap_s)


def test_memory_is_bounded_and_the_latest_stay() -> None:
    history = History(num_keys=10)
    for number in range(100):
        history.visit([("p", number), ("q", number)], float(number))
    assert history.visit([("p", 99), ("q", 99)], 100.0).num_known == 2
    assert history.visit([("p", 5), ("q", 5)], 101.0).num_known == 0
    assert len(history) == 10
