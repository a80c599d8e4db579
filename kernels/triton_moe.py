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
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch_table import Bucket, Tunable
from kernels.moe import Activation, ActivationKind, Routing
from kernels.triton_activate import activated
from kernels.triton_chain import chained, follow
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
    """Of both products. A tile takes `rest` rows more, where they are all that an expert has beyond it."""

    rows: int
    rest: int
    up: ProductTiles
    down: ProductTiles


FEW = MoeTiles(16, 0, ProductTiles(64, 128, 4, 5), ProductTiles(128, 128, 4, 3))
MANY = MoeTiles(64, 0, ProductTiles(64, 64, 4, 3), ProductTiles(128, 64, 4, 3))
MOST = MoeTiles(128, 32, ProductTiles(128, 64, 8, 4), ProductTiles(128, 64, 4, 3))
# By how many rows an expert has on average.
EXPERTS = Tunable(
    "grouped_experts",
    ("num_experts", "width", "inner"),
    lambda *_: (Bucket(8, FEW), Bucket(64, MANY), Bucket(None, MOST)),
    neutral=True,
)


@triton.jit
def _gathered(rows_ptr, order_ptr, row_stride, places, end, inner, TOP_K: tl.constexpr):
    """Pointers to the rows of places, and which places are there."""
    held = (places < end)[:, None]
    row = tl.load(order_ptr + places, mask=places < end, other=0) // TOP_K
    return rows_ptr + row.to(tl.int64)[:, None] * row_stride + inner[None, :], held


@triton.jit
def _between(acc, raised, limit, dtype: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr):
    """What stands between the two matrices, [places, columns] of [columns, places]."""
    if GATED:
        acc = activated(acc, raised, limit, CLAMPED)
    else:
        acc = tl.maximum(acc, 0.0)
        acc *= acc
    return tl.trans(acc.to(dtype))


@triton.jit
def _up_tile(
    rows_ptr, up, hidden_ptr, order_ptr, expert, column, first, end, row_stride, limit,
    WIDTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    M: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of M places, and REST after them. Weights are the left matrix, so that places need not come by 64."""
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    inner = tl.arange(0, K)
    places = first + tl.arange(0, M)
    x_at, held = _gathered(rows_ptr, order_ptr, row_stride, places, end, inner, TOP_K)
    acc = tl.zeros((N, M), tl.float32)
    raised = tl.zeros((N, M), tl.float32)
    if REST > 0:
        more = first + M + tl.arange(0, REST)
        more_at, more_held = _gathered(rows_ptr, order_ptr, row_stride, more, end, inner, TOP_K)
        more_acc = tl.zeros((N, REST), tl.float32)
        more_raised = tl.zeros((N, REST), tl.float32)
    w_row = expert * (INNER * (2 if GATED else 1)) + column
    for start in range(0, WIDTH, K):
        wanted = held if WIDTH % K == 0 else held & (start + inner < WIDTH)[None, :]
        x = tl.trans(tl.load(x_at + start, mask=wanted, other=0.0))
        if REST > 0:
            more_wanted = more_held if WIDTH % K == 0 else more_held & (start + inner < WIDTH)[None, :]
            more_x = tl.trans(tl.load(more_at + start, mask=more_wanted, other=0.0))
        w = up.load([w_row, start])
        if GATED:
            w_up = up.load([w_row + INNER, start])
        acc = tl.dot(w, x, acc)
        if GATED:
            raised = tl.dot(w_up, x, raised)
        if REST > 0:
            more_acc = tl.dot(w, more_x, more_acc)
            if GATED:
                more_raised = tl.dot(w_up, more_x, more_raised)
    columns = column + tl.arange(0, N)
    made = _between(acc, raised, limit, dtype, GATED, CLAMPED)
    to = hidden_ptr + places.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(to, made, mask=held & (columns < INNER)[None, :])
    if REST > 0:
        made = _between(more_acc, more_raised, limit, dtype, GATED, CLAMPED)
        more_to = hidden_ptr + more.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(more_to, made, mask=more_held & (columns < INNER)[None, :])


@triton.jit
def _up_kernel(
    rows_ptr,  # [num_rows, WIDTH]
    up,  # descriptor of [num_experts * (2 if GATED else 1) * INNER, WIDTH], tiles [N, K]
    hidden_ptr,  # [num_assignments, INNER], by place
    order_ptr,
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    row_stride,
    limit,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    M: tl.constexpr,
    REST: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    column = tl.program_id(0) * N
    expert = tl.load(tile_expert_ptr + tile)
    first = tl.load(tile_first_ptr + tile)
    end = tl.load(tile_end_ptr + tile)
    if REST == 0 or end - first <= M:
        _up_tile(
            rows_ptr, up, hidden_ptr, order_ptr, expert, column, first, end, row_stride, limit,
            WIDTH, INNER, TOP_K, GATED, CLAMPED, M, 0, N, K,
        )  # fmt: skip
    else:
        _up_tile(
            rows_ptr, up, hidden_ptr, order_ptr, expert, column, first, end, row_stride, limit,
            WIDTH, INNER, TOP_K, GATED, CLAMPED, M, REST, N, K,
        )  # fmt: skip


@triton.jit
def _put(made_ptr, order_ptr, acc, places, end, columns, WIDTH: tl.constexpr):
    """Columns [N, places] to where their assignments are."""
    held = places < end
    assignment = tl.load(order_ptr + places, mask=held, other=0).to(tl.int64)
    to = made_ptr + assignment[:, None] * WIDTH + columns[None, :]
    made = tl.trans(acc.to(made_ptr.dtype.element_ty))
    tl.store(to, made, mask=held[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _down_tile(
    hidden, more_hidden, down, made_ptr, order_ptr, expert, column, first, end,
    WIDTH: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """As `_up_tile`. Rows of `hidden` past the tile's end are another expert's, and only give columns nobody takes."""
    acc = tl.zeros((N, M), tl.float32)
    if REST > 0:
        more_acc = tl.zeros((N, REST), tl.float32)
    w_row = expert * WIDTH + column
    for start in range(0, INNER, K):
        x = tl.trans(hidden.load([first, start]))
        w = down.load([w_row, start])
        acc = tl.dot(w, x, acc)
        if REST > 0:
            more_acc = tl.dot(w, tl.trans(more_hidden.load([first + M, start])), more_acc)
    columns = column + tl.arange(0, N)
    _put(made_ptr, order_ptr, acc, first + tl.arange(0, M), end, columns, WIDTH)
    if REST > 0:
        _put(made_ptr, order_ptr, more_acc, first + M + tl.arange(0, REST), end, columns, WIDTH)


@triton.jit
def _down_kernel(
    hidden,  # descriptor of [num_assignments, INNER], by place; tiles [M, K]
    more_hidden,  # the same in tiles [REST, K], read where REST > 0
    down,  # descriptor of [num_experts * WIDTH, INNER], tiles [N, K]
    made_ptr,  # [num_assignments, WIDTH], by assignment
    order_ptr,
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    M: tl.constexpr,
    REST: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    column = tl.program_id(0) * N
    expert = tl.load(tile_expert_ptr + tile)
    first = tl.load(tile_first_ptr + tile)
    end = tl.load(tile_end_ptr + tile)
    if REST == 0 or end - first <= M:
        _down_tile(hidden, more_hidden, down, made_ptr, order_ptr, expert, column, first, end, WIDTH, INNER, M, 0, N, K)
    else:
        _down_tile(
            hidden, more_hidden, down, made_ptr, order_ptr, expert, column, first, end, WIDTH, INNER, M, REST, N, K
        )


@triton.jit
def _combine_kernel(
    made_ptr,  # [num_rows, TOP_K, WIDTH]
    weights_ptr,  # [num_rows, TOP_K]
    out_ptr,  # [num_rows, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
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
    assert width % 8 == 0, "rows of a weight begin at multiples of 16 bytes"
    assert inner % 8 == 0, "rows of a weight begin at multiples of 16 bytes"
    num_assignments = num_rows * top_k
    per_expert = triton.cdiv(num_assignments, num_experts)
    tiles = tiles or EXPERTS.look_up(
        rows.device, num_rows=per_expert, num_experts=num_experts, width=width, inner=inner
    )
    groups = group_by_expert(routing.experts, num_experts, tiles.rows, tiles.rest)
    hidden = torch.empty((num_assignments, inner), dtype=rows.dtype, device=rows.device)
    made = torch.empty((num_assignments, width_out), dtype=rows.dtype, device=rows.device)
    where = _group_arguments(groups)
    room = groups.tile_expert.shape[0]
    # Programs of a tile run side by side: its rows are in the cache.
    _up_kernel[(triton.cdiv(inner, tiles.up.columns), room)](
        *(rows, _bulk(up.flatten(0, 1), tiles.up.columns, tiles.up.inner), hidden, *where, rows.stride(0)),
        0.0 if activation.limit is None else activation.limit,
        WIDTH=width,
        INNER=inner,
        TOP_K=top_k,
        GATED=gated,
        CLAMPED=activation.limit is not None,
        M=tiles.rows,
        REST=tiles.rest,
        N=tiles.up.columns,
        K=tiles.up.inner,
        **chained(),
        num_warps=tiles.up.num_warps,
        num_stages=tiles.up.num_stages,
    )
    cut = tiles.down
    _down_kernel[(triton.cdiv(width_out, cut.columns), room)](
        *(_bulk(hidden, tiles.rows, cut.inner), _bulk(hidden, tiles.rest, cut.inner) if tiles.rest else None),
        *(_bulk(down.flatten(0, 1), cut.columns, cut.inner), made, *where),
        WIDTH=width_out,
        INNER=inner,
        M=tiles.rows,
        REST=tiles.rest,
        N=cut.columns,
        K=cut.inner,
        **chained(),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    columns = min(1024, triton.next_power_of_2(width_out))
    _combine_kernel[(num_rows, triton.cdiv(width_out, columns))](
        *(made, routing.weights, out), WIDTH=width_out, TOP_K=top_k, N=columns, **chained(), num_warps=4
    )
    return out


def _bulk(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix for copies of whole tiles; what lies past its ends reads 0."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _group_arguments(groups: Groups) -> tuple[torch.Tensor, ...]:
    return groups.order, groups.num_tiles, groups.tile_expert, groups.tile_first, groups.tile_end
