"""Scores of an indexer: each row's weighed relu of its heads against every key that it sees.

score(n, t) = sum_h w_nh relu(q_nh . k_t d^-1/2), over the paged keys of the row's sequence. A key covers `pool` tokens;
which keys a row sees is read on the device. Choosing among the scores is kernels/triton_topk.py.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_pages import blocks_of, tile_rows

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class ScoreTiles:
    """How a launch is cut; none of it decides bytes but `rows`."""

    keys: int  # that a program takes at once
    split: int  # keys of a program, a whole number of `keys`
    rows: int  # query rows of a program, of one sequence where more than one
    num_warps: int
    num_stages: int


def score_tiles(num_rows_per_seq: int, *, is_fp8: bool = False) -> ScoreTiles:
    """What was fastest on an H200."""
    if num_rows_per_seq == 1:
        return ScoreTiles(keys=64, split=2048 if is_fp8 else 1024, rows=1, num_warps=4, num_stages=3)
    return ScoreTiles(keys=128, split=1024, rows=2, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Which keys each row sees: the first visible[r] of its sequence."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32 or int64; one sequence: that of all rows
    visible: torch.Tensor  # [num_rows] int32, in keys, not tokens
    row_seqs: torch.Tensor | None  # [num_rows] int32; None: all rows are of the one sequence


@triton.jit(do_not_specialize=["num_rows"])
def _score_kernel(
    q_ptr,  # [num_rows, NUM_HEADS, DIM]
    weights_ptr,  # [num_rows, NUM_HEADS] float32
    plane_ptr,  # [num_blocks, PAGE, DIM]
    tables_ptr,
    visible_ptr,
    row_seqs_ptr,
    scores_ptr,  # [num_rows, most_keys] float32
    num_rows,
    most_keys,
    scale,
    q_row_stride,
    q_head_stride,
    weights_stride,
    block_stride,
    token_stride,
    table_stride,
    scores_stride,
    NUM_HEADS: tl.constexpr,
    M: tl.constexpr,  # heads, padded to a power of two
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_SEQUENCE: tl.constexpr,
    MIXED: tl.constexpr,  # keys are fp8, queries are not
):
    first_row = tl.program_id(1) * ROWS
    flat = tl.arange(0, ROWS * M)
    rows = first_row + flat // M
    heads = flat % M
    here = (rows < num_rows) & (heads < NUM_HEADS)
    row_steps = tl.arange(0, ROWS)
    visible = tl.load(visible_ptr + first_row + row_steps, mask=first_row + row_steps < num_rows, other=0)
    visible = tl.minimum(visible, most_keys)
    begin = tl.program_id(0) * SPLIT
    end = tl.minimum(begin + SPLIT, tl.max(visible, 0))
    if begin >= end:
        return
    table_ptr = tables_ptr
    if not ONE_SEQUENCE:
        table_ptr += tl.load(row_seqs_ptr + first_row).to(tl.int64) * table_stride
    channels = tl.arange(0, DIM)
    q_rows = q_ptr + rows.to(tl.int64) * q_row_stride + heads * q_head_stride
    q = tl.load(q_rows[:, None] + channels[None, :], mask=here[:, None], other=0.0)
    weights = tl.load(weights_ptr + rows.to(tl.int64) * weights_stride + heads, mask=here, other=0.0) * scale
    if MIXED:
        # A power of two times the query as two float8 numbers, a rounded one and the rest: together a bfloat16, exactly
        # but for what is below 2^-17 of the head's largest. Keys are multiplied as they are stored, without conversion;
        # the units sum such products to less than float32, so scores are off by 4e-4 (2e-4 for keys of bfloat16).
        wide = q.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
        power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        wide *= (128.0 / power)[:, None]
        q = wide.to(tl.float8e4nv)
        rest = (wide - q.to(tl.float32)).to(tl.float8e4nv)
        weights *= power / 128.0
    steps = tl.arange(0, KEYS)
    blocks = blocks_of(table_ptr, begin, end, PAGE, KEYS)
    for start in range(begin, end, KEYS):
        key_rows = tile_rows(plane_ptr, blocks, start, block_stride, token_stride, PAGE, KEYS)
        keys = start + steps
        k = tl.load(key_rows + channels[None, :], mask=(keys < end)[:, None], other=0.0)
        blocks = blocks_of(table_ptr, start + KEYS, end, PAGE, KEYS)
        dots = tl.dot(k, tl.trans(q))
        if MIXED:
            dots = tl.dot(k, tl.trans(rest), dots)
        dots = tl.maximum(dots, 0.0) * weights[None, :]
        sums = tl.sum(tl.reshape(dots, (KEYS, ROWS, M)), 2)  # [KEYS, ROWS]
        at = (first_row + row_steps).to(tl.int64)[None, :] * scores_stride + keys[:, None]
        tl.store(scores_ptr + at, sums, mask=keys[:, None] < visible[None, :])


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    plane: torch.Tensor,
    rows: ScoreRows,
    *,
    most_keys: int,
    tiles: ScoreTiles | None = None,
) -> torch.Tensor:
    """Scores every visible key of each row.

    Args:
        q: [num_rows, num_heads, dim] bfloat16, normed and rotated; dim a power of two.
        weights: [num_rows, num_heads] float32 of the heads, every constant factor but dim^-1/2 inside.
        plane: [num_blocks, block_size / pool, dim] bfloat16 or float8_e4m3fn, any stride between blocks.
        rows: what they see.
        most_keys: at least what any row sees, and what the block tables have room for.
        tiles: how to cut the work; default: what was fastest.

    Returns:
        [num_rows, most_keys] float32; what a row does not see is not written.
    """
    num_rows, num_heads, dim = q.shape
    per_block = plane.shape[1]
    tiles = tiles or score_tiles(num_rows if rows.row_seqs is None else 1, is_fp8=plane.dtype == FP8)
    assert weights.shape == (num_rows, num_heads)
    assert weights.dtype == torch.float32
    assert weights.stride(1) == 1
    assert q.dtype == torch.bfloat16
    assert plane.dtype in (torch.bfloat16, FP8)
    assert plane.shape[2] == dim == triton.next_power_of_2(dim)
    assert q.stride(2) == plane.stride(2) == 1
    assert rows.visible.shape == (num_rows,)
    assert rows.visible.dtype == torch.int32
    assert rows.block_tables.stride(1) == 1
    assert most_keys <= rows.block_tables.shape[1] * per_block, "block tables do not cover the keys"
    assert rows.row_seqs is not None or rows.block_tables.shape[0] == 1
    assert rows.row_seqs is None or tiles.rows == 1, "rows that share a program are of one sequence"
    assert tiles.split % tiles.keys == 0
    assert tiles.keys % per_block == 0 or per_block % tiles.keys == 0
    # Rows apart by a multiple of four floats, so that every row may be read in vectors.
    stride = -(-most_keys // 4) * 4
    scores = torch.empty((num_rows, stride), dtype=torch.float32, device=q.device)[:, :most_keys]
    _score_kernel[(triton.cdiv(most_keys, tiles.split), triton.cdiv(num_rows, tiles.rows))](
        q,
        weights,
        plane,
        rows.block_tables,
        rows.visible,
        rows.row_seqs,
        scores,
        num_rows,
        most_keys,
        dim**-0.5,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        plane.stride(0),
        plane.stride(1),
        rows.block_tables.stride(0),
        scores.stride(0),
        NUM_HEADS=num_heads,
        M=max(16, triton.next_power_of_2(num_heads)),
        DIM=dim,
        PAGE=per_block,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        SPLIT=tiles.split,
        ONE_SEQUENCE=rows.row_seqs is None,
        MIXED=plane.dtype == FP8,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return scores
