"""Paged decode attention: against float64, and the bytes that it promises not to change."""

from dataclasses import replace

import pytest
import torch

from kernels.gluon_fp8_decode import is_fit
from kernels.triton_paged_decode import SPLITS, DecodeRows, DecodeTiles, SplitRule, paged_decode, plan_decode
from kernels.triton_softmax import MergeTiles, Parts, merge_partials, merge_ragged, merge_reference
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, attend_exactly, make_pages, randn, relative_error

BLOCK = 16 if INTERPRETED else 64
SPLIT = 32 if INTERPRETED else 512
KEYS = 16 if INTERPRETED else 64
RULE = SplitRule(SPLIT // 2, SPLIT, 1, KEYS)  # a row of fewer than SPLIT keys has shorter ones
TILES = DecodeTiles(keys=KEYS, num_warps=4, num_stages=2)
WAYS = [TILES] if INTERPRETED else [TILES, None]  # None: groups of warps, where the planes and the card are fit
RAGGED = [1, SPLIT // 2 + 1, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 5, BLOCK, BLOCK + 1]


def decode(pages, q, lengths, scale, *, tiles: DecodeTiles | None = TILES, room=None, row_seqs=None, v_scale=1.0):
    num_keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    seqs = torch.arange(len(lengths), dtype=torch.int32) if row_seqs is None else torch.tensor(row_seqs).int()
    if tiles is None and not is_fit(q, pages.k_plane):
        pytest.skip("is attended to by tiles")
    rows = DecodeRows(pages.tables, num_keys, seqs.to(DEVICE))
    most = sum(RULE.num_splits(length) for length in lengths) + 2 if room is None else room
    plan = plan_decode(rows, block_size=pages.k_plane.shape[1], rule=RULE, most_items=most)
    return paged_decode(q, pages.k_plane, pages.v_plane, plan, scale, v_scale=v_scale, tiles=tiles)


def expected_rows(pages, q, lengths, scale):
    return torch.stack(
        [attend_exactly(q[s], pages.keys[s][:n], pages.values[s][:n], scale) for s, n in enumerate(lengths)]
    )


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (6, 1, 128)] if INTERPRETED else
    [(4, 2, 64), (9, 3, 80), (32, 8, 128), (6, 1, 128), (16, 1, 128), (16, 2, 192), (16, 2, 256), (40, 1, 256)],
)  # fmt: skip
def test_ragged_rows_equal_float64(heads, kv_heads, head_dim, tiles):
    pages = make_pages(RAGGED, kv_heads, head_dim, block_size=BLOCK, dtype=torch.bfloat16, seed=1)
    q = randn(len(RAGGED), heads, head_dim, seed=2)
    out = decode(pages, q, RAGGED, head_dim**-0.5, tiles=tiles)
    assert relative_error(out, expected_rows(pages, q, RAGGED, head_dim**-0.5)) < 4e-3


@pytest.mark.parametrize("rule", [SPLITS, SplitRule(SPLIT, SPLIT, step=SPLIT), SplitRule(32, 2 * SPLIT, 3, 16)])
def test_splits_lie_at_multiples_of_what_the_row_says(rule):
    ends = {length * k for length in (rule.shortest, rule.longest) for k in (1, rule.count, 2 * rule.count)}
    lengths = sorted({max(1, end + d) for end in ends for d in (-1, 0, 1)})
    expected = [
        [row, begin, min(begin + rule.length(n), n), row]
        for row, n in enumerate(lengths)
        for begin in range(0, n, rule.length(n))
    ]
    ids = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    num_keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(len(lengths), -(-lengths[-1] // BLOCK), dtype=torch.int64, device=DEVICE)
    most = sum(map(rule.num_splits, lengths))
    plan = plan_decode(DecodeRows(tables, num_keys, ids), block_size=BLOCK, rule=rule, most_items=most)
    assert plan.items.tolist() == expected
    assert plan.num_items.tolist() == list(map(rule.num_splits, lengths))


@pytest.mark.parametrize("rule", [SplitRule(4, 16, 3, 2), SplitRule(4, 4, 5, 4), SplitRule(2, 9, 1, 1)])
def test_room_for_a_row_is_room_for_every_shorter_one(rule):
    for n in range(1, 8 * rule.longest * rule.count):
        assert rule.most_splits(n) == max(map(rule.num_splits, range(1, n + 1)))
        assert rule.length(n) % rule.step == 0
        shorter = rule.length(n) - rule.step
        longer_than_need_be = shorter >= rule.shortest and -(-n // shorter) <= rule.count
        assert not longer_than_need_be


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("head_dim", [64] if INTERPRETED else [64, 128, 256])
def test_fp8_planes_equal_float64_of_the_same_values(head_dim, tiles):
    lengths = [SPLIT + 3, 7, 3 * SPLIT + BLOCK]
    pages = make_pages(lengths, 2, head_dim, block_size=BLOCK, dtype=torch.float8_e4m3fn, seed=3)
    q = randn(3, 8, head_dim, seed=4) * 100  # beyond what float16 would hold times a head's width
    out = decode(pages, q, lengths, 0.01, v_scale=0.5, tiles=tiles)
    assert relative_error(out, 0.5 * expected_rows(pages, q, lengths, 0.01)) < 4e-3


def test_a_tile_may_span_blocks():
    lengths = [SPLIT + 9, 2 * SPLIT]
    pages = make_pages(lengths, 1, 64, block_size=KEYS // 2, dtype=torch.bfloat16, seed=5)
    q = randn(2, 4, 64, seed=6)
    assert relative_error(decode(pages, q, lengths, 0.1), expected_rows(pages, q, lengths, 0.1)) < 4e-3


def test_a_strided_query_is_read_where_it_lies():
    lengths = [SPLIT + 2, 5]
    pages = make_pages(lengths, 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=7)
    wide = randn(2, 8, 2, 64, seed=8)
    out = decode(pages, wide[:, :, 1], lengths, 0.1)
    assert torch.equal(out, decode(pages, wide[:, :, 1].contiguous(), lengths, 0.1))


@pytest.mark.parametrize("tiles", WAYS)
def test_batch_block_ids_and_programs_change_no_byte(tiles):
    lengths = [2 * SPLIT + 3, SPLIT, 9]
    pages = make_pages(lengths, 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=9)
    q = randn(3, 4, 64, seed=10)
    together = decode(pages, q, lengths, 0.1, tiles=tiles)
    few = replace(TILES, most_programs=3) if tiles else None
    assert torch.equal(together, decode(pages, q, lengths, 0.1, tiles=few, room=40))
    for s, length in enumerate(lengths):
        assert torch.equal(together[s], decode(pages, q[s : s + 1], [length], 0.1, row_seqs=[s], tiles=tiles)[0])
    moved = make_pages(lengths, 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=9, spare=11)
    assert not torch.equal(moved.tables, pages.tables)
    assert torch.equal(together, decode(moved, q, lengths, 0.1, tiles=tiles))


@pytest.mark.skipif(INTERPRETED, reason="takes too long")
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_row_of_a_full_card_gives_the_bytes_it_gives_alone(head_dim):
    lengths = [3000 + 997 * s for s in range(40)]
    pages = make_pages(lengths, 8, head_dim, block_size=BLOCK, dtype=torch.float8_e4m3fn, seed=31)
    q = randn(len(lengths), 32, head_dim, seed=32)
    together = decode(pages, q, lengths, 0.1, tiles=None)
    for s in (0, 17, 39):
        alone = decode(pages, q[s : s + 1], lengths[s : s + 1], 0.1, row_seqs=[s], tiles=None)
        assert torch.equal(together[s], alone[0])


@pytest.mark.parametrize("tiles", WAYS)
def test_verification_rows_give_the_bytes_of_decode_steps(tiles):
    length = SPLIT + 2
    pages = make_pages([length], 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=11)
    q = randn(3, 4, 64, seed=12)
    lengths = [length - 2, length - 1, length]
    together = decode(pages, q, lengths, 0.1, row_seqs=[0, 0, 0], tiles=tiles)
    for r, n in enumerate(lengths):
        assert torch.equal(together[r], decode(pages, q[r : r + 1], [n], 0.1, row_seqs=[0], tiles=tiles)[0])


@pytest.mark.parametrize("tiles", WAYS)
def test_a_padding_row_is_zero_and_reads_nothing(tiles):
    pages = make_pages([9], 1, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=13)
    q = randn(2, 2, 64, seed=14)
    out = decode(pages, q, [9, 0], 0.1, row_seqs=[0, 1 << 20], tiles=tiles)
    nothing = decode(pages, q, [0, 0], 0.1, room=3, tiles=tiles)
    assert torch.equal(nothing, torch.zeros_like(nothing))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].isfinite().all()


@pytest.mark.parametrize("tiles", WAYS)
def test_a_row_without_room_is_nan_and_harms_no_row_before_it(tiles):
    lengths = [SPLIT, 2 * SPLIT]
    pages = make_pages(lengths, 1, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=15)
    q = randn(2, 2, 64, seed=16)
    needed = sum(RULE.num_splits(length) for length in lengths)
    enough = decode(pages, q, lengths, 0.1, room=needed, tiles=tiles)
    short = decode(pages, q, lengths, 0.1, room=needed - 1, tiles=tiles)
    assert torch.equal(short[0], enough[0])
    assert short[1].isnan().all()
    assert enough.isfinite().all()


def test_more_keys_than_the_table_has_blocks_for_is_nan():
    pages = make_pages([SPLIT], 1, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=17)
    capacity = pages.tables.shape[1] * BLOCK
    q = randn(1, 2, 64, seed=18)
    assert decode(pages, q, [capacity + 1], 0.1).isnan().all()


def test_merged_partials_equal_float64_and_skip_what_was_not_written():
    outs, lses = randn(3, 41, 2, 80, seed=19, dtype=torch.float32), 4 * randn(3, 41, 2, seed=20, dtype=torch.float32)
    lses[0, 5] = lses[1, 40] = -torch.inf
    outs[0, 5] = outs[1, 40] = torch.nan
    lses[2] = -torch.inf
    out = torch.full((3, 2, 80), torch.nan, device=DEVICE)
    lse = torch.full((3, 2), torch.nan, device=DEVICE)
    merge_partials(outs, lses, out, lse)
    assert relative_error(out[:2], merge_reference(outs, lses)[:2]) < 1e-6
    torch.testing.assert_close(lse, torch.logsumexp(lses, 1))
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_how_a_merge_is_cut_changes_no_byte():
    counts, heads, dim = ([1, 0, 3, 18] if INTERPRETED else [1, 0, 3, 9, 41, 64, 65, 200]), 2, 40
    num_parts = sum(counts)
    outs, lses = (randn(num_parts, heads, *width, seed=21, dtype=torch.float32) for width in ((dim,), ()))
    first = torch.tensor([0, *counts], dtype=torch.int32, device=DEVICE).cumsum(0).int()
    parts = Parts(first, torch.tensor(counts, dtype=torch.int32, device=DEVICE))
    made: list[torch.Tensor] = []
    for cut in (None, MergeTiles(8, 64, 1), MergeTiles(16, 32, 1), MergeTiles(64, 16, 2), MergeTiles(32, 64, 4)):
        made.append(torch.full((len(counts), heads, dim), torch.nan, device=DEVICE))
        merge_ragged(outs, lses, parts, made[-1], tiles=cut)
    assert all(torch.equal(made[0], other) for other in made)
    for row, (begin, count) in enumerate(zip(first.tolist(), counts, strict=False)):
        own = outs[begin : begin + count], lses[begin : begin + count]
        assert relative_error(made[0][row], merge_reference(own[0][None], own[1][None])[0]) < 1e-6 or not count
    assert torch.equal(made[0][1], torch.zeros_like(made[0][1]))


@pytest.mark.skipif(INTERPRETED, reason="needs more than 4 GiB of device memory")
def test_offsets_pass_the_range_of_int32():
    block_bytes = 1 << 22
    num_blocks = (1 << 33) // block_bytes // 2 + 40
    images = torch.full((num_blocks, block_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    size = 64 * 2 * 128 * 2
    k_plane, v_plane = (images[:, i * size : (i + 1) * size].view(torch.bfloat16).view(-1, 64, 2, 128) for i in (0, 1))
    last = num_blocks - 1
    assert last * k_plane.stride(0) > 1 << 31
    keys, values = randn(64, 2, 128, seed=21), randn(64, 2, 128, seed=22)
    k_plane[last], v_plane[last] = keys, values
    rows = DecodeRows(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[last]], [64], [0])))
    q = randn(1, 8, 128, seed=23)
    out = paged_decode(
        q,
        k_plane,
        v_plane,
        plan_decode(rows, block_size=64, rule=RULE, most_items=1),
        0.1,
        tiles=TILES,
    )
    assert relative_error(out[0], attend_exactly(q[0], keys, values, 0.1)) < 4e-3
