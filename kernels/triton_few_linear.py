"""A matrix product of few rows: every weight is read once, and asked for before the rows are there.

The libraries' products are made for tiles of rows; with a handful they keep too few loads in flight, above all where
the matrix is small. Here a program holds the weights of its columns in registers, and only then waits for the launch
that makes the rows (kernels/triton_chain.py).
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.triton_chain import chained, follow

FEW_ROWS = 4  # beyond it a library's product is as fast
PIECE = 1024  # weights of a column that a program holds at a time
WIDE = 2048  # columns from which a program takes two of them
LONG = 16384  # weights of a column beyond which it has registers for one


@triton.jit
def fetch(weights_ptr, columns, inside, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """Rows `columns` [N] of a matrix [*, WIDTH]: a tuple of tiles [N, PIECE], all of them on their way at once."""
    at = tl.arange(0, PIECE)[None, :]
    rows = weights_ptr + columns.to(tl.int64)[:, None] * WIDTH
    tiles = ()
    for first in tl.static_range(0, WIDTH, PIECE):
        held = inside[:, None] if WIDTH % PIECE == 0 else inside[:, None] & (first + at < WIDTH)
        tiles += (tl.load(rows + first + at, mask=held, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def add_products(acc, tiles, x_ptr, factor, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """acc [N, PIECE] plus `factor` times the products of fetched `tiles` with one row x [WIDTH].

    They are not summed yet: sums make threads wait for each other, and loads of several matrices for these sums.
    """
    for i in tl.static_range(len(tiles)):
        at = i * PIECE + tl.arange(0, PIECE)
        x = tl.load(x_ptr + at) if WIDTH % PIECE == 0 else tl.load(x_ptr + at, mask=at < WIDTH, other=0.0)
        acc += tiles[i].to(tl.float32) * (x.to(tl.float32) * factor)[None, :]
    return acc


@triton.jit
def _few_linear_kernel(
    x_ptr,  # [num_rows, WIDTH]
    weights_ptr,  # [num_columns, WIDTH]
    bias_ptr,  # [num_columns], read where BIAS
    out_ptr,  # [num_rows, num_columns]
    num_columns,
    x_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PIECE: tl.constexpr,
    N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    columns = tl.program_id(0) * N + tl.arange(0, N)
    inside = columns < num_columns
    tiles = fetch(weights_ptr, columns, inside, WIDTH, PIECE)
    follow(CHAINED)
    for row in tl.static_range(ROWS):
        acc = add_products(tl.zeros((N, PIECE), tl.float32), tiles, x_ptr + row * x_stride, 1.0, WIDTH, PIECE)
        sums = tl.sum(acc, 1)
        if BIAS:
            sums += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * num_columns + columns, sums.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [num_rows, in] times weight [out, in] transposed, plus bias, in the dtype of `weight`; rows at any stride."""
    num_rows, width = x.shape
    if not 0 < num_rows <= FEW_ROWS:
        return functional.linear(x.to(weight.dtype), weight, bias)
    num_columns = weight.shape[0]
    assert weight.shape == (num_columns, width)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    out = torch.empty((num_rows, num_columns), dtype=weight.dtype, device=x.device)
    columns = 2 if num_columns >= WIDE and width <= LONG else 1
    _few_linear_kernel[(triton.cdiv(num_columns, columns),)](
        *(x, weight, bias, out, num_columns, x.stride(0)),
        WIDTH=width,
        ROWS=num_rows,
        BIAS=bias is not None,
        PIECE=min(PIECE, triton.next_power_of_2(width)),
        N=columns,
        **chained(),
        num_warps=4,
    )
    return out
