"""Indexer scores against float64, and the choice among them against the plain rule, ties included."""

import pytest
import torch

import kernels.indexer as plain
from kernels.triton_indexer import ScoreRows, ScoreTiles, index_scores
from kernels.triton_topk import CHUNK, top_keys
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, pool, randn, relative_error, shuffled_tables, write_rows

PER_BLOCK = 8 if INTERPRETED else 16  # keys of a block, a pool of 4
KEYS = 16 if INTERPRETED else 128
SPLIT = 2 * KEYS
LENGTHS = [0, 1, SPLIT + 3, 2 * SPLIT]  # in keys


def make_keys(lengths, dim, dtype, seed):
    num_blocks = sum(-(-n // PER_BLOCK) for n in lengths) + 3
    (plane,) = pool(num_blocks, [(PER_BLOCK, dim)], dtype)
    tables = shuffled_tables(lengths, PER_BLOCK, num_blocks, seed)
    rows = [randn(n, dim, seed=seed + 1 + s).to(dtype) for s, n in enumerate(lengths)]
    for s in range(len(lengths)):
        write_rows(plane, tables[s], rows[s])
    return plane, tables, rows


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 32)] if INTERPRETED else [(64, 128), (5, 64)])
def test_decode_rows_equal_float64(heads, dim, dtype):
    plane, tables, keys = make_keys(LENGTHS, dim, dtype, seed=1)
    q = randn(len(LENGTHS), heads, dim, seed=2)
    weights = randn(len(LENGTHS), heads, seed=3, dtype=torch.float32)
    rows = ScoreRows(tables, ints(LENGTHS), ints(range(len(LENGTHS))))
    tiles = ScoreTiles(keys=KEYS, split=SPLIT, rows=1, num_warps=4, num_stages=2)
    scores = index_scores(q, weights, plane, rows, most_keys=max(LENGTHS), tiles=tiles)
    for s, n in enumerate(LENGTHS[1:], 1):
        expected = plain.index_scores_reference(*(x.double() for x in (q[s : s + 1], weights[s : s + 1], keys[s])))
        assert relative_error(scores[s, :n], expected[0]) < 1e-3


@pytest.mark.parametrize("rows_together", [1, 2])
def test_rows_of_a_chunk_equal_float64_up_to_what_each_sees(rows_together):
    plane, tables, keys = make_keys([SPLIT + 3], 32, torch.bfloat16, seed=4)
    q, weights = randn(5, 4, 32, seed=5), randn(5, 4, seed=6, dtype=torch.float32)
    visible = [SPLIT + 3, 0, KEYS, KEYS + 1, 7]
    tiles = ScoreTiles(keys=KEYS, split=SPLIT, rows=rows_together, num_warps=4, num_stages=2)
    rows = ScoreRows(tables, ints(visible), None)
    scores = index_scores(q, weights, plane, rows, most_keys=SPLIT + 3, tiles=tiles)
    expected = plain.index_scores_reference(q.double(), weights.double(), keys[0].double())
    for r, n in enumerate(visible):
        if n:
            assert relative_error(scores[r, :n], expected[r, :n]) < 1e-3


def tied(rows, keys, seed):
    """Scores with many equals, zeros of both signs among them."""
    scores = randn(rows, keys, seed=seed, dtype=torch.float32).mul_(2).round_().div_(2)
    scores[:, ::7] = -0.0
    return scores


@pytest.mark.parametrize(
    "num_keys", [40, CHUNK - 1, CHUNK + 1] if INTERPRETED else [40, CHUNK - 1, 3 * CHUNK + 5, 131_072]
)
@pytest.mark.parametrize(
    "make", [tied, lambda r, k, s: randn(r, k, seed=s, dtype=torch.float32)], ids=["tied", "random"]
)
def test_the_best_are_chosen_and_ties_go_to_the_left(num_keys, make):
    visible = [num_keys, 0, 1, min(num_keys, 17), num_keys // 3]
    scores = make(len(visible), num_keys, 7)
    for r, n in enumerate(visible):
        scores[r, n:] = torch.nan
    for count in (16, 2048):
        picks = top_keys(scores, ints(visible), count)
        expected = plain.top_keys(scores.nan_to_num(-torch.inf), torch.tensor(visible, device=DEVICE), count)
        assert torch.equal(picks.long(), expected)


def test_the_torch_form_of_the_choice_follows_the_plain_rule():
    scores, visible = tied(3, 60, 8).cpu(), torch.tensor([60, 5, 33])
    assert torch.equal(plain.top_keys(scores, visible, 16), plain.top_keys_reference(scores, visible, 16))


def test_infinite_and_extreme_scores_keep_their_order():
    scores = torch.tensor([[3e38, -3e38, torch.inf, -torch.inf, 1e-45, -1e-45, 0.0, -0.0]], device=DEVICE)
    for count, expected in ((1, [2]), (2, [0, 2]), (3, [0, 2, 4]), (4, [0, 2, 4, 6]), (6, [0, 2, 4, 5, 6, 7])):
        assert top_keys(scores, ints([8]), count)[0].tolist() == expected


def test_rows_that_lie_apart_are_read_where_they_lie():
    wide = randn(3, 50, seed=9, dtype=torch.float32)
    picks = top_keys(wide[:, :33], ints([33] * 3), 8)
    assert torch.equal(picks, top_keys(wide[:, :33].contiguous(), ints([33] * 3), 8))
