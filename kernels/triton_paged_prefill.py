"""Causal attention of chunks of rows over their paged history.

A program takes a tile of a chunk's rows and one query head, and walks the keys from position 0 in tiles at absolute
multiples of `keys`, in order, with a running softmax in float32. A row's bytes follow from its query, its position and
the keys: tiles that it does not see are walked past without touching it. Nothing is split over keys.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton_pages import blocks_of, tile_rows
from kernels.triton_softmax import LOG2E, finish_rows, fold_tile


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
class PrefillPlan:
    """The row tiles of a batch; made once a step and read by every layer."""

    block_tables: torch.Tensor
    tiles: torch.Tensor  # [num_tiles, 4] int32: sequence, first row, number of rows, position of the first row
    num_rows: int
    rows_per_tile: int


def plan_prefill(chunks: ChunkRows, seqs: tuple[int, ...], *, block_size: int, rows_per_tile: int) -> PrefillPlan:
    """Cuts the rows of some sequences into tiles, those with most keys first so that no long one is left at the end.

    Raises AssertionError where a block table does not cover its rows.
    """
    capacity = chunks.block_tables.shape[1] * block_size
    spans = list(pairwise(chunks.cu_rows))
    tiles: list[tuple[int, int, int, int]] = []
    for s in seqs:
        (first, last), start = spans[s], chunks.starts[s]
        assert start + last - first <= capacity, "block table does not cover the rows"
        for row in range(first, last, rows_per_tile):
            tiles.append((s, row, min(rows_per_tile, last - row), start + row - first))
    tiles.sort(key=lambda tile: -tile[3])
    table = torch.tensor(tiles, dtype=torch.int32).to(chunks.block_tables.device, non_blocking=True)
    return PrefillPlan(chunks.block_tables, table, chunks.cu_rows[-1], rows_per_tile)


@triton.jit
def _attend_chunk_kernel(
    q_ptr,  # [num_rows, num_heads, HEAD_DIM]
    k_ptr,  # [num_blocks, PAGE, num_kv_heads, HEAD_DIM]
    v_ptr,  # as k
    k_bulk,  # descriptors of the same as [num_blocks, num_kv_heads, PAGE, HEAD_DIM], or None
    v_bulk,
    tiles_ptr,
    tables_ptr,
    out_ptr,  # [num_rows, num_heads, HEAD_DIM]
    scale,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    out_row_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded to a power of two
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BULK: tl.constexpr,
):
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    kv_head = head // GROUP
    table_ptr = tables_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride
    first_row = tl.load(tile_ptr + 1).to(tl.int64)
    num_rows = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
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
    common = (position + 1) // KEYS * KEYS
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    blocks = blocks_of(table_ptr, 0, num_keys, PAGE, KEYS)
    for start in range(0, common, KEYS):
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
    for start in tl.range(common, num_keys, KEYS, num_stages=1):
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

    out, _ = finish_rows(best, total, acc)
    out_ptr += first_row * out_row_stride + head * HEAD_DIM
    out_at = rows[:, None] * out_row_stride + channels[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=held)


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
        out: contiguous [num_rows, num_heads, head_dim]; rows that the plan leaves out stay as they are.
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
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    width = triton.next_power_of_2(head_dim)
    bulk = tiles.bulk_copies and width == head_dim and tiles.keys <= block_size
    k_bulk, v_bulk = (_descriptor(plane, tiles.keys) if bulk else None for plane in (k_plane, v_plane))
    _attend_chunk_kernel[(plan.tiles.shape[0], num_heads)](
        q,
        k_plane,
        v_plane,
        k_bulk,
        v_bulk,
        plan.tiles,
        plan.block_tables,
        out,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(1),
        k_plane.stride(0),
        k_plane.stride(1),
        k_plane.stride(2),
        plan.block_tables.stride(0),
        out.stride(0),
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE=block_size,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        BULK=bulk,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def _descriptor(plane: torch.Tensor, keys: int) -> TensorDescriptor:
    """Heads before rows: a reshape of a bulk copy may drop leading dimensions of one only."""
    by_head = plane.transpose(1, 2)
    block = [1, 1, keys, plane.shape[3]]
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), block)
