"""Paged prefill attention: against float64, and the bytes that it promises not to change."""

import pytest
import torch

from kernels.triton_paged_prefill import (
    KEY_SPLITS,
    SPLIT_STEP,
    ChunkRows,
    KeySplits,
    PrefillTiles,
    paged_prefill,
    plan_prefill,
)
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, attend_exactly, make_pages, randn, relative_error

BLOCK = 16 if INTERPRETED else 64
ROWS = 16 if INTERPRETED else 128
BULK = PrefillTiles(rows=ROWS, keys=BLOCK, num_warps=4, num_stages=2, bulk_copies=True)
PLAIN = PrefillTiles(rows=ROWS, keys=BLOCK, num_warps=4, num_stages=2, bulk_copies=False)
HALF = PrefillTiles(rows=ROWS, keys=BLOCK // 2, num_warps=8, num_stages=3, bulk_copies=True)
WIDE = PrefillTiles(rows=ROWS, keys=2 * BLOCK, num_warps=8, num_stages=2, bulk_copies=False)
# Lengths and, of each, the last rows that form the chunk.
CHUNKS = {
    "alone": ([3 * ROWS], [3 * ROWS]),
    "over history": ([5 * ROWS], [2 * ROWS]),
    "odd": ([2 * ROWS + 5], [ROWS + 3]),
    "several": ([ROWS + 1, 3, 2 * ROWS - 1], [ROWS, 3, ROWS - 1]),
}


def attend(pages, q, lengths, counts, tiles, *, seqs=None, out=None, scale=0.1, key_splits=KEY_SPLITS):
    cu_rows = [0]
    for count in counts:
        cu_rows.append(cu_rows[-1] + count)
    starts = tuple(length - count for length, count in zip(lengths, counts, strict=True))
    chunks = ChunkRows(pages.tables, starts, tuple(cu_rows))
    seqs = tuple(range(len(lengths))) if seqs is None else seqs
    page = pages.k_plane.shape[1]
    plan = plan_prefill(chunks, seqs, block_size=page, rows_per_tile=tiles.rows, key_splits=key_splits)
    return paged_prefill(q, pages.k_plane, pages.v_plane, plan, scale, out=out, tiles=tiles)


def expected_rows(pages, q, lengths, counts, scale=0.1):
    rows = []
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for n in range(length - count + 1, length + 1):
            rows.append(attend_exactly(q[len(rows)], pages.keys[s][:n], pages.values[s][:n], scale))
    return torch.stack(rows)


@pytest.mark.parametrize("tiles", [BULK, PLAIN, HALF, WIDE], ids=["bulk", "plain", "half", "wide"])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_equal_float64(name, tiles):
    lengths, counts = CHUNKS[name]
    head_dim = 32 if INTERPRETED else 128
    pages = make_pages(lengths, 1, head_dim, block_size=BLOCK, dtype=torch.bfloat16, seed=1)
    q = randn(sum(counts), 2, head_dim, seed=2)
    out = attend(pages, q, lengths, counts, tiles)
    assert relative_error(out, expected_rows(pages, q, lengths, counts)) < 4e-3


@pytest.mark.skipif(INTERPRETED, reason="too many tiles")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 1, 64), (6, 3, 80), (2, 2, 96), (8, 2, 256), (2, 1, 192)]
)
def test_head_sizes_equal_float64(heads, kv_heads, head_dim):
    lengths, counts = CHUNKS["odd"]
    tiles = PrefillTiles(rows=ROWS, keys=BLOCK, num_warps=8, num_stages=2, bulk_copies=True)
    pages = make_pages(lengths, kv_heads, head_dim, block_size=BLOCK, dtype=torch.bfloat16, seed=3)
    q = randn(sum(counts), heads, head_dim, seed=4)
    out = attend(pages, q, lengths, counts, tiles)
    assert relative_error(out, expected_rows(pages, q, lengths, counts)) < 4e-3


@pytest.mark.parametrize("tiles", [BULK, PLAIN, HALF, WIDE], ids=["bulk", "plain", "half", "wide"])
def test_split_keys_equal_float64_and_a_chunk_has_its_bytes_beside_any_other(tiles):
    lengths, counts = [4 * SPLIT_STEP + 7, ROWS + 2, 2 * SPLIT_STEP + 2 * ROWS + 1], [3, ROWS, ROWS + 1]
    cut = KeySplits(tiles=4, keys=SPLIT_STEP)
    assert [cut.cut(n - m, m, ROWS)[0] for n, m in zip(lengths, counts, strict=True)] == [3, 1, 2]
    pages = make_pages(lengths, 1, 32, block_size=BLOCK, dtype=torch.bfloat16, seed=9)
    q = randn(sum(counts), 2, 32, seed=10)
    out = attend(pages, q, lengths, counts, tiles, key_splits=cut)
    assert relative_error(out, expected_rows(pages, q, lengths, counts)) < 4e-3
    alone = attend(pages, q[: counts[0]], lengths[:1], counts[:1], tiles, key_splits=cut)
    assert torch.equal(out[: counts[0]], alone)


def test_block_ids_neighbours_and_copies_change_no_byte():
    lengths, counts = [2 * ROWS + 1, ROWS + 3], [ROWS + 2, 5]
    pages = make_pages(lengths, 1, 32, block_size=BLOCK, dtype=torch.bfloat16, seed=5)
    moved = make_pages(lengths, 1, 32, block_size=BLOCK, dtype=torch.bfloat16, seed=5, spare=9)
    assert not torch.equal(moved.tables, pages.tables)
    q = randn(sum(counts), 2, 32, seed=6)
    together = attend(pages, q, lengths, counts, PLAIN)
    assert torch.equal(together, attend(moved, q, lengths, counts, PLAIN))
    assert torch.equal(together, attend(pages, q, lengths, counts, BULK))
    assert torch.equal(together[: counts[0]], attend(pages, q[: counts[0]], lengths[:1], counts[:1], PLAIN))


def test_rows_outside_the_plan_stay_as_they_are():
    lengths, counts = [ROWS, 4], [3, 4]
    pages = make_pages(lengths, 1, 32, block_size=BLOCK, dtype=torch.bfloat16, seed=7)
    q = randn(7, 2, 32, seed=8)
    out = torch.full_like(q, torch.nan)
    attend(pages, q, lengths, counts, PLAIN, seqs=(1,), out=out)
    assert out[:3].isnan().all()
    assert relative_error(out[3:], expected_rows(pages, q, lengths, counts)[3:]) < 4e-3


def test_a_split_may_begin_inside_of_a_block():
    lengths, counts, tiles = [4 * SPLIT_STEP + 7], [3], PrefillTiles(ROWS, 32, 4, 2, bulk_copies=False)
    pages = make_pages(lengths, 1, 32, block_size=2 * SPLIT_STEP, dtype=torch.bfloat16, seed=11)
    q = randn(3, 2, 32, seed=12)
    cut = KeySplits(tiles=16, keys=SPLIT_STEP // 2)
    assert cut.cut(lengths[0] - 3, 3, ROWS) == (5, SPLIT_STEP)
    out = attend(pages, q, lengths, counts, tiles, key_splits=cut)
    assert relative_error(out, expected_rows(pages, q, lengths, counts)) < 4e-3


def test_the_last_split_holds_all_that_only_some_rows_see():
    for start in range(0, 70_000, 1_013):
        for num_rows in (1, 64, 129, 700, 1_024, 4_096):
            count, length = KEY_SPLITS.cut(start, num_rows, 128)
            assert (count - 1) * length <= start
            assert count * length >= start + num_rows
            assert count == 1 or (length % SPLIT_STEP == 0 and count * -(-num_rows // 128) <= KEY_SPLITS.tiles)


def test_a_chunk_beyond_its_table_is_refused():
    table = torch.zeros((1, 2), dtype=torch.int32, device=DEVICE)
    fits = ChunkRows(table, (BLOCK,), (0, BLOCK))
    assert plan_prefill(fits, (0,), block_size=BLOCK, rows_per_tile=ROWS).num_rows == BLOCK
    with pytest.raises(AssertionError, match="cover"):
        plan_prefill(ChunkRows(table, (BLOCK + 1,), (0, BLOCK)), (0,), block_size=BLOCK, rows_per_tile=ROWS)
