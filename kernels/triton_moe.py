"""Routed experts as two grouped matrix products: kernels/moe.py has the mathematics and the reference.

Tiles of rows of one expert (kernels/triton_routing.py) go through that expert's matrices; the first product also
gathers rows and activates, the second puts each assignment's result where the sum of a row's choices finds it, which
runs over the choices in the router's order, in fp32. A row's bytes depend on other rows only through the tile size.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.moe import Activation, ActivationKind, Routing
from kernels.triton_routing import Groups, group_by_expert


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """How one product is cut."""

    columns: int  # of the result, that a program makes; of gate and of up each
    inner: int  # summed at once
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """Of both products."""

    rows: int
    up: ProductTiles
    down: ProductTiles


FEW = MoeTiles(16, ProductTiles(32, 256, 4, 3), ProductTiles(64, 128, 4, 4))
MANY = MoeTiles(64, ProductTiles(64, 64, 4, 3), ProductTiles(128, 64, 4, 3))
MOST = MoeTiles(128, ProductTiles(128, 64, 8, 4), ProductTiles(256, 64, 8, 4))


def moe_tiles(num_assignments: int, num_experts: int) -> MoeTiles:
    """What was fastest on an H200, by how many rows an expert has on average."""
    if num_assignments <= 8 * num_experts:
        return FEW
    return MANY if num_assignments <= 64 * num_experts else MOST


@triton.jit
def _up_kernel(
    rows_ptr,  # [num_rows, WIDTH]
    up_ptr,  # [num_experts, (2 if GATED else 1) * INNER, WIDTH]
    hidden_ptr,  # [num_assignments, INNER], by place
    order_ptr,
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    row_stride,
    expert_stride,
    limit,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    places = tl.load(tile_first_ptr + tile) + tl.arange(0, M)
    held = places < tl.load(tile_end_ptr + tile)
    row = tl.load(order_ptr + places, mask=held, other=0) // TOP_K
    columns = tl.program_id(1) * N + tl.arange(0, N)
    in_columns = columns < INNER
    inner = tl.arange(0, K)
    x_at = rows_ptr + row.to(tl.int64)[:, None] * row_stride + inner[None, :]
    w_at = up_ptr + tl.load(tile_expert_ptr + tile).to(tl.int64) * expert_stride
    w_at += columns[None, :] * WIDTH + inner[:, None]
    acc = tl.zeros((M, N), tl.float32)
    raised = tl.zeros((M, N), tl.float32)
    for start in range(0, WIDTH, K):
        if WIDTH % K == 0:
            x = tl.load(x_at + start, mask=held[:, None], other=0.0)
            wanted = in_columns[None, :]
        else:
            inside = start + inner < WIDTH
            x = tl.load(x_at + start, mask=held[:, None] & inside[None, :], other=0.0)
            wanted = in_columns[None, :] & inside[:, None]
        acc = tl.dot(x, tl.load(w_at + start, mask=wanted, other=0.0), acc)
        if GATED:
            raised = tl.dot(x, tl.load(w_at + INNER * WIDTH + start, mask=wanted, other=0.0), raised)
    if GATED:
        if CLAMPED:
            acc = tl.minimum(acc, limit)
            raised = tl.minimum(tl.maximum(raised, -limit), limit)
        acc *= tl.sigmoid(acc) * raised
    else:
        acc = tl.maximum(acc, 0.0)
        acc *= acc
    to = hidden_ptr + places.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(to, acc.to(hidden_ptr.dtype.element_ty), mask=held[:, None] & in_columns[None, :])


@triton.jit
def _down_kernel(
    hidden_ptr,  # [num_assignments, INNER], by place
    down_ptr,  # [num_experts, WIDTH, INNER]
    made_ptr,  # [num_assignments, WIDTH], by assignment
    order_ptr,
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    expert_stride,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    places = tl.load(tile_first_ptr + tile) + tl.arange(0, M)
    held = places < tl.load(tile_end_ptr + tile)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    in_columns = columns < WIDTH
    inner = tl.arange(0, K)
    x_at = hidden_ptr + places.to(tl.int64)[:, None] * INNER + inner[None, :]
    w_at = down_ptr + tl.load(tile_expert_ptr + tile).to(tl.int64) * expert_stride
    w_at += columns[None, :] * INNER + inner[:, None]
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, INNER, K):
        if INNER % K == 0:
            x = tl.load(x_at + start, mask=held[:, None], other=0.0)
            w = tl.load(w_at + start, mask=in_columns[None, :], other=0.0)
        else:
            inside = start + inner < INNER
            x = tl.load(x_at + start, mask=held[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=in_columns[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    assignment = tl.load(order_ptr + places, mask=held, other=0).to(tl.int64)
    to = made_ptr + assignment[:, None] * WIDTH + columns[None, :]
    tl.store(to, acc.to(made_ptr.dtype.element_ty), mask=held[:, None] & in_columns[None, :])


@triton.jit
def _combine_kernel(
    made_ptr,  # [num_rows, TOP_K, WIDTH]
    weights_ptr,  # [num_rows, TOP_K]
    out_ptr,  # [num_rows, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = columns < WIDTH
    acc = tl.zeros((N,), tl.float32)
    for choice in tl.static_range(TOP_K):
        made = tl.load(made_ptr + (row * TOP_K + choice) * WIDTH + columns, mask=inside, other=0.0)
        acc += made.to(tl.float32) * tl.load(weights_ptr + row * TOP_K + choice)
    tl.store(out_ptr + row * WIDTH + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_experts(
    rows: torch.Tensor,
    routing: Routing,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    *,
    tiles: MoeTiles | None = None,
) -> torch.Tensor:
    """As kernels/moe.py's: rows [num_rows, D] to [num_rows, D_out] in the dtype of `rows`, bfloat16 or float16.

    Args:
        rows: any stride between rows.
        routing: of these rows; every expert id is in [0, num_experts).
        up: [num_experts, 2 I, D] with gate above up for SWIGLU, [num_experts, I, D] for RELU_SQUARED.
        down: [num_experts, D_out, I].
        activation: between the two.
        tiles: how to cut the work; default: by the number of assignments.
    """
    num_rows, width = rows.shape
    num_experts, width_out, inner = down.shape
    top_k = routing.experts.shape[1]
    gated = activation.kind is ActivationKind.SWIGLU
    assert routing.experts.shape == routing.weights.shape == (num_rows, top_k)
    assert routing.weights.dtype == torch.float32
    assert routing.weights.is_contiguous()
    assert up.shape == (num_experts, inner * (2 if gated else 1), width)
    assert rows.dtype == up.dtype == down.dtype
    assert rows.dtype in (torch.bfloat16, torch.float16)
    assert rows.stride(1) == 1
    assert up.is_contiguous()
    assert down.is_contiguous()
    out = torch.empty((num_rows, width_out), dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    num_assignments = num_rows * top_k
    tiles = tiles or moe_tiles(num_assignments, num_experts)
    groups = group_by_expert(routing.experts, num_experts, tiles.rows)
    hidden = torch.empty((num_assignments, inner), dtype=rows.dtype, device=rows.device)
    made = torch.empty((num_assignments, width_out), dtype=rows.dtype, device=rows.device)
    where = _group_arguments(groups)
    room = groups.tile_expert.shape[0]
    _up_kernel[(room, triton.cdiv(inner, tiles.up.columns))](
        *(rows, up, hidden, *where, rows.stride(0), up.stride(0)),
        0.0 if activation.limit is None else activation.limit,
        WIDTH=width,
        INNER=inner,
        TOP_K=top_k,
        GATED=gated,
        CLAMPED=activation.limit is not None,
        M=tiles.rows,
        N=tiles.up.columns,
        K=tiles.up.inner,
        num_warps=tiles.up.num_warps,
        num_stages=tiles.up.num_stages,
    )
    _down_kernel[(room, triton.cdiv(width_out, tiles.down.columns))](
        *(hidden, down, made, *where, down.stride(0)),
        WIDTH=width_out,
        INNER=inner,
        M=tiles.rows,
        N=tiles.down.columns,
        K=tiles.down.inner,
        num_warps=tiles.down.num_warps,
        num_stages=tiles.down.num_stages,
    )
    columns = min(1024, triton.next_power_of_2(width_out))
    _combine_kernel[(num_rows, triton.cdiv(width_out, columns))](
        *(made, routing.weights, out), WIDTH=width_out, TOP_K=top_k, N=columns, num_warps=4
    )
    return out


def _group_arguments(groups: Groups) -> tuple[torch.Tensor, ...]:
    return groups.order, groups.num_tiles, groups.tile_expert, groups.tile_first, groups.tile_end
