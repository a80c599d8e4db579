"""Latent attention in absorbed form: all heads of a row share one paged row a token, [latent | rotated rope part].

Keys are whole rows, values their latent part, so a tile is read once and serves both products. Both are done with
heads as columns: a tile of keys and the latent's channels are the long sides, which is what the matrix units want of a
left factor, and which they read where it was copied to; heads, few as they are, need no padding. Dense rows take the
splits of kernels/triton_paged_decode.py, selected rows the entries of kernels/triton_selected.py; either way splits
have a fixed length at fixed places and are merged in order.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from kernels.gluon_latent import grouped_mla, grouped_sparse_mla, is_fit
from kernels.triton_paged_decode import DecodePlan, SplitRule
from kernels.triton_pages import blocks_of, tile_rows
from kernels.triton_selected import SelectedRows, selected_offsets, selected_tokens
from kernels.triton_softmax import LN2, LOG2E, AttentionTiles, Parts, merge_partials, merge_ragged

SELECTED_SPLIT = 2048  # keys of a split of a selection; decides bytes


def latent_splits(num_heads: int) -> SplitRule:
    """Of dense rows. What a split leaves to be merged is as much as it has heads: no more than a ninth of its keys."""
    shortest = min(max(16 * triton.next_power_of_2(num_heads), 256), 2048)
    return SplitRule(shortest, 2048)


def latent_tiles(num_heads: int) -> AttentionTiles:
    """64 keys are the rows that a matrix instruction takes; more heads than 32 at once do not fit into registers."""
    heads = min(32, max(16, triton.next_power_of_2(num_heads)))
    return AttentionTiles(split=SELECTED_SPLIT, keys=64, heads=heads, num_warps=8, num_stages=2)


@triton.jit
def _load_query(
    q_ptr, heads, num_heads, q_head_stride, LATENT: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
):  # fmt: skip
    """[WIDTH, heads] against latents and [ROPE_WIDTH, heads] against rope parts."""
    rows = q_ptr + (heads * q_head_stride)[None, :]
    channels = tl.arange(0, WIDTH)
    turning = tl.arange(0, ROPE_WIDTH)
    held = (heads < num_heads)[None, :]
    q = tl.load(rows + channels[:, None], mask=held & (channels < LATENT)[:, None], other=0.0)
    q_rope = tl.load(rows + LATENT + turning[:, None], mask=held & (turning < ROPE)[:, None], other=0.0)
    return q, q_rope


@triton.jit
def _load_rows(rows, seen, LATENT: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, ROPE_WIDTH: tl.constexpr):
    """Latents [keys, WIDTH] and rope parts [keys, ROPE_WIDTH] at pointers [keys, 1]; 0 where not seen."""
    channels = tl.arange(0, WIDTH)
    turning = tl.arange(0, ROPE_WIDTH)
    if WIDTH == LATENT:
        latent = tl.load(rows + channels[None, :], mask=seen[:, None], other=0.0)
    else:
        latent = tl.load(rows + channels[None, :], mask=seen[:, None] & (channels < LATENT)[None, :], other=0.0)
    if ROPE_WIDTH == ROPE:
        rope = tl.load(rows + LATENT + turning[None, :], mask=seen[:, None], other=0.0)
    else:
        rope = tl.load(rows + LATENT + turning[None, :], mask=seen[:, None] & (turning < ROPE)[None, :], other=0.0)
    return latent, rope


@triton.jit
def _fold_latents(q, q_rope, latent, rope, seen, scale, best, total, acc, ROPE: tl.constexpr):
    """Takes one tile in: as fold_tile of kernels/triton_softmax.py, with [keys, heads] and acc [WIDTH, heads]."""
    scores = tl.dot(latent, q)
    if ROPE > 0:
        scores = tl.dot(rope, q_rope, scores)
    scores = tl.where(seen[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 0) * scale)
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    shares = tl.math.exp2(scores * scale - pivot[None, :])
    keep = tl.math.exp2(best - pivot)
    total = total * keep + tl.sum(shares, 0)
    acc = tl.dot(tl.trans(latent), shares.to(latent.dtype), acc * keep[None, :])
    return new_best, total, acc


@triton.jit
def _store_part(
    outs_ptr, lses_ptr, place, best, total, acc, heads, num_heads, LATENT: tl.constexpr, WIDTH: tl.constexpr
):
    """The part's output, and the natural log of its sum of exponentials; 0 and -inf where it saw no key."""
    channels = tl.arange(0, WIDTH)
    held = (heads < num_heads)[None, :] & (channels < LATENT)[:, None]
    seen = total > 0
    out = acc / tl.where(seen, total, 1.0)[None, :]
    lse = tl.where(seen, (best + tl.math.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
    tl.store(outs_ptr + place[None, :] * LATENT + channels[:, None], out, mask=held)
    tl.store(lses_ptr + place, lse, mask=heads < num_heads)


@triton.jit(do_not_specialize=["num_rows"])
def _latent_splits_kernel(
    q_ptr,  # [num_rows, num_heads, LATENT + ROPE]
    plane_ptr,  # [num_blocks, PAGE, LATENT + ROPE]
    tables_ptr,
    first_ptr,
    items_ptr,
    outs_ptr,  # [most_items, num_heads, LATENT] float32
    lses_ptr,  # [most_items, num_heads] float32
    num_rows,
    num_heads,
    scale,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    table_stride,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
):
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    steps = tl.arange(0, KEYS)
    item = tl.program_id(1)
    if item >= tl.load(first_ptr + num_rows):
        return
    row = tl.load(items_ptr + 4 * item)
    begin = tl.load(items_ptr + 4 * item + 1)
    end = tl.load(items_ptr + 4 * item + 2)
    table_ptr = tables_ptr + tl.load(items_ptr + 4 * item + 3).to(tl.int64) * table_stride
    q_row_ptr = q_ptr + row.to(tl.int64) * q_row_stride
    q, q_rope = _load_query(q_row_ptr, heads, num_heads, q_head_stride, LATENT, WIDTH, ROPE, ROPE_WIDTH)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((WIDTH, HEADS), tl.float32)
    blocks = blocks_of(table_ptr, begin, end, PAGE, KEYS)
    for start in range(begin, end, KEYS):
        rows = tile_rows(plane_ptr, blocks, start, block_stride, token_stride, PAGE, KEYS)
        seen = start + steps < end
        latent, rope = _load_rows(rows, seen, LATENT, WIDTH, ROPE, ROPE_WIDTH)
        blocks = blocks_of(table_ptr, start + KEYS, end, PAGE, KEYS)
        best, total, acc = _fold_latents(q, q_rope, latent, rope, seen, scale, best, total, acc, ROPE)
    place = item.to(tl.int64) * num_heads + heads
    _store_part(outs_ptr, lses_ptr, place, best, total, acc, heads, num_heads, LATENT, WIDTH)


@triton.jit
def _latent_selected_kernel(
    q_ptr,  # [num_rows, num_heads, LATENT + ROPE]
    plane_ptr,  # [num_blocks, PAGE, LATENT + ROPE]
    picks_ptr,
    positions_ptr,
    row_seqs_ptr,
    tables_ptr,
    outs_ptr,  # [num_rows, num_splits, num_heads, LATENT] float32
    lses_ptr,  # [num_rows, num_splits, num_heads] float32
    num_heads,
    scale,
    width,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    picks_stride,
    table_stride,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    POOL: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
):
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    row = tl.program_id(2)
    steps = tl.arange(0, KEYS)
    position = tl.load(positions_ptr + row)
    picks_ptr += row.to(tl.int64) * picks_stride
    table_ptr = tables_ptr + tl.load(row_seqs_ptr + row).to(tl.int64) * table_stride
    q_ptr += row.to(tl.int64) * q_row_stride
    q, q_rope = _load_query(q_ptr, heads, num_heads, q_head_stride, LATENT, WIDTH, ROPE, ROPE_WIDTH)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((WIDTH, HEADS), tl.float32)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, width * POOL + POOL - 1)
    tokens = selected_tokens(picks_ptr, begin + steps, position, width, POOL)
    at = selected_offsets(table_ptr, tokens, block_stride, token_stride, PAGE)
    for start in range(begin, end, KEYS):
        seen = tokens >= 0
        latent, rope = _load_rows(plane_ptr + at[:, None], seen, LATENT, WIDTH, ROPE, ROPE_WIDTH)
        tokens = selected_tokens(picks_ptr, start + KEYS + steps, position, width, POOL)
        at = selected_offsets(table_ptr, tokens, block_stride, token_stride, PAGE)
        best, total, acc = _fold_latents(q, q_rope, latent, rope, seen, scale, best, total, acc, ROPE)
    place = (row.to(tl.int64) * tl.num_programs(1) + split) * num_heads + heads
    _store_part(outs_ptr, lses_ptr, place, best, total, acc, heads, num_heads, LATENT, WIDTH)


def mla_decode(
    q: torch.Tensor,
    plane: torch.Tensor,
    plan: DecodePlan,
    *,
    latent_dim: int,
    scale: float,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor:
    """Attends each row to all of its keys.

    Args:
        q: [num_rows, num_heads, C + R] bfloat16, absorbed.
        plane: [num_blocks, block_size, C + R] bfloat16, any stride between blocks.
        plan: of this batch.
        latent_dim: C.
        scale: positive factor of the scores.
        tiles: how to cut the work, but for splits, which the plan has; default: by groups of warps
            (kernels/gluon_latent.py) where card and model are fit for it, else what was fastest here.

    Returns:
        [num_rows, num_heads, C] bfloat16.
    """
    num_rows, num_heads = q.shape[:2]
    block_size = plane.shape[1]
    _check(q, plane, latent_dim, scale)
    if tiles is None and _is_fit(plane, latent_dim):
        return grouped_mla(q, plane, plan, scale=scale)
    tiles = tiles or latent_tiles(num_heads)
    assert num_rows == plan.rows.num_keys.shape[0], "the plan is of another batch"
    assert plan.step % tiles.keys == 0
    assert tiles.keys % block_size == 0 or block_size % tiles.keys == 0
    outs = torch.empty((plan.most_items, num_heads, latent_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty((plan.most_items, num_heads), dtype=torch.float32, device=q.device)
    rope_dim = plane.shape[2] - latent_dim
    _latent_splits_kernel[(triton.cdiv(num_heads, tiles.heads), plan.most_items)](
        q,
        plane,
        plan.rows.block_tables,
        plan.first_items,
        plan.items,
        outs,
        lses,
        num_rows,
        num_heads,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(1),
        plane.stride(0),
        plane.stride(1),
        plan.rows.block_tables.stride(0),
        LATENT=latent_dim,
        WIDTH=max(16, triton.next_power_of_2(latent_dim)),
        ROPE=rope_dim,
        ROPE_WIDTH=max(16, triton.next_power_of_2(rope_dim)) if rope_dim else 16,
        PAGE=block_size,
        KEYS=tiles.keys,
        HEADS=tiles.heads,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    out = torch.empty((num_rows, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    merge_ragged(outs, lses, Parts(plan.first_items, plan.num_items), out)
    return out


def sparse_mla_decode(
    q: torch.Tensor,
    plane: torch.Tensor,
    selected: SelectedRows,
    *,
    latent_dim: int,
    scale: float,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor:
    """As `mla_decode`, of what was selected; a row that attends to nothing gives 0."""
    num_rows, num_heads = q.shape[:2]
    _check(q, plane, latent_dim, scale)
    if tiles is None and _is_fit(plane, latent_dim):
        return grouped_sparse_mla(q, plane, selected, scale=scale)
    tiles = tiles or latent_tiles(num_heads)
    selected.check(num_rows)
    assert tiles.split % tiles.keys == 0
    num_splits = triton.cdiv(selected.num_entries, tiles.split)
    outs = torch.empty((num_rows, num_splits, num_heads, latent_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty((num_rows, num_splits, num_heads), dtype=torch.float32, device=q.device)
    rope_dim = plane.shape[2] - latent_dim
    _latent_selected_kernel[(triton.cdiv(num_heads, tiles.heads), num_splits, num_rows)](
        q,
        plane,
        selected.picks,
        selected.positions,
        selected.row_seqs,
        selected.block_tables,
        outs,
        lses,
        num_heads,
        scale * LOG2E.value,
        selected.picks.shape[1],
        q.stride(0),
        q.stride(1),
        plane.stride(0),
        plane.stride(1),
        selected.picks.stride(0),
        selected.block_tables.stride(0),
        LATENT=latent_dim,
        WIDTH=max(16, triton.next_power_of_2(latent_dim)),
        ROPE=rope_dim,
        ROPE_WIDTH=max(16, triton.next_power_of_2(rope_dim)) if rope_dim else 16,
        PAGE=plane.shape[1],
        POOL=selected.pool,
        SPLIT=tiles.split,
        KEYS=tiles.keys,
        HEADS=tiles.heads,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    out = torch.empty((num_rows, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    merge_partials(outs, lses, out, None)
    return out


def _is_fit(plane: torch.Tensor, latent_dim: int) -> bool:
    return is_fit(plane.device, block_size=plane.shape[1], latent_dim=latent_dim, rope_dim=plane.shape[2] - latent_dim)


def _check(q: torch.Tensor, plane: torch.Tensor, latent_dim: int, scale: float) -> None:
    assert q.ndim == 3
    assert plane.ndim == 3
    assert q.shape[2] == plane.shape[2]
    assert 0 < latent_dim <= plane.shape[2]
    assert q.dtype == plane.dtype == torch.bfloat16
    assert q.stride(2) == plane.stride(2) == 1
    assert scale > 0
