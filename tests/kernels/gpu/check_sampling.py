"""Draws on the device against kernels/sampling.py, for every filter and for distributions of every shape."""

import pytest
import torch

from kernels.sampling import Filters, draw
from kernels.sampling_rows import NOT_FINITE, SamplingRows
from kernels.triton_sampling import SAMPLING_TILES, SamplingTiles
from kernels.triton_sampling import draw_rows as draw_rows_with
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, randn

TILES = SamplingTiles(sorted=64, listed=256, width=256) if INTERPRETED else SAMPLING_TILES
MANY = TILES.sorted + 20  # more than are sorted
VOCABS = [700, 300] if INTERPRETED else [500, 9000, 151_936, 300_000]
NUMBERS = [0.31] if INTERPRETED else [1e-9, *(i / 37 for i in range(1, 37)), 1 - 1e-9]
FILTERS = [
    Filters(temperature=0.0),
    Filters(),
    Filters(temperature=0.6),
    Filters(top_k=1),
    Filters(top_k=50),
    Filters(top_p=0.9),
    Filters(min_p=0.1),
    Filters(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
]
SEARCHED = [
    Filters(top_k=MANY, top_p=0.97),
    Filters(top_p=0.995, temperature=3.0),
    Filters(min_p=1e-4, temperature=2.0),
    Filters(top_k=2 * MANY, top_p=0.999, min_p=1e-3, temperature=4.0),
]


def draw_rows(logits, rows):
    return draw_rows_with(logits, rows, tiles=TILES)


def sampling_rows(filters, numbers):
    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return SamplingRows(
        temperature=column([f.temperature for f in filters], torch.float32),
        top_k=column([f.top_k for f in filters], torch.int32),
        top_p=column([f.top_p for f in filters], torch.float64),
        min_p=column([f.min_p for f in filters], torch.float64),
        number=column(numbers, torch.float64),
    )


def compare(logits, filters, numbers):
    """One row of logits, each of the filters with each of the numbers."""
    pairs = [(f, n) for f in filters for n in numbers]
    wide = logits[None].expand(len(pairs), -1).contiguous()
    got = draw_rows(wide, sampling_rows(*map(list, zip(*pairs, strict=True)))).tolist()
    for (rule, number), token in zip(pairs, got, strict=True):
        assert token == draw(logits.float(), rule, number), (rule, number)


@pytest.mark.parametrize("vocab_size", VOCABS[:1] if INTERPRETED else VOCABS)
@pytest.mark.parametrize("spread", [3.0] if INTERPRETED else [3.0, 0.5])
def test_draws_equal_the_reference(vocab_size, spread):
    compare(randn(vocab_size, seed=vocab_size, dtype=torch.float32) * spread, FILTERS, NUMBERS)


@pytest.mark.parametrize("rule", SEARCHED)
def test_more_than_the_candidates_are_searched_as_exactly(rule):
    compare(randn(VOCABS[1], seed=3, dtype=torch.float32), [rule], NUMBERS)


def test_many_equal_values_go_by_rising_id():
    logits = (randn(VOCABS[1], seed=4, dtype=torch.float32) * 2).round() / 2
    filters = [Filters(top_k=30), Filters(top_p=0.4), Filters(top_k=MANY, top_p=0.9)]
    compare(logits, filters if INTERPRETED else [*filters, *FILTERS, *SEARCHED], NUMBERS)
    compare(torch.zeros(301, device=DEVICE), [Filters(), Filters(top_k=33), Filters(top_p=0.9)], NUMBERS)


def test_a_number_next_to_one_draws_the_last_token_that_is_kept():
    """Sums by which a search narrows its range down are rounded, and once led below all that min-p keeps."""
    logits = (randn(9000, seed=4, dtype=torch.float32) * 2).round() / 2
    rule = Filters(min_p=1e-4, temperature=2.0)
    got = draw_rows_with(logits[None], sampling_rows([rule], [1 - 1e-9]), tiles=SAMPLING_TILES)
    assert got.tolist() == [draw(logits, rule, 1 - 1e-9)]


def test_bfloat16_logits_and_strided_rows_are_read_where_they_lie():
    wide = randn(3, 2 * 600, seed=5)
    rows = sampling_rows([Filters(top_k=5)] * 3, [0.2, 0.5, 0.9])
    got = draw_rows(wide[:, :600], rows).tolist()
    assert got == [draw(wide[r, :600].float(), Filters(top_k=5), n) for r, n in enumerate((0.2, 0.5, 0.9))]


def test_masked_tokens_and_nan_are_never_drawn():
    logits = torch.full((2000,), -torch.inf, device=DEVICE)
    logits[1234] = 0.5
    logits[7] = torch.nan
    filters = FILTERS[::3] if INTERPRETED else [*FILTERS, *SEARCHED]
    for number in (0.5,) if INTERPRETED else (1e-12, 0.5, 1 - 1e-12):
        got = draw_rows(logits[None].repeat(len(filters), 1), sampling_rows(filters, [number] * len(filters)))
        assert got.tolist() == [1234] * len(filters)


def test_logits_as_low_as_they_can_be_are_drawn_from():
    lowest = torch.full((300,), torch.finfo(torch.float32).min, device=DEVICE)
    compare(lowest, [Filters(top_k=5)], NUMBERS)


def test_a_row_without_any_token_gives_one_that_exists():
    logits = torch.full((len(FILTERS), 300), -torch.inf, device=DEVICE)
    logits[:4] = torch.nan
    assert draw_rows(logits, sampling_rows(FILTERS, [0.5] * len(FILTERS))).tolist() == [0] * len(FILTERS)


def test_a_row_with_a_logit_that_is_no_finite_number_is_refused_where_asked():
    logits = randn(5, VOCABS[0], seed=4, dtype=torch.float32)
    for r, value in enumerate((torch.nan, -torch.inf, torch.inf)):
        logits[r, -1] = value
    rows = sampling_rows([Filters(top_k=5)] * 4 + [Filters(temperature=0.0)], [0.4] * 5)
    assert draw_rows_with(logits, rows, refuses=True).tolist() == [
        *[NOT_FINITE] * 3,
        *draw_rows(logits, rows).tolist()[3:],
    ]


def test_a_row_alone_gives_the_token_it_gives_in_a_batch():
    filters = FILTERS[1::3]
    logits = randn(len(filters), VOCABS[0], seed=6, dtype=torch.float32)
    together = draw_rows(logits, sampling_rows(filters, [0.4] * len(filters))).tolist()
    for r, rule in enumerate(filters):
        assert draw_rows(logits[r : r + 1], sampling_rows([rule], [0.4])).tolist() == together[r : r + 1]
