"""Causal attention of chunks of rows over their paged history.

A program takes a tile of a chunk's rows and one query head, and walks the keys from position 0 in tiles at absolute
multiples of `keys`, in order, with a running softmax in float32. A row's bytes follow from its query, its position and
the keys: tiles that it does not see are walked past without touching it.

A chunk of few rows over a long history is a handful of programs that walk for long, with most of a card idle. Its keys
are split then, and the splits merged in order of position. How many there are follows from the chunk alone, its rows
and its keys, so that one and the same chunk has the same bytes in any batch.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from kernels.triton_pages import blocks_of, bulk_rows, tile_rows
from kernels.triton_softmax import LOG2E, finish_rows, fold_tile, merge_partials

SPLIT_STEP = 128  # keys: splits begin at its multiples, and are whole numbers of tiles of keys


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How a launch is cut. `keys` decides bytes, the rest only speed."""

    rows: int  # of a program
    keys: int  # that a program takes at once
    num_warps: int
    num_stages: int  # tiles in flight
    bulk_copies: bool  # whole blocks by the copy engine, where a tile is a block and head_dim a power of two


def prefill_tiles(head_dim: int) -> PrefillTiles:
    """What was fastest on an H200 of what fits into registers."""
    if head_dim <= 128:
        return PrefillTiles(rows=64, keys=64, num_warps=4, num_stages=3, bulk_copies=True)
    return PrefillTiles(rows=128, keys=32, num_warps=8, num_stages=3, bulk_copies=True)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows [cu_rows[s], cu_rows[s + 1]) belong to sequence s, at consecutive positions from starts[s]."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32 or int64
    starts: tuple[int, ...]
    cu_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeySplits:
    """How far the keys of a chunk are split; decides bytes."""

    tiles: int  # of rows times splits, at most: with 16 heads and more that fills a card
    keys: int  # of a split, at least

    def cut(self, start: int, num_rows: int, rows_per_tile: int) -> tuple[int, int]:
        """How many splits a chunk at position `start` has, and how many keys each but the last.

        The last one holds every key that some rows see and others do not.
        """
        num_keys = start + num_rows
        most = min(self.tiles // -(-num_rows // rows_per_tile), num_keys // self.keys)
        for count in range(most, 1, -1):
            length = -(-num_keys // (count * SPLIT_STEP)) * SPLIT_STEP
            if (count - 1) * length <= start:
                return count, length
        return 1, num_keys


KEY_SPLITS = KeySplits(tiles=16, keys=4096)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work of a batch; made once a step and read by every layer."""

    block_tables: torch.Tensor
    # [num_items, 7] int32: sequence, first row, number of rows, position of the first row, first key, key after the
    # last, split.
    items: torch.Tensor
    num_rows: int
    rows_per_tile: int
    num_splits: int  # of the sequence that has most


def plan_prefill(
    chunks: ChunkRows,
    seqs: tuple[int, ...],
    *,
    block_size: int,
    rows_per_tile: int,
    key_splits: KeySplits = KEY_SPLITS,
) -> PrefillPlan:
    """Cuts the rows of some sequences into tiles, those with most keys first so that no long one is left at the end.

    Raises AssertionError where a block table does not cover its rows.
    """
    capacity = chunks.block_tables.shape[1] * block_size
    spans = list(pairwise(chunks.cu_rows))
    items: list[tuple[int, ...]] = []
    for s in seqs:
        (first, last), start = spans[s], chunks.starts[s]
        assert start + last - first <= capacity, "block table does not cover the rows"
        count, length = key_splits.cut(start, last - first, rows_per_tile)
        for row in range(first, last, rows_per_tile):
            num_rows, position = min(rows_per_tile, last - row), start + row - first
            for split in range(count):
                end = position + num_rows if split == count - 1 else (split + 1) * length
                items.append((s, row, num_rows, position, split * length, end, split))
    items.sort(key=lambda item: item[4] - item[5])
    table = torch.tensor(items, dtype=torch.int32).to(chunks.block_tables.device, non_blocking=True)
    num_splits = 1 + max((item[6] for item in items), default=0)
    return PrefillPlan(chunks.block_tables, table, chunks.cu_rows[-1], rows_per_tile, num_splits)


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Where the programs of a plan write: rows in the end, or the parts that they are merged from."""

    out: torch.Tensor  # [num_rows, num_heads, head_dim]
    outs: torch.Tensor  # [num_rows, num_splits, num_heads, head_dim] float32; where nothing is split, `out`
    lses: torch.Tensor | None  # [num_rows, num_splits, num_heads] float32

    @staticmethod
    def of(q: torch.Tensor, plan: PrefillPlan, out: torch.Tensor | None) -> "PrefillOutput":
        """For rows `q`, in `out` if there is one."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        if plan.num_splits == 1:
            return PrefillOutput(out, out.unsqueeze(1), None)
        num_rows, num_heads, head_dim = q.shape
        shape = (num_rows, plan.num_splits, num_heads)
        outs = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        # Some sequences may have fewer splits than others.
        return PrefillOutput(out, outs, torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device))

    def merged(self) -> torch.Tensor:
        """`out`, with all of its rows."""
        if self.lses is not None:
            merge_partials(self.outs, self.lses, self.out, None)
        return self.out


@triton.jit
def _attend_chunk_kernel(
    q_ptr,  # [num_rows, num_heads, HEAD_DIM]
    k_ptr,  # [num_blocks, PAGE, num_kv_heads, HEAD_DIM]
    v_ptr,  # as k
    k_bulk,  # descriptors of the same as [num_blocks, num_kv_heads, PAGE, HEAD_DIM], or None
    v_bulk,
    items_ptr,
    tables_ptr,
    out_ptr,  # [num_rows, num_splits, num_heads, HEAD_DIM]
    lse_ptr,  # [num_rows, num_splits, num_heads], written where SPLIT
    scale,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded to a power of two
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BULK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    item_ptr = items_ptr + tl.program_id(0) * 7
    head = tl.program_id(1)
    kv_head = head // GROUP
    table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
    first_row = tl.load(item_ptr + 1).to(tl.int64)
    num_rows = tl.load(item_ptr + 2)
    position = tl.load(item_ptr + 3)
    begin = tl.load(item_ptr + 4)
    end = tl.load(item_ptr + 5)
    split = tl.load(item_ptr + 6)
    num_keys = position + num_rows
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)
    steps = tl.arange(0, KEYS)
    inside = channels < HEAD_DIM
    held = (rows < num_rows)[:, None] & inside[None, :]
    q_ptr += first_row * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + rows[:, None] * q_row_stride + channels[None, :], mask=held, other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)

    # Every row of the tile sees all of these keys.
    common = tl.minimum((position + 1) // KEYS * KEYS, end)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    blocks = blocks_of(table_ptr, begin, num_keys, PAGE, KEYS)
    for start in range(begin, common, KEYS):
        if BULK:
            place = [blocks.to(tl.int32), kv_head, start % PAGE, 0]
            k = k_bulk.load(place).reshape(KEYS, WIDTH)
            v = v_bulk.load(place).reshape(KEYS, WIDTH)
        else:
            k_rows = tile_rows(k_ptr, blocks, start, block_stride, token_stride, PAGE, KEYS)
            v_rows = tile_rows(v_ptr, blocks, start, block_stride, token_stride, PAGE, KEYS)
            if WIDTH == HEAD_DIM:
                k = tl.load(k_rows + channels[None, :])
                v = tl.load(v_rows + channels[None, :])
            else:
                k = tl.load(k_rows + channels[None, :], mask=inside[None, :], other=0.0)
                v = tl.load(v_rows + channels[None, :], mask=inside[None, :], other=0.0)
        blocks = blocks_of(table_ptr, start + KEYS, num_keys, PAGE, KEYS)
        scores = tl.dot(q, tl.trans(k))
        best, total, acc = fold_tile(scores, v, scale, best, total, acc)

    # The tiles of the rows themselves.
    positions = position + rows
    for start in tl.range(common, end, KEYS, num_stages=1):
        keys = start + steps
        # Rows past the end may hold anything, NaN too. Of scores they are masked, but a share of zero does not take NaN
        # away: values there are read as 0.
        written = keys < num_keys
        wanted = written[:, None] & inside[None, :]
        if BULK:
            k = k_bulk.load([blocks.to(tl.int32), kv_head, start % PAGE, 0]).reshape(KEYS, WIDTH)
        else:
            k_rows = tile_rows(k_ptr, blocks, start, block_stride, token_stride, PAGE, KEYS)
            k = tl.load(k_rows + channels[None, :], mask=wanted, other=0.0)
        seen = written[None, :] & (keys[None, :] <= positions[:, None])
        scores = tl.where(seen, tl.dot(q, tl.trans(k)), float("-inf"))
        if BULK:
            v = v_bulk.load([blocks.to(tl.int32), kv_head, start % PAGE, 0]).reshape(KEYS, WIDTH)
            v = tl.where(written[:, None], v, 0.0)
        else:
            v_rows = tile_rows(v_ptr, blocks, start, block_stride, token_stride, PAGE, KEYS)
            v = tl.load(v_rows + channels[None, :], mask=wanted, other=0.0)
        blocks = blocks_of(table_ptr, start + KEYS, num_keys, PAGE, KEYS)
        best, total, acc = fold_tile(scores, v, scale, best, total, acc)

    out, lse = finish_rows(best, total, acc)
    place = ((first_row + rows) * num_splits + split) * NUM_HEADS + head
    tl.store(out_ptr + place[:, None] * HEAD_DIM + channels[None, :], out.to(out_ptr.dtype.element_ty), mask=held)
    if SPLIT:
        tl.store(lse_ptr + place, lse, mask=rows < num_rows)


def paged_prefill(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    tiles: PrefillTiles | None = None,
) -> torch.Tensor:
    """Attends the planned rows to their sequences' keys up to and including their own, which lie in the planes.

    Args:
        q: [num_rows, num_heads, head_dim] bfloat16.
        k_plane: [num_blocks, block_size, num_kv_heads, head_dim] bfloat16, any stride between blocks.
        v_plane: as k_plane, of the same strides.
        plan: of these rows, with the row tiles of `tiles`.
        scale: positive factor of the scores.
        out: contiguous [num_rows, num_heads, head_dim]; rows that the plan leaves out stay as they are, or are 0 where
            it splits keys.
        tiles: how to cut the work; default: what was fastest.

    Returns:
        `out`, or a new tensor.
    """
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_plane.shape[1:3]
    tiles = tiles or prefill_tiles(head_dim)
    assert num_rows == plan.num_rows, "the plan is of another batch"
    assert plan.rows_per_tile == tiles.rows, "the plan has other tiles"
    assert tiles.keys % block_size == 0 or block_size % tiles.keys == 0
    assert scale > 0
    assert q.dtype == k_plane.dtype == v_plane.dtype == torch.bfloat16
    assert q.stride(2) == 1
    assert k_plane.shape == v_plane.shape
    assert k_plane.stride() == v_plane.stride()
    assert k_plane.shape[3] == head_dim
    assert k_plane.stride(3) == 1
    assert num_heads % num_kv_heads == 0, "query heads are a multiple of key heads"
    assert plan.block_tables.stride(1) == 1
    assert plan.num_splits == 1 or SPLIT_STEP % tiles.keys == 0
    output = PrefillOutput.of(q, plan, out)
    width = triton.next_power_of_2(head_dim)
    bulk = tiles.bulk_copies and width == head_dim and tiles.keys <= block_size
    k_bulk, v_bulk = (bulk_rows(plane, tiles.keys) if bulk else None for plane in (k_plane, v_plane))
    _attend_chunk_kernel[(plan.items.shape[0], num_heads)](
        q,
        k_plane,
        v_plane,
        k_bulk,
        v_bulk,
        plan.items,
        plan.block_tables,
        output.outs,
        output.lses,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(1),
        k_plane.stride(0),
        k_plane.stride(1),
        k_plane.stride(2),
        plan.block_tables.stride(0),
        plan.num_splits,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE=block_size,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        BULK=bulk,
        SPLIT=output.lses is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return output.merged()
