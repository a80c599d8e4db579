"""Scores against float64, top-k against a rule written out, pools against pooling the whole sequence at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.indexer import (
    fill_pools,
    gated_pool_keys,
    index_scores_reference,
    mean_pool_keys,
    select_keys,
    top_keys,
    top_keys_reference,
)
from kernels.key_tiles import Span
from tests.kernels.paging import paged

TILE = 64


def make(num_tokens: int, *, pool: int = 1, heads: int = 4, width: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_tokens, heads, width, generator=generator)
    weights = torch.randn(num_tokens, heads, generator=generator)
    keys = torch.randn(num_tokens // pool, width, generator=generator)
    return queries, weights, keys


def table_of(keys: torch.Tensor, rows_per_block: int, seed: int = 0):
    if keys.shape[0] == 0:
        return torch.full((1, rows_per_block, keys.shape[1]), torch.nan), torch.zeros(1, dtype=torch.int64)
    return paged(keys, rows_per_block, seed=seed)


def span_of(keys: torch.Tensor, rows_per_block: int, seed: int):
    plane, table = paged(keys, rows_per_block, seed=seed)
    return plane, Span(0, table, TILE)


@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 127, 128, 129, 301])
def test_selection_follows_the_scores_in_float64(num_tokens: int, pool: int) -> None:
    queries, weights, keys = make(num_tokens, pool=pool)
    plane, table = table_of(keys, 4)
    got = select_keys(queries, weights, plane, Span(0, table, TILE), pool=pool, count=7)
    scores = index_scores_reference(queries.double(), weights.double(), keys.double())
    visible = (torch.arange(num_tokens) + 1) // pool
    assert torch.equal(got.picks, top_keys_reference(scores, visible, 7))


def test_a_chunk_selects_what_the_whole_prompt_selected() -> None:
    queries, weights, keys = make(300)
    plane, table = table_of(keys, 16)
    whole = select_keys(queries, weights, plane, Span(0, table, TILE), pool=1, count=9).picks
    for start in (1, 128, 200, 299):
        part = select_keys(queries[start:], weights[start:], plane, Span(start, table, TILE), pool=1, count=9).picks
        assert torch.equal(part, whole[start:])


def test_equal_scores_keep_the_lowest_keys_at_every_width() -> None:
    for num_tokens in (9, 40, 300, 700):
        queries, weights, keys = make(num_tokens)
        plane, table = table_of(torch.zeros_like(keys), 16)
        picks = select_keys(queries, weights, plane, Span(0, table, TILE), pool=1, count=8).picks
        assert (picks[8:] == torch.arange(8)).all()


def test_more_keys_wanted_than_there_are_gives_all_that_are_visible() -> None:
    queries, weights, keys = make(6)
    plane, table = table_of(keys, 4)
    picks = select_keys(queries, weights, plane, Span(0, table, TILE), pool=1, count=50).picks
    assert picks.shape == (6, 50)
    for row in range(6):
        assert picks[row, : row + 1].tolist() == list(range(row + 1))
        assert (picks[row, row + 1 :] == -1).all()


def test_a_pool_that_closes_at_the_query_is_seen_by_it() -> None:
    queries, weights, keys = make(8, pool=4)
    plane, table = table_of(keys, 4)
    picks = select_keys(queries, weights, plane, Span(0, table, TILE), pool=4, count=2).picks
    assert picks[2].tolist() == [-1, -1]
    assert picks[3].tolist() == [0, -1]
    assert picks[6].tolist() == [0, -1]
    assert picks[7].tolist() == [0, 1]


def test_a_prompt_of_one_token_selects_itself_or_no_pool() -> None:
    queries, weights, keys = make(1)
    plane, table = table_of(keys, 4)
    assert select_keys(queries, weights, plane, Span(0, table, TILE), pool=1, count=2).picks.tolist() == [[0, -1]]
    assert select_keys(queries, weights, plane, Span(0, table, TILE), pool=4, count=2).picks.tolist() == [[-1, -1]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_top_keys_equal_the_written_rule_with_many_ties(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5))
    num_keys = data.draw(st.integers(1, 30))
    values = data.draw(st.lists(st.integers(-2, 2), min_size=num_rows * num_keys, max_size=num_rows * num_keys))
    visible = torch.tensor(data.draw(st.lists(st.integers(0, num_keys), min_size=num_rows, max_size=num_rows)))
    count = data.draw(st.integers(1, 35))
    scores = torch.tensor(values, dtype=torch.float32).view(num_rows, num_keys)
    assert torch.equal(top_keys(scores, visible, count), top_keys_reference(scores, visible, count))


def test_minus_zero_ties_with_zero() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert top_keys(scores, torch.tensor([4]), 2).tolist() == [[0, 1]]


def test_where_the_keys_lie_changes_no_pick() -> None:
    queries, weights, keys = make(200)
    first = select_keys(queries, weights, *span_of(keys, 8, seed=1), pool=1, count=5).picks
    again = select_keys(queries, weights, *span_of(keys, 8, seed=2), pool=1, count=5).picks
    assert torch.equal(first, again)


@pytest.mark.parametrize("cuts", [[13], [1] * 13, [3, 1, 9], [4, 4, 5], [2, 11]])
def test_pools_filled_in_parts_equal_those_of_the_whole(cuts: list[int]) -> None:
    rows = torch.randn(13, 6, generator=torch.Generator().manual_seed(0))
    unfinished = torch.full((3, 6), torch.nan)  # rows beyond start % pool are never read
    made, position = [], 0
    for length in cuts:
        filled = fill_pools(unfinished, rows[position : position + length], start=position, pool=4)
        assert filled.first == position // 4
        made.append(filled.complete)
        unfinished = filled.unfinished
        position += length
    assert torch.equal(torch.cat(made), rows[:12].view(3, 4, 6))
    assert torch.equal(unfinished, torch.cat((rows[12:], torch.zeros(2, 6))))


def test_gated_keys_are_a_softmax_by_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, gates = torch.randn(5, 4, 3, generator=generator), torch.randn(5, 4, 3, generator=generator)
    ape = torch.randn(4, 3, generator=generator)
    got = gated_pool_keys(keys, gates, ape)
    for pool in range(5):
        for channel in range(3):
            shares = (gates[pool, :, channel].double() + ape[:, channel].double()).softmax(0)
            assert abs(float(got[pool, channel]) - float((shares * keys[pool, :, channel].double()).sum())) < 1e-6


def test_mean_keys_are_averaged_in_float32() -> None:
    keys = torch.tensor([[[256.0], [1.0], [1.0], [1.0]]]).bfloat16()
    assert float(mean_pool_keys(keys)) == float(torch.tensor(259 / 4).bfloat16())
