"""Hyper-connections in three launches a block: kernels/hyper_connections.py has the mathematics.

What a row mixes with is a product of all its streams with a narrow matrix. A first kernel sums it, and the squares for
the norm, over slices of a fixed length; a second one puts the slices together in order, makes the weights and collapses
the streams; a third puts the block's output back. All arithmetic is fp32.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.hyper_connections import HyperMix, HyperRule, HyperWeights
from kernels.launch_table import Tunable, one_bucket


@dataclass(frozen=True, slots=True)
class SumTiles:
    """How the product with a narrow matrix is cut; all of it reaches the order of sums."""

    rows: int  # of a program
    inner: int  # values of a row that are summed at once
    slice: int  # that one program sums, a multiple of `inner`
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ColumnTiles:
    """How rows are cut where streams are summed."""

    columns: int  # of a program, a power of two
    num_warps: int


SUM_TILES = SumTiles(rows=16, inner=128, slice=2048, num_warps=4, num_stages=3)
SHAPE = ("streams", "width")
SUM = Tunable("hyper_sum", SHAPE, lambda *_: one_bucket(SUM_TILES), neutral=False)
MIX = Tunable("hyper_mix", SHAPE, lambda *_: one_bucket(ColumnTiles(1024, 4)), neutral=False)
INJECT = Tunable("hyper_inject", SHAPE, lambda *_: one_bucket(ColumnTiles(1024, 4)), neutral=False)


@triton.jit
def _sum_kernel(
    streams_ptr,  # [num_rows, WIDTH]
    fn_ptr,  # [MIXES, WIDTH]
    sums_ptr,  # [num_rows, num_slices, PADDED]: the products, then the sum of squares
    num_rows,
    num_slices,
    WIDTH: tl.constexpr,
    MIXES: tl.constexpr,
    PADDED: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    SLICE_LEN: tl.constexpr,
):
    part = tl.program_id(0)
    row = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)[:, None]
    mix = tl.arange(0, PADDED)[None, :]
    acc = tl.zeros((M, PADDED), tl.float32)
    squares = tl.zeros((M,), tl.float32)
    for start in range(part * SLICE_LEN, (part + 1) * SLICE_LEN, K):
        at = start + tl.arange(0, K)
        x = tl.load(streams_ptr + row * WIDTH + at[None, :], mask=(row < num_rows) & (at < WIDTH)[None, :], other=0.0)
        w = tl.load(fn_ptr + mix * WIDTH + at[:, None], mask=(mix < MIXES) & (at < WIDTH)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    out = tl.where(mix == MIXES, squares[:, None], acc)
    tl.store(sums_ptr + (row * num_slices + part) * PADDED + mix, out, mask=(row < num_rows) & (mix <= MIXES))


@triton.jit
def _mix_kernel(
    streams_ptr,  # [num_rows, STREAMS, WIDTH]
    sums_ptr,
    base_ptr,
    scale_ptr,
    collapsed_ptr,  # [num_rows, WIDTH]
    post_ptr,  # [num_rows, STREAMS]
    comb_ptr,  # [num_rows, STREAMS, STREAMS]
    num_slices,
    norm_eps,
    eps,
    iterations,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SLICES: tl.constexpr,  # num_slices, padded
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)[:, None]
    stream = tl.arange(0, STREAMS)
    pair = tl.arange(0, STREAMS * STREAMS)
    MIXES: tl.constexpr = (2 + STREAMS) * STREAMS
    sums_at = sums_ptr + (row * num_slices + part) * PADDED
    is_part = part < num_slices
    squares = tl.sum(tl.sum(tl.load(sums_at + MIXES, mask=is_part, other=0.0), 1), 0)
    rms = tl.rsqrt(squares / (STREAMS * WIDTH) + norm_eps)
    pre = tl.sum(tl.load(sums_at + stream[None, :], mask=is_part, other=0.0), 0) * rms
    pre = tl.sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + stream)) + eps
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row * (STREAMS * WIDTH) + stream[:, None] * WIDTH + columns
    old = tl.load(streams_ptr + at, mask=columns < WIDTH, other=0.0).to(tl.float32)
    collapsed = tl.sum(old * pre[:, None], 0)[None, :]
    tl.store(collapsed_ptr + row * WIDTH + columns, collapsed.to(collapsed_ptr.dtype.element_ty), mask=columns < WIDTH)
    if tl.program_id(1) == 0:
        post = tl.sum(tl.load(sums_at + STREAMS + stream[None, :], mask=is_part, other=0.0), 0) * rms
        post = 2 * tl.sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + STREAMS + stream))
        tl.store(post_ptr + row * STREAMS + stream, post)
        logits = tl.sum(tl.load(sums_at + 2 * STREAMS + pair[None, :], mask=is_part, other=0.0), 0) * rms
        logits = logits * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * STREAMS + pair)
        comb = tl.reshape(logits, (STREAMS, STREAMS))
        comb = tl.exp(comb - tl.max(comb, 1)[:, None])
        comb = comb / tl.sum(comb, 1)[:, None] + eps
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
        for _ in range(iterations - 1):
            comb = comb / (tl.sum(comb, 1)[:, None] + eps)
            comb = comb / (tl.sum(comb, 0)[None, :] + eps)
        comb_at = row * (STREAMS * STREAMS) + stream[:, None] * STREAMS + stream[None, :]
        tl.store(comb_ptr + comb_at, comb)


@triton.jit
def _inject_kernel(
    output_ptr,  # [num_rows, WIDTH]
    streams_ptr,  # [num_rows, STREAMS, WIDTH]
    post_ptr,
    comb_ptr,
    out_ptr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * (STREAMS * WIDTH) + columns
    old = tl.load(streams_ptr + at[None, :] + stream[:, None] * WIDTH, mask=inside[None, :], other=0.0).to(tl.float32)
    made = tl.load(output_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(STREAMS):
        shares = tl.load(comb_ptr + row * (STREAMS * STREAMS) + stream * STREAMS + j)
        new = tl.sum(old * shares[:, None], 0) + made * tl.load(post_ptr + row * STREAMS + j)
        tl.store(out_ptr + at + j * WIDTH, new.to(out_ptr.dtype.element_ty), mask=inside)


def mix_streams(
    streams: torch.Tensor,
    weights: HyperWeights,
    rule: HyperRule,
    *,
    sum_tiles: SumTiles | None = None,
    mix_tiles: ColumnTiles | None = None,
) -> HyperMix:
    """As kernels/hyper_connections.py's, of streams [N, n, D] contiguous, with n a power of two."""
    num_rows, n, width = streams.shape
    mixes = (2 + n) * n
    assert n & (n - 1) == 0, "the number of streams is a power of two"
    assert streams.is_contiguous()
    assert weights.fn.shape == (mixes, n * width)
    assert weights.fn.is_contiguous()
    assert weights.fn.dtype == streams.dtype
    assert weights.base.shape == (mixes,)
    assert weights.scale.shape == (3,)
    assert weights.base.dtype == weights.scale.dtype == torch.float32
    assert rule.iterations >= 1
    device = streams.device
    collapsed = torch.empty((num_rows, width), dtype=streams.dtype, device=device)
    post = torch.empty((num_rows, n), dtype=torch.float32, device=device)
    comb = torch.empty((num_rows, n, n), dtype=torch.float32, device=device)
    if num_rows:
        cut = sum_tiles or SUM.look_up(device, streams=n, width=width)
        num_slices = triton.cdiv(n * width, cut.slice)
        padded = triton.next_power_of_2(mixes + 1)
        sums = torch.empty((num_rows, num_slices, padded), dtype=torch.float32, device=device)
        _sum_kernel[(num_slices, triton.cdiv(num_rows, cut.rows))](
            *(streams, weights.fn, sums, num_rows, num_slices),
            WIDTH=n * width,
            MIXES=mixes,
            PADDED=padded,
            M=cut.rows,
            K=cut.inner,
            SLICE_LEN=cut.slice,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
        )
        mix_tiles = mix_tiles or MIX.look_up(device, streams=n, width=width)
        block = min(mix_tiles.columns, triton.next_power_of_2(width))
        _mix_kernel[(num_rows, triton.cdiv(width, block))](
            *(streams, sums, weights.base, weights.scale, collapsed, post, comb),
            *(num_slices, rule.norm_eps, rule.eps, rule.iterations),
            STREAMS=n,
            WIDTH=width,
            PADDED=padded,
            SLICES=triton.next_power_of_2(num_slices),
            BLOCK=block,
            num_warps=mix_tiles.num_warps,
        )
    return HyperMix(collapsed, post, comb)


def inject(
    output: torch.Tensor, streams: torch.Tensor, mix: HyperMix, *, tiles: ColumnTiles | None = None
) -> torch.Tensor:
    """As kernels/hyper_connections.py's: new streams [N, n, D] of the block's output [N, D]."""
    num_rows, n, width = streams.shape
    assert output.shape == (num_rows, width)
    assert output.is_contiguous()
    assert streams.is_contiguous()
    assert mix.post.is_contiguous()
    assert mix.comb.is_contiguous()
    out = torch.empty_like(streams)
    if num_rows:
        tiles = tiles or INJECT.look_up(streams.device, streams=n, width=width)
        block = min(tiles.columns, triton.next_power_of_2(width))
        _inject_kernel[(num_rows, triton.cdiv(width, block))](
            *(output, streams, mix.post, mix.comb, out),
            STREAMS=n,
            WIDTH=width,
            BLOCK=block,
            num_warps=tiles.num_warps,
        )
    return out
