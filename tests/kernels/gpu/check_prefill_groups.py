"""Chunk attention by groups of warps: beside float64 on a card; anywhere, that it refuses what it is not made for."""

import pytest
import torch

from kernels.gluon_interface import is_available
from kernels.gluon_paged_prefill import ROWS_PER_TILE, grouped_prefill
from kernels.triton_paged_prefill import KEY_SPLITS, ChunkRows, KeySplits, plan_prefill
from tests.kernels.gpu.check_paged_prefill import expected_rows
from tests.kernels.gpu.paged import INTERPRETED, make_pages, randn, relative_error

BLOCK = 64
LENGTHS, COUNTS = [300, 129, 64, 1000], [300, 1, 64, 130]


def attend(pages, q, lengths, counts, rows_per_tile=ROWS_PER_TILE, key_splits=KEY_SPLITS):
    cu_rows = [0]
    for count in counts:
        cu_rows.append(cu_rows[-1] + count)
    starts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
    chunks = ChunkRows(pages.tables, starts, tuple(cu_rows))
    seqs = tuple(range(len(lengths)))
    page = pages.k_plane.shape[1]
    plan = plan_prefill(chunks, seqs, block_size=page, rows_per_tile=rows_per_tile, key_splits=key_splits)
    out = torch.full_like(q, torch.nan)
    return grouped_prefill(q, pages.k_plane, pages.v_plane, plan, 0.1, out=out)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no groups of warps")
@pytest.mark.skipif(not is_available(), reason="this Triton has another interface")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 128), (2, 2, 64), (4, 1, 256)])
def test_chunks_equal_float64_and_block_ids_change_no_byte(heads, kv_heads, head_dim):
    outs = []
    for spare in (3, 9):
        pages = make_pages(LENGTHS, kv_heads, head_dim, block_size=BLOCK, dtype=torch.bfloat16, seed=1, spare=spare)
        q = randn(sum(COUNTS), heads, head_dim, seed=2)
        outs.append(attend(pages, q, LENGTHS, COUNTS))
        assert relative_error(outs[-1], expected_rows(pages, q, LENGTHS, COUNTS)) < 4e-3
    assert torch.equal(outs[0], outs[1])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no groups of warps")
@pytest.mark.skipif(not is_available(), reason="this Triton has another interface")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 128), (2, 2, 64), (4, 1, 256)])
@pytest.mark.parametrize(("lengths", "counts"), [([9000], [61]), ([20_481, 300], [200, 129]), ([65_600], [1000])])
def test_split_keys_equal_the_whole_and_poisoned_blocks_change_nothing(heads, kv_heads, head_dim, lengths, counts):
    outs = []
    for cut in (KEY_SPLITS, KeySplits(tiles=1, keys=1)):
        pages = make_pages(lengths, kv_heads, head_dim, block_size=BLOCK, dtype=torch.bfloat16, seed=5, spare=7)
        q = randn(sum(counts), heads, head_dim, seed=6)
        outs.append(attend(pages, q, lengths, counts, key_splits=cut))
    assert KEY_SPLITS.cut(lengths[0] - counts[0], counts[0], ROWS_PER_TILE)[0] > 1
    assert relative_error(outs[0], outs[1].double()) < 4e-3
    again = attend(pages, q[: counts[0]], lengths[:1], counts[:1])
    assert torch.equal(again, outs[0][: counts[0]])


def test_other_blocks_and_other_tiles_are_refused():
    q = randn(3, 2, 64, seed=3)
    small = make_pages([3], 2, 64, block_size=16, dtype=torch.bfloat16, seed=4)
    with pytest.raises(AssertionError):
        attend(small, q, [3], [3])
    pages = make_pages([3], 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=4)
    with pytest.raises(AssertionError, match="other tiles"):
        attend(pages, q, [3], [3], rows_per_tile=64)
