"""Norms over the last dimension, each in one pass: plain ones with the residual sum before them, gated ones.

daemon/layers/norms.py and kernels/gated_norm.py have the mathematics. All arithmetic is fp32; only where the product
with the weight is taken after the cast back (`cast_first`) is there a rounding between.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch_table import Bucket, Tunable, one_bucket
from kernels.triton_chain import chained, lead

ROWS_ELEMENTS = 2048  # of short rows that a program takes at once, where nothing was measured


@dataclass(frozen=True, slots=True)
class NormTiles:
    """How a launch is cut. Both decide in which order a row's squares are summed."""

    rows: int  # that a program takes, a power of two
    num_warps: int


def _default_tiles(width: int) -> tuple[Bucket[NormTiles], ...]:
    """A thread has at least 8 values, which is one load of bfloat16."""
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, max(block, ROWS_ELEMENTS) // 512))
    return one_bucket(NormTiles(rows=max(1, ROWS_ELEMENTS // block), num_warps=warps))


RMS_NORM = Tunable("rms_norm", ("width",), _default_tiles, neutral=False)
GATED_NORM = Tunable("gated_norm", ("width",), _default_tiles, neutral=False)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) times the weight, in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, WIDTH]; becomes the sum where RESIDUAL
    addend_ptr,  # [num_rows, WIDTH], read where RESIDUAL
    weight_ptr,  # [WIDTH]
    out_ptr,
    num_rows,
    x_stride,
    addend_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (columns < WIDTH)
    x_at = x_ptr + row * x_stride + columns
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    lead(CHAINED)
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(addend_ptr + row * addend_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    if CAST_FIRST:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, (x * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, cast_first: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, d] or [rows, heads, d] over d, in its own dtype.

    Args:
        x: last dimension contiguous; rows at any stride. Three dimensions: heads at any one stride, too.
        weight: [d]; a zero-centred one has had 1 added to it.
        eps: under the root.
        cast_first: x's dtype is taken on before the product with the weight, not after it.
        out: where to write; may be x itself.
    """
    if x.dim() == 3:
        assert x.stride(0) == x.shape[1] * x.stride(1) or x.is_contiguous(), "heads of a row follow each other"
        flat = x.view(-1, x.shape[-1])
        made = rms_norm(flat, weight, eps, cast_first=cast_first, out=None if out is None else out.view(flat.shape))
        return made.view(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, out, eps, cast_first, RMS_NORM.look_up(x.device, width=x.shape[1]))
    return out


def add_rms_norm(
    hidden: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    cast_first: bool,
    tiles: NormTiles | None = None,
) -> torch.Tensor:
    """hidden += addend, in place, and the norm of the sum as it was rounded; both [rows, d]."""
    tiles = tiles or RMS_NORM.look_up(hidden.device, width=hidden.shape[1])
    assert addend.shape == hidden.shape
    assert addend.stride(1) == 1
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch(hidden, addend, weight, out, eps, cast_first, tiles)
    return out


def _launch(
    x: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    cast_first: bool,
    tiles: NormTiles,
) -> None:
    num_rows, width = x.shape
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert out.shape == x.shape
    assert out.stride(1) == 1
    if num_rows == 0:
        return
    _rms_norm_kernel[(triton.cdiv(num_rows, tiles.rows),)](
        x,
        addend,
        weight,
        out,
        num_rows,
        x.stride(0),
        0 if addend is None else addend.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=tiles.rows,
        RESIDUAL=addend is not None,
        CAST_FIRST=cast_first,
        **chained(),
        num_warps=tiles.num_warps,
    )


@triton.jit
def _gated_norm_kernel(
    x_ptr,  # [num_rows * HEADS, WIDTH], contiguous
    gate_ptr,  # [num_rows, HEADS * WIDTH], any stride between rows
    weight_ptr,
    out_ptr,  # as x
    num_parts,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # that a program takes
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    part = (tl.program_id(0) * PARTS + tl.arange(0, PARTS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (part < num_parts) & (columns < WIDTH)
    x = tl.load(x_ptr + part * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate_at = gate_ptr + (part // HEADS) * gate_stride + (part % HEADS) * WIDTH + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    shut = tl.sigmoid(gate)
    if not SIGMOID:
        shut *= gate
    if GATE_FIRST:
        x *= shut
    x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    if GATE_FIRST:
        weight_at = weight_ptr + (part % HEADS) * WIDTH + columns
    else:
        x *= shut
        weight_at = weight_ptr + part * 0 + columns
    x *= tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + part * WIDTH + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_silu_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, tiles: NormTiles | None = None
) -> torch.Tensor:
    """RMSNorm(x) weight silu(gate); x [rows, heads, d], gate [rows, heads d] of any row stride, out in gate's dtype."""
    return _gated(x, gate, weight, eps, sigmoid=False, tiles=tiles)


def rms_norm_sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) weight sigmoid(gate); shapes as in `rms_norm_silu_gate`."""
    return _gated(x, gate, weight, eps, sigmoid=True)


def gated_group_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    num_groups: int,
    eps: float,
    tiles: NormTiles | None = None,
) -> torch.Tensor:
    """weight RMSNorm(x silu(gate)) within each of `num_groups` equal parts; x, gate [rows, d], out in gate's dtype."""
    assert x.shape[1] % num_groups == 0, f"{num_groups} groups do not divide {x.shape[1]} channels"
    parts = x.unflatten(1, (num_groups, -1))
    return _gated(parts, gate, weight, eps, sigmoid=False, gate_first=True, tiles=tiles).flatten(1)


def _gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    sigmoid: bool,
    gate_first: bool = False,
    tiles: NormTiles | None = None,
) -> torch.Tensor:
    num_rows, heads, width = x.shape
    assert x.is_contiguous()
    assert gate.shape == (num_rows, heads * width)
    assert gate.stride(1) == 1
    assert weight.shape == ((heads * width,) if gate_first else (width,))
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = tiles or GATED_NORM.look_up(x.device, width=width)
    _gated_norm_kernel[(triton.cdiv(num_rows * heads, tiles.rows),)](
        *(x, gate, weight, out, num_rows * heads, gate.stride(0), eps),
        HEADS=heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PARTS=tiles.rows,
        SIGMOID=sigmoid,
        GATE_FIRST=gate_first,
        num_warps=tiles.num_warps,
    )
    return out
