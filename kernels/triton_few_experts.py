"""A mixture of experts for few rows, in two launches: nothing is sorted, and the shared expert is one choice more.

With a handful of rows hardly two of them choose the same expert, so that grouping rows by expert gains nothing, and its
launches cost more than the weights' way through the memory. Sums are taken in the order of the choices, the shared
expert last, in fp32.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

from kernels.moe import ActivationKind, Mixture, Routing
from kernels.triton_activate import activated
from kernels.triton_chain import chained, follow
from kernels.triton_few_linear import add_products, fetch

UP_COLUMNS, UP_PIECE = 2, 1024
DOWN_COLUMNS, DOWN_PIECE = 4, 512  # at most so many columns
DOWN_HELD = 36  # pieces of the second matrices that a program has registers for


@triton.jit
def _fetch_up(
    up_ptr, columns, inside, INNER: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, PIECE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The weights of an expert's first matrix at `columns`: of the gate, then of what it gates."""
    if GATED:
        both = tl.arange(0, 2)[:, None] * INNER + columns[None, :]
        held = tl.broadcast_to(inside[None, :], (2, N))
        return fetch(up_ptr, tl.reshape(both, (2 * N,)), tl.reshape(held, (2 * N,)), WIDTH, PIECE)
    else:  # noqa: RET505 - decided while compiling
        return fetch(up_ptr, columns, inside, WIDTH, PIECE)


@triton.jit
def _made(
    tiles, x_ptr, limit, WIDTH: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, PIECE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """What an expert makes of a row between its two matrices; products are rounded as a matrix's are."""
    parts: tl.constexpr = 2 if GATED else 1
    acc = add_products(tl.zeros((parts * N, PIECE), tl.float32), tiles, x_ptr, 1.0, WIDTH, PIECE)
    sums = tl.sum(acc, 1).to(tiles[0].dtype).to(tl.float32)
    if GATED:
        sums = tl.reshape(sums, (2, N))
        is_gate = tl.arange(0, 2)[:, None] == 0
        gate = tl.sum(tl.where(is_gate, sums, 0.0), 0)
        made = activated(gate, tl.sum(tl.where(is_gate, 0.0, sums), 0), limit, CLAMPED)
    else:
        made = tl.maximum(sums, 0.0)
        made = made * made
    return made


@triton.jit
def _up_kernel(
    x_ptr,  # [num_rows, WIDTH]
    experts_ptr,  # [num_rows, TOP_K] int64
    up_ptr,  # [num_experts, (2 if GATED else 1) * INNER, WIDTH]
    shared_ptr,  # [(2 if GATED else 1) * SHARED, WIDTH], read where SHARED > 0
    gate_ptr,  # [WIDTH], read where GATE
    hidden_ptr,  # [num_rows, TOP_K * INNER + SHARED]
    opened_ptr,  # [num_rows] float32, written where GATE: the shared expert's factor
    x_stride,
    expert_stride,
    limit,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    GATE: tl.constexpr,
    PIECE: tl.constexpr,
    N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    SHARED_TILES: tl.constexpr = (SHARED + N - 1) // N
    TILES: tl.constexpr = (INNER + N - 1) // N
    x_ptr += row * x_stride
    hidden_ptr += row * (TOP_K * INNER + SHARED)
    if tile < SHARED_TILES:
        columns = tile * N + tl.arange(0, N)
        inside = columns < SHARED
        tiles = _fetch_up(shared_ptr, columns, inside, SHARED, WIDTH, GATED, PIECE, N)
        follow(CHAINED)
        at = TOP_K * INNER + columns
        made = _made(tiles, x_ptr, limit, WIDTH, GATED, CLAMPED, PIECE, N)
        if GATE:  # noqa: SIM102 - decided while compiling
            if tile == 0:
                one = tl.zeros((1,), tl.int32)
                shut = fetch(gate_ptr, one, one == 0, WIDTH, PIECE)
                shut = add_products(tl.zeros((1, PIECE), tl.float32), shut, x_ptr, 1.0, WIDTH, PIECE)
                tl.store(opened_ptr + row, tl.sigmoid(tl.sum(tl.sum(shut, 1), 0)))
    else:
        follow(CHAINED)
        choice = (tile - SHARED_TILES) // TILES
        columns = ((tile - SHARED_TILES) % TILES) * N + tl.arange(0, N)
        inside = columns < INNER
        expert = tl.load(experts_ptr + row * TOP_K + choice)
        tiles = _fetch_up(up_ptr + expert * expert_stride, columns, inside, INNER, WIDTH, GATED, PIECE, N)
        at = choice * INNER + columns
        made = _made(tiles, x_ptr, limit, WIDTH, GATED, CLAMPED, PIECE, N)
    tl.store(hidden_ptr + at, made.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _down_kernel(
    hidden_ptr,  # [num_rows, TOP_K * INNER + SHARED]
    opened_ptr,  # [num_rows] float32, read where GATE
    experts_ptr,  # [num_rows, TOP_K] int64
    weights_ptr,  # [num_rows, TOP_K] float32
    down_ptr,  # [num_experts, WIDTH, INNER]
    shared_ptr,  # [WIDTH, SHARED]
    out_ptr,  # [num_rows, WIDTH]
    expert_stride,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,
    PIECE: tl.constexpr,
    N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    columns = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(1).to(tl.int64)
    inside = columns < WIDTH
    hidden_ptr += row * (TOP_K * INNER + SHARED)
    # The launch before this one makes nothing but `hidden` and `opened`: what it has read itself is there. Caches of a
    # multiprocessor may hold what was there a step ago.
    matrices = ()
    weights = ()
    for choice in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + row * TOP_K + choice, cache_modifier=".cg")
        weights += (tl.load(weights_ptr + row * TOP_K + choice, cache_modifier=".cg"),)
        matrices += (fetch(down_ptr + expert * expert_stride, columns, inside, INNER, PIECE),)
    if SHARED > 0:
        shared = fetch(shared_ptr, columns, inside, SHARED, PIECE)
    follow(CHAINED)
    opened = tl.load(opened_ptr + row) if GATE else 1.0
    acc = tl.zeros((N, PIECE), tl.float32)
    for choice in tl.static_range(TOP_K):
        acc = add_products(acc, matrices[choice], hidden_ptr + choice * INNER, weights[choice], INNER, PIECE)
    if SHARED > 0:
        acc = add_products(acc, shared, hidden_ptr + TOP_K * INNER, opened, SHARED, PIECE)
    tl.store(out_ptr + row * WIDTH + columns, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=inside)


def few_experts(rows: torch.Tensor, routing: Routing, mixture: Mixture) -> torch.Tensor:
    """Routed experts and the shared one over few rows [num_rows, D], any stride between them: [num_rows, D_out]."""
    up, down, activation = mixture.up, mixture.down, mixture.activation
    num_rows, width = rows.shape
    width_out, inner = down.shape[1:]
    top_k = routing.experts.shape[1]
    gated = activation.kind is ActivationKind.SWIGLU
    shared_up, shared_down, gate = mixture.shared_up, mixture.shared_down, mixture.shared_gate
    shared = 0
    if shared_up is not None:
        assert shared_down is not None
        shared = shared_down.shape[1]
        assert shared_up.shape == (shared * (2 if gated else 1), width)
        assert shared_down.shape == (width_out, shared)
        assert shared_up.is_contiguous()
        assert shared_down.is_contiguous()
    assert gate is None or (shared and gate.numel() == width)
    assert routing.experts.shape == routing.weights.shape == (num_rows, top_k)
    assert routing.experts.is_contiguous()
    assert routing.weights.is_contiguous()
    assert up.shape[1:] == (inner * (2 if gated else 1), width)
    assert up.is_contiguous()
    assert down.is_contiguous()
    assert rows.dtype == up.dtype == down.dtype
    assert rows.stride(1) == 1
    hidden = torch.empty((num_rows, top_k * inner + shared), dtype=rows.dtype, device=rows.device)
    out = torch.empty((num_rows, width_out), dtype=rows.dtype, device=rows.device)
    opened = torch.empty(num_rows if gate is not None else 0, dtype=torch.float32, device=rows.device)
    tiles = top_k * triton.cdiv(inner, UP_COLUMNS) + triton.cdiv(shared, UP_COLUMNS)
    _up_kernel[(tiles, num_rows)](
        *(rows, routing.experts, up, up if shared_up is None else shared_up, gate, hidden, opened),
        *(rows.stride(0), up.stride(0)),
        0.0 if activation.limit is None else activation.limit,
        WIDTH=width,
        INNER=inner,
        SHARED=shared,
        TOP_K=top_k,
        GATED=gated,
        CLAMPED=activation.limit is not None,
        GATE=gate is not None,
        PIECE=min(UP_PIECE, triton.next_power_of_2(width)),
        N=UP_COLUMNS,
        **chained(),
        num_warps=4,
    )
    piece = min(DOWN_PIECE, triton.next_power_of_2(inner))
    columns = _down_columns(top_k * triton.cdiv(inner, piece) + triton.cdiv(shared, piece))
    _down_kernel[(triton.cdiv(width_out, columns), num_rows)](
        *(hidden, opened, routing.experts, routing.weights, down, shared_down, out, down.stride(0)),
        WIDTH=width_out,
        INNER=inner,
        SHARED=shared,
        TOP_K=top_k,
        GATE=gate is not None,
        PIECE=piece,
        N=columns,
        **chained(),
        num_warps=2,
    )
    return out


def _down_columns(num_pieces: int) -> int:
    """A power of two, so that a program holds `num_pieces` of each of its columns at once."""
    columns = DOWN_COLUMNS
    while columns > 1 and columns * num_pieces > DOWN_HELD:
        columns //= 2
    return columns
