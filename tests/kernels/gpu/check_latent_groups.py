"""Latent attention by groups of warps: beside float64 on a card; anywhere, that it refuses what it is not made for."""

import pytest
import torch

from kernels.gluon_interface import is_available
from kernels.gluon_latent import BLOCK, LATENT_DIM, ROPE_DIM, grouped_mla, grouped_sparse_mla
from kernels.triton_paged_decode import DecodeRows, SplitRule, plan_decode
from kernels.triton_selected import SelectedRows
from tests.kernels.gpu.check_latent import ints, make_latents, make_picks, tokens_of
from tests.kernels.gpu.paged import INTERPRETED, attend_exactly, randn, relative_error

WIDTH = LATENT_DIM + ROPE_DIM
SPLIT = 256
LENGTHS = [1, SPLIT + 1, 3 * SPLIT, BLOCK - 1, 2 * SPLIT + 70, BLOCK]
on_a_card = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter has no groups of warps"),
    pytest.mark.skipif(not is_available(), reason="this Triton has another interface"),
]


def dense(q, plane, tables, lengths, seqs=None):
    rows = DecodeRows(tables, ints(lengths), ints(range(len(lengths)) if seqs is None else seqs))
    rule = SplitRule(SPLIT // 2, SPLIT, 4)
    most = sum(rule.most_splits(n) for n in lengths) + 2  # as a captured graph's plan has room for more
    plan = plan_decode(rows, block_size=BLOCK, rule=rule, most_items=most)
    return grouped_mla(q, plane, plan, scale=0.1)


class TestOnACard:
    pytestmark = on_a_card

    @pytest.mark.parametrize("heads", [1, 32, 64, 100, 128])
    def test_dense_rows_equal_float64_and_batch_and_block_ids_change_no_byte(self, heads):
        plane, tables, rows = make_latents(LENGTHS, WIDTH, seed=1)
        moved, moved_tables, _ = make_latents(LENGTHS, WIDTH, seed=1, spare=8)
        q = randn(len(LENGTHS), heads, WIDTH, seed=2) * 0.3
        out = dense(q, plane, tables, LENGTHS)
        expected = [attend_exactly(q[s], x[:, None], x[:, None, :LATENT_DIM], 0.1) for s, x in enumerate(rows)]
        assert relative_error(out, torch.stack(expected)) < 4e-3
        assert torch.equal(out, dense(q, moved, moved_tables, LENGTHS))
        assert torch.equal(out[4:5], dense(q[4:5], plane, tables, LENGTHS[4:5], seqs=[4]))

    @pytest.mark.parametrize("heads", [32, 128])
    def test_programs_that_take_several_items_change_no_byte(self, heads):
        lengths = [140 * SPLIT + 33, 5 * SPLIT + 1]
        plane, tables, rows = make_latents(lengths, WIDTH, seed=12)
        q = randn(2, heads, WIDTH, seed=13) * 0.3
        out = dense(q, plane, tables, lengths)
        expected = [attend_exactly(q[s], x[:, None], x[:, None, :LATENT_DIM], 0.1) for s, x in enumerate(rows)]
        assert relative_error(out, torch.stack(expected)) < 4e-3
        assert torch.equal(out[1:], dense(q[1:], plane, tables, lengths[1:], seqs=[1]))
        picks = make_picks([lengths[1] - 1] * 150, 1, 300, seed=14)
        many = SelectedRows(picks, 1, ints([lengths[1] - 1] * 150), ints([1] * 150), tables)
        few = SelectedRows(picks[140:], 1, many.positions[140:], many.row_seqs[140:], tables)
        q = randn(150, heads, WIDTH, seed=15) * 0.3
        out = grouped_sparse_mla(q, plane, many, scale=0.1)
        assert torch.equal(out[140:], grouped_sparse_mla(q[140:], plane, few, scale=0.1))
        held = rows[1][picks[149].long()][:, None]
        assert relative_error(out[149], attend_exactly(q[149], held, held[..., :LATENT_DIM], 0.1)) < 4e-3

    def test_a_row_without_keys_is_zero(self):
        plane, tables, _ = make_latents(LENGTHS[:2], WIDTH, seed=3)
        out = dense(randn(2, 32, WIDTH, seed=4), plane, tables, [0, 5])
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out[1].isfinite().all()

    @pytest.mark.parametrize("split", [SPLIT, 4096])
    @pytest.mark.parametrize("pool_tokens", [1, 4])
    @pytest.mark.parametrize("heads", [32, 128])
    def test_selected_rows_equal_float64(self, heads, pool_tokens, split):
        plane, tables, rows = make_latents(LENGTHS, WIDTH, seed=5)
        positions = [n - 1 for n in LENGTHS]
        picks = make_picks(positions, pool_tokens, (SPLIT + 20) // pool_tokens, seed=6)
        seqs = ints(range(len(LENGTHS)))
        q = randn(len(LENGTHS), heads, WIDTH, seed=7) * 0.3
        out = grouped_sparse_mla(
            q, plane, SelectedRows(picks, pool_tokens, ints(positions), seqs, tables), scale=0.1, split=split
        )
        for s, x in enumerate(rows):
            held = x[tokens_of(picks[s], positions[s], pool_tokens)][:, None]
            assert relative_error(out[s], attend_exactly(q[s], held, held[..., :LATENT_DIM], 0.1)) < 4e-3
        alone = SelectedRows(picks[2:3], pool_tokens, ints(positions[2:3]), seqs[2:3], tables)
        assert torch.equal(out[2:3], grouped_sparse_mla(q[2:3], plane, alone, scale=0.1, split=split))

    def test_a_row_that_attends_to_nothing_is_zero(self):
        plane, tables, _ = make_latents([BLOCK], WIDTH, seed=8)
        picks = ints([[-1, -1, -1], [0, 3, BLOCK - 1]])
        q = randn(2, 16, WIDTH, seed=9)
        out = grouped_sparse_mla(q, plane, SelectedRows(picks, 1, ints([-1, 3]), ints([0, 0]), tables), scale=0.1)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out[1].isfinite().all()


def test_other_widths_and_other_plans_are_refused():
    plane, tables, _ = make_latents([3], 48, seed=10)
    with pytest.raises(AssertionError):
        dense(randn(1, 4, 48, seed=11), plane, tables, [3])
    plane, tables, _ = make_latents([3], WIDTH, seed=10)
    with pytest.raises(AssertionError, match="another batch"):
        dense(randn(2, 4, WIDTH, seed=11), plane, tables, [3])
