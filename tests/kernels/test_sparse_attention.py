"""Both forms of sparse attention against a masked float64 softmax, and dense attention where everything is selected."""

import pytest
import torch

from kernels import sparse_attention as module
from kernels.indexer import Selection
from kernels.key_tiles import Span
from kernels.mla import mla_attention
from kernels.sparse_attention import (
    selected_mask,
    selected_tokens,
    sparse_attention,
    sparse_attention_reference,
    sparse_mla,
)
from tests.kernels.paging import paged

TILE = 64
HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCALE = WIDTH**-0.5


def make(num_keys: int, *, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_keys, HEADS, WIDTH, generator=generator)
    keys = torch.randn(num_keys, KV_HEADS, WIDTH, generator=generator)
    values = torch.randn(num_keys, KV_HEADS, WIDTH + 1, generator=generator)
    return queries, keys, values


def random_picks(num_rows: int, *, start: int, pool: int, width: int, seed: int = 0) -> Selection:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.full((num_rows, width), -1, dtype=torch.int64)
    for row in range(num_rows):
        visible = (start + row + 1) // pool
        best = torch.randperm(visible, generator=generator)[:width].sort().values
        picks[row, : best.shape[0]] = best
    return Selection(picks, pool)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("start", [0, 5, 130, 299])
def test_both_forms_equal_the_masked_softmax(monkeypatch, start: int, pool: int, gathered: bool) -> None:
    monkeypatch.setattr(module, "DENSE_FACTOR", 0 if gathered else 1 << 20)
    monkeypatch.setattr(module, "GATHER_ELEMENTS", 2000)  # several steps
    queries, keys, values = make(300)
    selection = random_picks(300 - start, start=start, pool=pool, width=6)
    key_plane, table = paged(keys, 16)
    value_plane, _ = paged(values, 16)
    got = sparse_attention(queries[start:], key_plane, value_plane, Span(start, table, TILE), selection, scale=SCALE)
    want = sparse_attention_reference(queries[start:].double(), keys.double(), values.double(), selection, SCALE)
    assert torch.allclose(got.double(), want, atol=2e-5)


@pytest.mark.parametrize("gathered", [False, True])
def test_everything_selected_is_dense_latent_attention(monkeypatch, gathered: bool) -> None:
    monkeypatch.setattr(module, "DENSE_FACTOR", 0 if gathered else 2)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(70, 11, generator=generator)
    queries = torch.randn(70, 3, 11, generator=generator)
    plane, table = paged(rows, 16)
    picks = torch.arange(80).expand(70, 80).masked_fill(torch.arange(80) > torch.arange(70)[:, None], -1)
    span = Span(0, table, TILE)
    got = sparse_mla(queries, plane, span, Selection(picks, 1), latent_dim=7, scale=0.3)
    assert got.shape == (70, 3, 7)
    assert torch.allclose(got, mla_attention(queries, plane, span, latent_dim=7, scale=0.3), atol=2e-6)


def test_a_query_whose_pool_just_closed_has_no_tail_and_may_miss_itself() -> None:
    selection = Selection(torch.tensor([[0, -1], [0, -1]]), 4)
    positions = torch.tensor([7, 8])
    mask = selected_mask(selection, positions, 0, 9)
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert mask[1].nonzero().flatten().tolist() == [0, 1, 2, 3, 8]
    assert selected_tokens(selection, positions)[0].tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, -1, -1]
    assert selected_tokens(selection, positions)[1].tolist() == [0, 1, 2, 3, -1, -1, -1, -1, 8, -1, -1]


@pytest.mark.parametrize("first", [0, 3, 4, 9])
def test_the_mask_of_a_tile_is_a_part_of_the_whole_mask(first: int) -> None:
    selection = random_picks(20, start=3, pool=4, width=2)
    positions = torch.arange(3, 23)
    whole = selected_mask(selection, positions, 0, 23)
    assert torch.equal(selected_mask(selection, positions, first, 17), whole[:, first:17])


def test_a_prompt_of_one_token_attends_to_itself() -> None:
    queries, keys, values = make(1)
    key_plane, table = paged(keys, 4)
    value_plane, _ = paged(values, 4)
    selection = Selection(torch.full((1, 3), -1), 4)
    got = sparse_attention(queries, key_plane, value_plane, Span(0, table, TILE), selection, scale=SCALE)
    assert torch.allclose(got[0], values[0].repeat_interleave(2, dim=0))


def test_where_the_blocks_lie_changes_no_byte() -> None:
    queries, keys, values = make(300)
    for width in (3, 200):  # gathered, walked
        selection = random_picks(100, start=200, pool=1, width=width)
        results = []
        for seed in (1, 2):
            key_plane, table = paged(keys, 16, seed=seed)
            value_plane, _ = paged(values, 16, seed=seed)
            results.append(
                sparse_attention(queries[200:], key_plane, value_plane, Span(200, table, TILE), selection, scale=SCALE)
            )
        assert torch.equal(results[0], results[1])
