"""Causal convolution over slots (kernels/causal_conv.py has the mathematics): a chunk of one sequence, or decode rows.

A chunk's tail is written by a second launch, after all rows have read the one before it, so that slot_in and slot_out
may be the same. A decode row's channels each have one program, which reads before it writes.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.causal_conv import ConvWeights
from kernels.launch_table import Tunable, one_bucket
from kernels.triton_chain import chained, follow

TAIL_CHANNELS = 512


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """How a chunk is cut; a channel's taps are summed one by one, whatever the tile."""

    rows: int  # that a program goes down
    channels: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class StepTiles:
    """How decode rows are cut. It decides in which order taps are summed."""

    channels: int  # of a program
    num_warps: int


CHUNK_TILES = ChunkTiles(rows=16, channels=256, num_warps=2)
CHUNK = Tunable("causal_conv_chunk", ("channels",), lambda _: one_bucket(CHUNK_TILES), neutral=True)
STEP = Tunable("causal_conv_step", ("channels",), lambda _: one_bucket(StepTiles(512, 4)), neutral=False)


@triton.jit
def _finish(acc, bias_ptr, at, inside, BIAS: tl.constexpr, SILU: tl.constexpr):
    if BIAS:
        acc += tl.load(bias_ptr + at, mask=inside, other=0.0)
    if SILU:
        acc *= tl.sigmoid(acc)
    return acc


@triton.jit
def _chunk_kernel(
    x_ptr,  # [num_rows, CHANNELS]
    tails_ptr,  # [num_slots, TAPS - 1, CHANNELS]
    slot_ptr,  # [1] int64
    taps_ptr,  # [TAPS, CHANNELS]
    bias_ptr,
    out_ptr,  # [num_rows, CHANNELS], contiguous
    num_rows,
    x_stride,
    tail_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_channels = at < CHANNELS
    first = tl.program_id(1).to(tl.int64) * ROWS
    tail_ptr = tails_ptr + tl.load(slot_ptr) * tail_stride
    taps = ()
    window = ()  # rows from TAPS - 1 before the first on, each read once, and all before anything is written
    for j in tl.static_range(TAPS):
        taps += (tl.load(taps_ptr + j * CHANNELS + at, mask=in_channels, other=0.0),)
    for j in tl.static_range(TAPS - 1):
        row = first - (TAPS - 1 - j)
        old = tl.load(tail_ptr + (row + TAPS - 1) * CHANNELS + at, mask=in_channels & (row < 0), other=0.0)
        new = tl.load(x_ptr + row * x_stride + at, mask=in_channels & (row >= 0) & (row < num_rows), other=0.0)
        window += (tl.where(row < 0, old, new),)
    for i in tl.static_range(ROWS):
        window += (tl.load(x_ptr + (first + i) * x_stride + at, mask=in_channels & (first + i < num_rows), other=0.0),)
    for i in tl.static_range(ROWS):
        acc = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(TAPS):
            acc += window[i + j].to(tl.float32) * taps[j]
        out = _finish(acc, bias_ptr, at, in_channels, BIAS, SILU).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first + i) * CHANNELS + at, out, mask=in_channels & (first + i < num_rows))


@triton.jit
def _tail_kernel(
    x_ptr,
    tails_ptr,
    slot_in_ptr,
    slot_out_ptr,
    num_rows,
    x_stride,
    tail_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,  # TAPS - 1, padded
    BLOCK: tl.constexpr,
):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    age = tl.arange(0, PADDED)[:, None]
    inside = (age < TAPS - 1) & (at < CHANNELS)
    row = num_rows - (TAPS - 1) + age  # of the chunk; negative: still of the tail before it
    old_ptr = tails_ptr + tl.load(slot_in_ptr) * tail_stride
    old = tl.load(old_ptr + (row + TAPS - 1) * CHANNELS + at, mask=inside & (row < 0), other=0.0)
    new = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=inside & (row >= 0), other=0.0)
    tail = tl.where(row < 0, old, new)
    tl.debug_barrier()
    tl.store(tails_ptr + tl.load(slot_out_ptr) * tail_stride + age * CHANNELS + at, tail, mask=inside)


@triton.jit
def _step_kernel(
    x_ptr,  # [num_rows, CHANNELS]
    tails_ptr,
    slot_in_ptr,  # [num_rows] int64
    slot_out_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    tail_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,  # TAPS, padded
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_channels = at < CHANNELS
    age = tl.arange(0, PADDED)[:, None]
    is_old = (age < TAPS - 1) & in_channels[None, :]
    is_new = (age == TAPS - 1) & in_channels[None, :]
    taps = tl.load(taps_ptr + age * CHANNELS + at[None, :], mask=is_old | is_new, other=0.0)
    follow(CHAINED)
    tail_ptr = tails_ptr + tl.load(slot_in_ptr + row) * tail_stride
    target_ptr = tails_ptr + tl.load(slot_out_ptr + row) * tail_stride
    old = tl.load(tail_ptr + age * CHANNELS + at[None, :], mask=is_old, other=0.0, cache_modifier=".cg")
    new = tl.load(x_ptr + row * x_stride + age * 0 + at[None, :], mask=is_new, other=0.0)
    window = tl.where(age == TAPS - 1, new, old)
    out = _finish(tl.sum(window.to(tl.float32) * taps, 0), bias_ptr, at, in_channels, BIAS, SILU)
    tl.store(out_ptr + row * CHANNELS + at, out.to(out_ptr.dtype.element_ty), mask=in_channels)
    tl.debug_barrier()  # threads may hold copies of a value: all have read the old tail before it is written
    moved_ptr = target_ptr + (age - 1) * CHANNELS + at[None, :]
    tl.store(moved_ptr, window, mask=(age > 0) & (age < TAPS) & in_channels[None, :])


def causal_conv_chunk(
    x: torch.Tensor,
    tails: torch.Tensor,
    slot_in: torch.Tensor,
    slot_out: torch.Tensor,
    weights: ConvWeights,
    *,
    tiles: ChunkTiles | None = None,
) -> torch.Tensor:
    """Rows [rows, channels] of one sequence; its tail is read at slot_in and written at slot_out, each [1] int64.

    `tails` is [num_slots, K - 1, channels] with any stride between slots. Returns [rows, channels] in x's dtype.
    """
    num_rows, channels = x.shape
    _check(x, tails, weights)
    assert slot_in.shape == slot_out.shape == (1,)
    out = torch.empty((num_rows, channels), dtype=x.dtype, device=x.device)
    taps = weights.taps.shape[0]
    if num_rows:
        tiles = tiles or CHUNK.look_up(x.device, num_rows=num_rows, channels=channels)
        _chunk_kernel[(triton.cdiv(channels, tiles.channels), triton.cdiv(num_rows, tiles.rows))](
            *(x, tails, slot_in, weights.taps, weights.bias, out, num_rows, x.stride(0), tails.stride(0)),
            CHANNELS=channels,
            TAPS=taps,
            BIAS=weights.bias is not None,
            SILU=weights.silu,
            ROWS=tiles.rows,
            BLOCK=tiles.channels,
            num_warps=tiles.num_warps,
        )
    _tail_kernel[(triton.cdiv(channels, TAIL_CHANNELS),)](
        *(x, tails, slot_in, slot_out, num_rows, x.stride(0), tails.stride(0)),
        CHANNELS=channels,
        TAPS=taps,
        PADDED=triton.next_power_of_2(taps - 1),
        BLOCK=TAIL_CHANNELS,
        num_warps=4,
    )
    return out


def causal_conv_step(
    x: torch.Tensor,
    tails: torch.Tensor,
    slot_in: torch.Tensor,
    slot_out: torch.Tensor,
    weights: ConvWeights,
    *,
    tiles: StepTiles | None = None,
) -> torch.Tensor:
    """One row [rows, channels] of each of several sequences, whose slots are [rows] int64; as `causal_conv_chunk`."""
    num_rows, channels = x.shape
    _check(x, tails, weights)
    assert slot_in.shape == slot_out.shape == (num_rows,)
    out = torch.empty((num_rows, channels), dtype=x.dtype, device=x.device)
    if num_rows:
        taps = weights.taps.shape[0]
        tiles = tiles or STEP.look_up(x.device, channels=channels)
        _step_kernel[(triton.cdiv(channels, tiles.channels), num_rows)](
            *(x, tails, slot_in, slot_out, weights.taps, weights.bias, out, x.stride(0), tails.stride(0)),
            CHANNELS=channels,
            TAPS=taps,
            PADDED=triton.next_power_of_2(taps),
            BIAS=weights.bias is not None,
            SILU=weights.silu,
            BLOCK=tiles.channels,
            **chained(),
            num_warps=tiles.num_warps,
        )
    return out


def _check(x: torch.Tensor, tails: torch.Tensor, weights: ConvWeights) -> None:
    taps, channels = weights.taps.shape
    assert taps > 1
    assert x.shape[1] == channels, f"{x.shape[1]} channels for a convolution of {channels}"
    assert x.stride(1) == 1
    assert tails.shape[1:] == (taps - 1, channels), f"tails are {tuple(tails.shape)}"
    assert tails[0].is_contiguous(), "a slot's own tail is contiguous"
    assert tails.dtype == x.dtype
    assert weights.taps.dtype == torch.float32
    assert weights.taps.is_contiguous()
    assert weights.bias is None or weights.bias.shape == (channels,)
