"""Draws follow the filtered distribution exactly, and depend on nothing but their arguments."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kernels.sampling import Filters, Penalties, all_finite, apply_penalties, draw, filtered, greedy, uniform

logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40).map(lambda x: torch.tensor(x).float())


@given(logit_rows, st.floats(1e-9, 1 - 1e-9))
def test_a_plain_draw_inverts_the_distribution(logits: torch.Tensor, number: float) -> None:
    token = draw(logits, Filters(), number)
    sums = np.cumsum(torch.softmax(logits.double(), -1).numpy())
    assert sums[token] >= number * sums[-1] - 1e-12
    assert token == 0 or sums[token - 1] <= number * sums[-1] + 1e-12


@pytest.mark.parametrize(
    ("filters", "warpers"),
    [
        (Filters(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (Filters(top_k=7), [TopKLogitsWarper(7)]),
        (Filters(top_p=0.8), [TopPLogitsWarper(0.8)]),
        (Filters(min_p=0.1), [MinPLogitsWarper(0.1)]),
        (Filters(typical_p=0.6), [TypicalLogitsWarper(0.6)]),
        (
            Filters(temperature=1.3, top_k=30, top_p=0.9, min_p=0.05),
            [TemperatureLogitsWarper(1.3), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
        ),
    ],
)
@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_filters_keep_what_transformers_keeps(
    filters: Filters, warpers: list[LogitsProcessor], vocab_size: int
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    expected = LogitsProcessorList(warpers)(torch.LongTensor([[0]]), logits.unsqueeze(0).double())[0]  # pyright: ignore[reportArgumentType]
    probs, ids = filtered(logits.double() / filters.temperature, filters)
    assert set(ids.tolist()) == set(expected.isfinite().nonzero().squeeze(-1).tolist())
    assert torch.allclose(probs, torch.softmax(expected, -1)[ids], atol=1e-12)


@given(logit_rows)
@settings(max_examples=200)
def test_every_combination_keeps_at_least_one_token_and_sums_to_one(logits: torch.Tensor) -> None:
    for filters in (Filters(top_k=1), Filters(top_p=1e-6), Filters(min_p=1.0), Filters(typical_p=1e-6, top_k=3)):
        probs, ids = filtered(logits.double(), filters)
        assert len(ids) >= 1
        assert abs(float(probs.sum()) - 1) < 1e-9
        assert draw(logits, filters, 0.999999) in ids.tolist()


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert greedy(logits.unsqueeze(0)).tolist() == [1]
    assert filtered(logits.double(), Filters(top_k=2))[1].tolist() == [1, 2]
    assert draw(torch.zeros(5), Filters(temperature=0.0), 0.5) == 0


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 5000])
def test_the_lowest_of_many_equal_ids_is_drawn_in_every_row(vocab_size: int) -> None:
    logits = torch.randint(-2, 3, (33, vocab_size), generator=torch.Generator().manual_seed(vocab_size)).float()
    logits[3] = -torch.inf
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits).tolist() == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 4999])
def test_one_value_that_is_not_finite_marks_its_row_alone(bad: float, place: int) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    assert all_finite(logits).tolist() == [True, True, True]
    logits[1, place] = bad
    assert all_finite(logits).tolist() == [True, False, True]
    logits[1, 1 - min(place, 1)] = -bad
    assert all_finite(logits).tolist() == [True, False, True]


@pytest.mark.parametrize("end", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_equal_logits_share_evenly_at_the_ends_of_the_range(end: float) -> None:
    logits = torch.full((100,), end)
    for filters in (Filters(), Filters(top_p=0.95), Filters(top_p=0.95, temperature=1e-3), Filters(min_p=0.5)):
        share = 0.95 if filters.top_p < 1.0 else 1.0
        for number in (0.004, 0.5, 0.996):
            assert draw(logits, filters, number) == pytest.approx(number * share * 100, abs=1.0), filters


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((8,), -torch.inf)
    logits[3] = 0.0
    for number in (1e-12, 0.5, 1 - 1e-12):
        assert draw(logits, Filters(), number) == 3
        assert draw(logits, Filters(top_p=0.5, typical_p=0.5), number) == 3


def test_numbers_are_uniform_and_independent_of_each_other() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(100)])
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45, "chi-square with 19 degrees of freedom"
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03
    assert uniform(2**64 - 1, 0) != uniform(0, 0)


def test_penalties_match_their_definitions() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
    history = torch.LongTensor([[4, 4, 9, 2]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(history, logits.unsqueeze(0).clone())[0]  # pyright: ignore[reportArgumentType]
    expected[[4, 9]] -= 0.5 + 0.25 * torch.tensor([2.0, 1.0])
    row = logits.clone()
    seen, made = torch.tensor([2, 4, 9]), torch.tensor([4, 9])
    apply_penalties(row, Penalties(1.7, 0.5, 0.25), seen, made, torch.tensor([2.0, 1.0]))
    assert torch.allclose(row, expected, atol=1e-6)


def test_no_parameters_that_may_be_sent_make_a_draw_fail_or_leave_what_is_allowed() -> None:
    least = 2.0**-149  # the smallest float above zero
    ids = torch.arange(50)
    extremes = itertools.product(
        (1.0, least, 10.0), (1.0, least, 100.0), (1.0, least), (0.0, least, 1.0), (1.0, least), (0, 1), (320, 60)
    )
    for repetition, temperature, top_p, min_p, typical_p, top_k, num_allowed in extremes:
        row = 4 * torch.randn(320, generator=torch.Generator().manual_seed(1))
        row[num_allowed:] = -torch.inf
        apply_penalties(row, Penalties(repetition, 2.0, 2.0), ids, ids, torch.ones(50))
        filters = Filters(temperature, top_k, top_p, min_p, typical_p)
        for number in (1e-9, 0.5, 1 - 1e-9):
            token_id = draw(row, filters, number)
            assert 0 <= token_id < num_allowed, (repetition, filters)
