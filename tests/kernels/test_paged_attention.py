"""Paged attention against plain mathematics, and the bytes it promises not to change."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.paged_attention import (
    PagedRows,
    attend_plainly,
    paged_attention,
    paged_attention_reference,
    plan_attention,
)

BLOCK_SIZE = 4
TILE = 16
NUM_BLOCKS = 96
LAYERS_BETWEEN = 3  # a block of one plane is a small part of an image, as in the pools


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Pages:
    """Two planes full of NaN, and sequences written into shuffled blocks of them."""

    def __init__(self, lengths: list[int], seed: int, *, dtype=torch.float32, kv_heads=2, head_dim=8, block_seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, LAYERS_BETWEEN * BLOCK_SIZE, kv_heads, head_dim)
        self.k = torch.full(shape, math.nan, dtype=dtype)[:, BLOCK_SIZE : 2 * BLOCK_SIZE]
        self.v = torch.full(shape, math.nan, dtype=dtype)[:, BLOCK_SIZE : 2 * BLOCK_SIZE]
        free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(block_seed)).tolist()
        width = max(-(-n // BLOCK_SIZE) for n in lengths)
        self.tables = torch.zeros(len(lengths), width, dtype=torch.int64)
        for s, num_keys in enumerate(lengths):
            keys = torch.randn(2, num_keys, kv_heads, head_dim, generator=self.generator).to(dtype)
            for p in range(num_keys):
                if p % BLOCK_SIZE == 0:
                    self.tables[s, p // BLOCK_SIZE] = free.pop()
                block = self.tables[s, p // BLOCK_SIZE]
                self.k[block, p % BLOCK_SIZE] = keys[0, p]
                self.v[block, p % BLOCK_SIZE] = keys[1, p]


def attend(q, pages, rows, tile=TILE, scale=0.3):
    """Runs to the end; returns the result and how often it paused."""
    steps = paged_attention(q, pages.k, pages.v, plan_attention(rows, BLOCK_SIZE, tile, q.dtype), scale)
    pauses = 0
    while True:
        try:
            next(steps)
            pauses += 1
        except StopIteration as stop:
            return stop.value, pauses


def batch(pages, counts, lengths):
    """Rows: the last counts[s] tokens of each sequence."""
    cu_rows = [0]
    for count in counts:
        cu_rows.append(cu_rows[-1] + count)
    starts = tuple(n - c for n, c in zip(lengths, counts, strict=True))
    return PagedRows(pages.tables, starts, tuple(cu_rows))


SHAPES = {
    "one token": ([1], [1]),
    "whole first tile": ([16], [16]),
    "partial first tile": ([13], [13]),
    "chunk on a grid position": ([48], [16]),
    "partial chunk on a grid position": ([43], [11]),
    "chunk off the grid": ([30], [14]),
    "chunk over tile borders": ([61], [50]),
    "decode": ([1, 4, 5, 16, 17, 33, 40], [1] * 7),
    "verify rows": ([9, 20, 34], [3, 8, 2]),
    "chunks beside decode rows": ([40, 3, 29, 18], [20, 1, 9, 2]),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
def test_equals_plain_mathematics(name, heads):
    lengths, counts = SHAPES[name]
    pages = Pages(lengths, seed=1, kv_heads=heads[1])
    q = torch.randn(sum(counts), heads[0], 8, generator=pages.generator)
    rows = batch(pages, counts, lengths)
    out, _ = attend(q, pages, rows)
    expected = paged_attention_reference(q, pages.k, pages.v, rows, 0.3)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_stays_within_its_rounding(name):
    lengths, counts = SHAPES[name]
    pages = Pages(lengths, seed=2, dtype=torch.bfloat16)
    q = torch.randn(sum(counts), 4, 8, generator=pages.generator).bfloat16()
    rows = batch(pages, counts, lengths)
    out, _ = attend(q, pages, rows)
    expected = paged_attention_reference(q, pages.k, pages.v, rows, 0.3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", SHAPES)
def test_the_form_for_other_devices_agrees(name, monkeypatch):
    lengths, counts = SHAPES[name]
    pages = Pages(lengths, seed=3)
    q = torch.randn(sum(counts), 4, 8, generator=pages.generator)
    rows = batch(pages, counts, lengths)
    expected, _ = attend(q, pages, rows)
    calls = []

    def plain(*args, **kwargs):
        calls.append(args)
        return attend_plainly(*args, **kwargs)

    monkeypatch.setattr("kernels.paged_attention._attend", plain)
    out, _ = attend(q, pages, rows)
    assert calls
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_block_ids_change_no_byte(name, dtype):
    lengths, counts = SHAPES[name]
    results = []
    for block_seed in (0, 1, 2):
        pages = Pages(lengths, seed=4, dtype=dtype, block_seed=block_seed)
        q = torch.randn(sum(counts), 4, 8, generator=pages.generator).to(dtype)
        results.append((attend(q, pages, batch(pages, counts, lengths))[0], pages.tables))
    assert not torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][0], results[2][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_unwritten_rows_hold_changes_no_byte(dtype):
    lengths, counts = [43, 7, 18, 30], [11, 1, 3, 9]
    results = []
    for filler in (math.nan, math.inf, 1e30, 0.0):
        pages = Pages(lengths, seed=5, dtype=dtype)
        for plane in (pages.k, pages.v):
            plane[plane.isnan()] = filler
        q = torch.randn(sum(counts), 4, 8, generator=pages.generator).to(dtype)
        results.append(attend(q, pages, batch(pages, counts, lengths))[0])
    assert torch.isfinite(results[0]).all()
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_the_order_of_sequences_changes_no_byte():
    lengths, counts = [43, 7, 18, 30, 1], [11, 1, 3, 20, 1]
    pages = Pages(lengths, seed=6)
    q = torch.randn(sum(counts), 4, 8, generator=pages.generator)
    rows = batch(pages, counts, lengths)
    expected, _ = attend(q, pages, rows)
    order = [3, 1, 4, 0, 2]
    row_ids = [row for s in order for row in range(rows.cu_rows[s], rows.cu_rows[s + 1])]
    moved = batch(pages, [counts[s] for s in order], [lengths[s] for s in order])
    out, _ = attend(q[row_ids], pages, replace(moved, block_tables=pages.tables[order]))
    assert torch.equal(out, expected[row_ids])


def test_a_chunk_pauses_after_each_history_tile():
    pages = Pages([75], seed=7)
    q = torch.randn(11, 4, 8, generator=pages.generator)
    assert attend(q, pages, batch(pages, [11], [75]))[1] == 4


def test_decode_goes_on_where_the_keys_exceed_one_gather(monkeypatch):
    lengths = [40, 33, 70, 5]
    pages = Pages(lengths, seed=8)
    q = torch.randn(4, 4, 8, generator=pages.generator)
    rows = batch(pages, [1] * 4, lengths)
    expected, pauses = attend(q, pages, rows)
    monkeypatch.setattr("kernels.paged_attention.MAX_GATHER_TOKENS", 32)
    out, more_pauses = attend(q, pages, rows)
    assert more_pauses > pauses
    assert torch.equal(out, expected)


def test_a_decode_split_is_a_whole_part_of_the_tile():
    for block_size in (1, 3, 4, 16, 24, 64, 128, 256):
        for blocks in (1, 2, 3, 5, 16):
            pages = Pages([5], seed=9)
            plan = plan_attention(PagedRows(pages.tables, (0,), (0, 1)), block_size, block_size * blocks, torch.float32)
            assert plan.narrow is not None
            assert blocks % plan.narrow.parts[0].blocks.numel() == 0
