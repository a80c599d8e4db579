"""Latent attention over all keys, and latent and grouped attention over selected ones: against float64."""

import pytest
import torch

from kernels.triton_mla import mla_decode, sparse_mla_decode
from kernels.triton_paged_decode import DecodeRows, SplitRule, plan_decode
from kernels.triton_selected import SelectedRows
from kernels.triton_softmax import AttentionTiles
from kernels.triton_sparse_decode import sparse_decode
from tests.kernels.gpu.paged import (
    DEVICE,
    INTERPRETED,
    attend_exactly,
    make_pages,
    pool,
    randn,
    relative_error,
    shuffled_tables,
    write_rows,
)

BLOCK = 16 if INTERPRETED else 64
SPLIT = 32 if INTERPRETED else 256
TILES = AttentionTiles(split=SPLIT, keys=16 if INTERPRETED else 32, heads=16, num_warps=4, num_stages=2)
LENGTHS = [1, SPLIT + 1, 2 * SPLIT, BLOCK - 1]
# Heads, latent and rope widths.
SIZES = [(4, 32, 16), (20, 48, 0)] if INTERPRETED else [(32, 512, 64), (128, 512, 64), (20, 384, 32), (16, 512, 0)]


def make_latents(lengths, width, seed, spare=3):
    """A latent plane, tables, and each sequence's rows."""
    num_blocks = sum(-(-n // BLOCK) for n in lengths) + spare
    (plane,) = pool(num_blocks, [(BLOCK, width)], torch.bfloat16)
    tables = shuffled_tables(lengths, BLOCK, num_blocks, seed)
    rows = [randn(n, width, seed=seed + 1 + s) for s, n in enumerate(lengths)]
    for s in range(len(lengths)):
        write_rows(plane, tables[s], rows[s])
    return plane, tables, rows


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_picks(positions, pool_tokens, width, seed):
    """Some of the complete pools that each row sees, ascending, then -1."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.full((len(positions), width), -1, dtype=torch.int32)
    for r, position in enumerate(positions):
        visible = (position + 1) // pool_tokens
        chosen = torch.randperm(visible, generator=generator)[:width].sort().values
        picks[r, : len(chosen)] = chosen
    return picks.to(DEVICE)


def tokens_of(picks, position, pool_tokens):
    """The tokens of one row's selection and tail."""
    picked = [p * pool_tokens + i for p in picks.tolist() if p >= 0 for i in range(pool_tokens)]
    return picked + list(range((position + 1) // pool_tokens * pool_tokens, position + 1))


def dense(q, plane, tables, lengths, latent_dim, seqs=None):
    rows = DecodeRows(tables, ints(lengths), ints(range(len(lengths)) if seqs is None else seqs))
    rule = SplitRule(SPLIT // 2, SPLIT, 1, SPLIT // 2)
    most = sum(rule.num_splits(n) for n in lengths)
    plan = plan_decode(rows, block_size=BLOCK, rule=rule, most_items=most)
    return mla_decode(q, plane, plan, latent_dim=latent_dim, scale=0.1, tiles=TILES)


@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim"), SIZES)
def test_dense_rows_equal_float64(heads, latent_dim, rope_dim):
    plane, tables, rows = make_latents(LENGTHS, latent_dim + rope_dim, seed=1)
    q = randn(len(LENGTHS), heads, latent_dim + rope_dim, seed=2) * 0.3
    out = dense(q, plane, tables, LENGTHS, latent_dim)
    expected = [attend_exactly(q[s], x[:, None], x[:, None, :latent_dim], 0.1) for s, x in enumerate(rows)]
    assert relative_error(out, torch.stack(expected)) < 4e-3


def test_batch_and_block_ids_change_no_byte_of_dense_rows():
    plane, tables, _ = make_latents(LENGTHS, 48, seed=3)
    moved, moved_tables, _ = make_latents(LENGTHS, 48, seed=3, spare=8)
    q = randn(len(LENGTHS), 4, 48, seed=4)
    out = dense(q, plane, tables, LENGTHS, 32)
    assert not torch.equal(tables, moved_tables)
    assert torch.equal(out, dense(q, moved, moved_tables, LENGTHS, 32))
    assert torch.equal(out[1:2], dense(q[1:2], plane, tables, LENGTHS[1:2], 32, seqs=[1]))


@pytest.mark.parametrize("pool_tokens", [1, 4])
@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim"), SIZES[:2])
def test_selected_latents_equal_float64(heads, latent_dim, rope_dim, pool_tokens):
    plane, tables, rows = make_latents(LENGTHS, latent_dim + rope_dim, seed=5)
    positions = [n - 1 for n in LENGTHS]
    picks = make_picks(positions, pool_tokens, (SPLIT + 20) // pool_tokens, seed=6)
    selected = SelectedRows(picks, pool_tokens, ints(positions), ints(range(len(LENGTHS))), tables)
    q = randn(len(LENGTHS), heads, latent_dim + rope_dim, seed=7) * 0.3
    out = sparse_mla_decode(q, plane, selected, latent_dim=latent_dim, scale=0.1, tiles=TILES)
    for s, x in enumerate(rows):
        held = x[tokens_of(picks[s], positions[s], pool_tokens)][:, None]
        assert relative_error(out[s], attend_exactly(q[s], held, held[..., :latent_dim], 0.1)) < 4e-3


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32)] if INTERPRETED else [(16, 2, 256), (6, 2, 80)])
@pytest.mark.parametrize("pool_tokens", [1, 4])
def test_selected_heads_equal_float64(heads, kv_heads, head_dim, pool_tokens):
    pages = make_pages(LENGTHS, kv_heads, head_dim, block_size=BLOCK, dtype=torch.bfloat16, seed=8)
    positions = [n - 1 for n in LENGTHS]
    picks = make_picks(positions, pool_tokens, (SPLIT + 20) // pool_tokens, seed=9)
    selected = SelectedRows(picks, pool_tokens, ints(positions), ints(range(len(LENGTHS))), pages.tables)
    q = randn(len(LENGTHS), heads, head_dim, seed=10)
    out = sparse_decode(q, pages.k_plane, pages.v_plane, selected, 0.1, tiles=TILES)
    for s in range(len(LENGTHS)):
        held = tokens_of(picks[s], positions[s], pool_tokens)
        expected = attend_exactly(q[s], pages.keys[s][held], pages.values[s][held], 0.1)
        assert relative_error(out[s], expected) < 4e-3


def test_a_padding_row_and_a_pick_that_is_not_yet_there_are_not_read():
    pages = make_pages([BLOCK], 1, 32, block_size=BLOCK, dtype=torch.bfloat16, seed=11)
    picks = ints([[-1, -1, -1], [0, 3, BLOCK - 1]])
    selected = SelectedRows(picks, 1, ints([-1, 3]), ints([0, 0]), pages.tables)
    q = randn(2, 2, 32, seed=12)
    out = sparse_decode(q, pages.k_plane, pages.v_plane, selected, 0.1, tiles=TILES)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    expected = attend_exactly(q[1], pages.keys[0][[0, 3]], pages.values[0][[0, 3]], 0.1)
    assert relative_error(out[1], expected) < 4e-3
