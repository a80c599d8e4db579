"""Grouped-head attention of rows over the tokens that an indexer selected for them, and their unfinished pool.

A row's entries (kernels/triton_selected.py) are cut into splits of a fixed length, each computed by itself and merged
in order, so that a row's bytes follow from its query, its selection and the selected keys. The grid is the same for
every step of a batch size.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from kernels.triton_selected import SelectedRows, selected_offsets, selected_tokens
from kernels.triton_softmax import LOG2E, AttentionTiles, finish_rows, fold_tile, merge_partials


def sparse_tiles(head_dim: int) -> AttentionTiles:
    """What was fastest on an H200."""
    return AttentionTiles(split=512, keys=64, heads=16, num_warps=4, num_stages=3 if head_dim <= 128 else 2)


@triton.jit
def _attend_selected_kernel(
    q_ptr,  # [num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [num_blocks, PAGE, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # as k
    picks_ptr,
    positions_ptr,
    row_seqs_ptr,
    tables_ptr,
    outs_ptr,  # [num_rows, num_splits, NUM_KV_HEADS * GROUP, HEAD_DIM] float32
    lses_ptr,  # [num_rows, num_splits, NUM_KV_HEADS * GROUP] float32
    scale,
    width,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    head_stride,
    picks_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded to a power of two
    PAGE: tl.constexpr,
    POOL: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    M: tl.constexpr,  # GROUP, padded to what a dot takes
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    group = tl.arange(0, M)
    channels = tl.arange(0, WIDTH)
    steps = tl.arange(0, KEYS)
    inside = channels < HEAD_DIM
    heads = head * GROUP + group
    held = (group < GROUP)[:, None] & inside[None, :]
    position = tl.load(positions_ptr + row)
    picks_ptr += row.to(tl.int64) * picks_stride
    table_ptr = tables_ptr + tl.load(row_seqs_ptr + row).to(tl.int64) * table_stride
    k_ptr += head * head_stride
    v_ptr += head * head_stride
    q_ptr += row.to(tl.int64) * q_row_stride
    q = tl.load(q_ptr + heads[:, None] * q_head_stride + channels[None, :], mask=held, other=0.0)
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, WIDTH), tl.float32)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, width * POOL + POOL - 1)
    # Where the next tile's rows lie is worked out a tile ahead, so that the loads of keys wait for no other load.
    tokens = selected_tokens(picks_ptr, begin + steps, position, width, POOL)
    at = selected_offsets(table_ptr, tokens, block_stride, token_stride, PAGE)
    for start in range(begin, end, KEYS):
        seen = tokens >= 0
        wanted = seen[:, None]
        if WIDTH != HEAD_DIM:
            wanted = wanted & inside[None, :]
        k = tl.load(k_ptr + at[:, None] + channels[None, :], mask=wanted, other=0.0)
        v = tl.load(v_ptr + at[:, None] + channels[None, :], mask=wanted, other=0.0)
        tokens = selected_tokens(picks_ptr, start + KEYS + steps, position, width, POOL)
        at = selected_offsets(table_ptr, tokens, block_stride, token_stride, PAGE)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        best, total, acc = fold_tile(scores, v, scale, best, total, acc)
    out, lse = finish_rows(best, total, acc)
    place = (row.to(tl.int64) * tl.num_programs(1) + split) * (NUM_KV_HEADS * GROUP) + heads
    tl.store(outs_ptr + place[:, None] * HEAD_DIM + channels[None, :], out, mask=held)
    tl.store(lses_ptr + place, lse, mask=group < GROUP)


def sparse_decode(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    selected: SelectedRows,
    scale: float,
    *,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor:
    """Attends each row to what was selected for it.

    Args:
        q: [num_rows, num_heads, head_dim] bfloat16.
        k_plane: [num_blocks, block_size, num_kv_heads, head_dim] bfloat16, any stride between blocks.
        v_plane: as k_plane, of the same strides.
        selected: for these rows.
        scale: positive factor of the scores.
        tiles: how to cut the work; default: what was fastest.

    Returns:
        [num_rows, num_heads, head_dim] bfloat16; 0 for a row that attends to nothing.
    """
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_plane.shape[1:3]
    tiles = tiles or sparse_tiles(head_dim)
    selected.check(num_rows)
    assert tiles.split % tiles.keys == 0
    assert scale > 0
    assert q.dtype == k_plane.dtype == v_plane.dtype == torch.bfloat16
    assert q.stride(2) == 1
    assert k_plane.shape == v_plane.shape
    assert k_plane.stride() == v_plane.stride()
    assert k_plane.shape[3] == head_dim
    assert k_plane.stride(3) == 1
    assert num_heads % num_kv_heads == 0, "query heads are a multiple of key heads"
    num_splits = triton.cdiv(selected.num_entries, tiles.split)
    outs = torch.empty((num_rows, num_splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty((num_rows, num_splits, num_heads), dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    _attend_selected_kernel[(num_kv_heads, num_splits, num_rows)](
        q,
        k_plane,
        v_plane,
        selected.picks,
        selected.positions,
        selected.row_seqs,
        selected.block_tables,
        outs,
        lses,
        scale * LOG2E.value,
        selected.picks.shape[1],
        q.stride(0),
        q.stride(1),
        k_plane.stride(0),
        k_plane.stride(1),
        k_plane.stride(2),
        selected.picks.stride(0),
        selected.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        PAGE=block_size,
        POOL=selected.pool,
        SPLIT=tiles.split,
        KEYS=tiles.keys,
        M=max(16, triton.next_power_of_2(group)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    merge_partials(outs, lses, out, None)
    return out
