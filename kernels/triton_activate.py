"""Products of two halves of a row in one pass: between an MLP's matrices (kernels/moe.py's `activate`), or a gate."""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from kernels.moe import Activation, ActivationKind
from kernels.triton_chain import chained, follow

COLUMNS = 1024  # that a program takes


@triton.jit
def activated(gate, up, limit, CLAMPED: tl.constexpr):
    """silu(gate) times up, all float32."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _activate_kernel(
    x_ptr,  # [num_rows, (2 if GATED else 1) * INNER]
    out_ptr,  # [num_rows, INNER]
    x_stride,
    limit,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + INNER + columns, mask=inside, other=0.0).to(tl.float32)
        made = activated(x, up, limit, CLAMPED)
    else:
        made = tl.maximum(x, 0.0)
        made = made * made
    tl.store(out_ptr + row * INNER + columns, made.to(out_ptr.dtype.element_ty), mask=inside)


def activate(hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[num_rows, 2 I], gate before up, to [num_rows, I] for SWIGLU, else the shape stays; rows at any stride."""
    num_rows, width = hidden.shape
    gated = activation.kind is ActivationKind.SWIGLU
    assert hidden.stride(1) == 1
    assert width % 2 == 0 or not gated
    inner = width // 2 if gated else width
    out = torch.empty((num_rows, inner), dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        block = min(COLUMNS, triton.next_power_of_2(inner))
        _activate_kernel[(num_rows, triton.cdiv(inner, block))](
            *(hidden, out, hidden.stride(0), 0.0 if activation.limit is None else activation.limit),
            INNER=inner,
            GATED=gated,
            CLAMPED=activation.limit is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


@triton.jit
def _gate_heads_kernel(
    x_ptr,  # [num_rows, HEADS, DIM], contiguous
    gate_ptr,  # the same shape, heads and rows at any stride
    out_ptr,  # as x
    row_stride,
    head_stride,
    SIZE: tl.constexpr,  # HEADS * DIM
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    follow(CHAINED)
    x = tl.load(x_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = gate_ptr + row * row_stride + at // DIM * head_stride + at % DIM
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=inside)


def gate_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x sigmoid(gate), both [num_rows, heads, dim], the gate's heads at any stride: [num_rows, heads * dim]."""
    num_rows, heads, dim = x.shape
    assert gate.shape == x.shape
    assert x.is_contiguous()
    assert gate.stride(2) == 1
    out = torch.empty((num_rows, heads * dim), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(COLUMNS, triton.next_power_of_2(heads * dim))
        _gate_heads_kernel[(num_rows, triton.cdiv(heads * dim, block))](
            *(x, gate, out, gate.stride(0), gate.stride(1)),
            SIZE=heads * dim,
            DIM=dim,
            BLOCK=block,
            **chained(),
            num_warps=4,
        )
    return out
