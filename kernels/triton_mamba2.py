"""Mamba2 over slots (kernels/mamba2.py has the mathematics): a chunk of one sequence, or decode rows.

A program carries one head's state over the inner chunks of all rows. The recurrence is linear, so the only thing that
waits for the state before is a product and a sum; everything else of an inner chunk is matrix products beside it.
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

from kernels.delta_rule import INNER
from kernels.launch_table import Tunable, one_bucket
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_delta_decode import softplus

# exp of it is 1e-26: nothing beside a value of this row. Sums over an inner chunk keep four digits after the point.
LEAST_DECAY = -60.0
GATE_HEADS = 16


@dataclass(frozen=True, slots=True)
class ScanTiles:
    """How a chunk is launched; warps decide the form of its products."""

    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class StepTiles:
    """How decode rows are launched; warps decide in which order a state's rows are summed."""

    num_warps: int


SHAPE = ("heads", "state_dim", "head_dim")
CHUNK = Tunable("mamba2_chunk", SHAPE, lambda *_: one_bucket(ScanTiles(4, 4)), neutral=False)
STEP = Tunable("mamba2_step", SHAPE, lambda *_: one_bucket(StepTiles(4)), neutral=False)


@triton.jit
def _gates_kernel(
    dt_ptr,  # [num_rows, HEADS]
    a_ptr,
    dt_bias_ptr,
    gates_ptr,  # [n, HEADS, 3, C]: sums of log decays; the same less log dt; and dt decayed to the inner chunk's end
    num_rows,
    dt_stride,
    time_step_min,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    steps = tl.arange(0, C)[:, None]
    is_head = head < HEADS
    inside = (steps < num_rows - tl.program_id(0) * C) & is_head
    dt = tl.load(dt_ptr + (chunk * C + steps) * dt_stride + head, mask=inside, other=0.0).to(tl.float32)
    dt = tl.maximum(softplus(dt + tl.load(dt_bias_ptr + head, mask=is_head, other=0.0)), time_step_min)
    dt = tl.where(inside, dt, 0.0)  # after the clamp: rows past the end decay nothing and add nothing
    log_decay = tl.maximum(dt * tl.load(a_ptr + head, mask=is_head, other=0.0), LEAST)
    sums = tl.cumsum(log_decay, 0)
    until_end = tl.exp(tl.sum(log_decay, 0)[None, :] - sums)
    at = gates_ptr + (chunk * HEADS + head) * (3 * C) + steps
    tl.store(at, sums, mask=is_head)
    tl.store(at + C, sums - tl.log(dt), mask=is_head)
    tl.store(at + 2 * C, dt * until_end, mask=is_head)


@triton.jit
def _chunk_kernel(
    inputs,  # descriptors of [num_rows, HEADS * P], and so is `outs`
    outs,
    bs,  # of [num_rows, GROUPS * N]
    cs,
    gates_ptr,
    d_ptr,
    states_ptr,  # [num_slots, HEADS, N, P]
    slot_in_ptr,
    slot_out_ptr,
    num_chunks,
    state_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
):
    head = tl.program_id(0)
    group = head // REPEATS
    steps = tl.arange(0, C)
    state_at = head * (N * P) + tl.arange(0, N)[:, None] * P + tl.arange(0, P)[None, :]
    state = tl.load(states_ptr + tl.load(slot_in_ptr) * state_stride + state_at)
    d = tl.load(d_ptr + head)
    gates_ptr += head * (3 * C)
    for chunk in range(0, num_chunks):
        row = chunk * C
        sums = tl.load(gates_ptr + steps)
        from_dt = tl.load(gates_ptr + C + steps)
        keep = tl.exp(tl.load(gates_ptr + C - 1))
        is_past = steps[:, None] >= steps[None, :]
        decayed_dt = tl.exp(tl.where(is_past, sums[:, None] - from_dt[None, :], float("-inf")))
        x = inputs.load([row, head * P])
        b = bs.load([row, group * N])
        c = cs.load([row, group * N])
        within = tl.dot(c, tl.trans(b)) * decayed_dt
        within += tl.where(steps[:, None] == steps[None, :], d, 0.0)
        out = tl.dot(c, state.to(c.dtype)) * tl.exp(sums)[:, None]
        out = tl.dot(within.to(x.dtype), x, out)
        added = (x.to(tl.float32) * tl.load(gates_ptr + 2 * C + steps)[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(b), added, state * keep)
        outs.store([row, head * P], out.to(x.dtype))
        gates_ptr += HEADS * 3 * C
    tl.store(states_ptr + tl.load(slot_out_ptr) * state_stride + state_at, state)


@triton.jit
def _step_kernel(
    x_ptr,  # [num_rows, HEADS, P]
    b_ptr,  # [num_rows, GROUPS, N]
    c_ptr,
    dt_ptr,  # [num_rows, HEADS]
    a_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    slot_in_ptr,  # [num_rows] int64
    slot_out_ptr,
    out_ptr,  # [num_rows, HEADS, P], contiguous
    x_stride,
    bc_stride,
    dt_stride,
    state_stride,
    time_step_min,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,  # N and P, padded
    BP: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BN)
    p = tl.arange(0, BP)
    state_at = head * (N * P) + n[:, None] * P + p[None, :]
    held = (n < N)[:, None] & (p < P)[None, :]
    state = tl.load(states_ptr + tl.load(slot_in_ptr + row) * state_stride + state_at, mask=held, other=0.0)
    group_at = row * bc_stride + (head // REPEATS) * N + n
    b = tl.load(b_ptr + group_at, mask=n < N, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + group_at, mask=n < N, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    dt = tl.maximum(softplus(dt), time_step_min)
    state = state * tl.exp(dt * tl.load(a_ptr + head)) + b[:, None] * (x * dt)[None, :]
    out = tl.sum(state * c[:, None], 0) + x * tl.load(d_ptr + head)
    tl.store(states_ptr + tl.load(slot_out_ptr + row) * state_stride + state_at, state, mask=held)
    tl.store(out_ptr + (row * HEADS + head) * P + p, out.to(out_ptr.dtype.element_ty), mask=p < P)


def mamba2_chunk(
    rows: Mamba2Rows, weights: Mamba2Weights, slots: RecurrentSlots, *, tiles: ScanTiles | None = None
) -> torch.Tensor:
    """Rows of one sequence; its state is read at slot_in and written at slot_out, each [1] int64, tails untouched.

    x [rows, H, P] and b, c [rows, G, N] are bfloat16 and begin their rows at multiples of 16 bytes; P and N are powers
    of two from 16 on. Returns [rows, H, P] as x, before the gated norm.
    """
    num_rows, heads, p = rows.x.shape
    groups, n = rows.b.shape[1:]
    slots.check(1)
    _check(rows, weights, slots)
    assert rows.x.dtype == torch.bfloat16
    assert p >= 16
    assert n >= 16
    assert p & (p - 1) == 0
    assert n & (n - 1) == 0
    out = torch.empty((num_rows, heads, p), dtype=rows.x.dtype, device=rows.x.device)
    if num_rows == 0:
        slots.states.index_copy_(0, slots.slot_out, slots.states.index_select(0, slots.slot_in))
        return out
    num_chunks = triton.cdiv(num_rows, INNER)
    gates = torch.empty((num_chunks, heads, 3, INNER), dtype=torch.float32, device=rows.x.device)
    _gates_kernel[(num_chunks, triton.cdiv(heads, GATE_HEADS))](
        *(rows.dt, weights.a, weights.dt_bias, gates, num_rows, rows.dt.stride(0), weights.time_step_min),
        HEADS=heads,
        C=INNER,
        BLOCK=GATE_HEADS,
        LEAST=LEAST_DECAY,
        num_warps=4,
    )
    tiles = tiles or CHUNK.look_up(out.device, heads=heads, state_dim=n, head_dim=p)
    _chunk_kernel[(heads,)](
        *(_described(x) for x in (rows.x, out, rows.b, rows.c)),
        *(gates, weights.d, slots.states, slots.slot_in, slots.slot_out, num_chunks, slots.states.stride(0)),
        HEADS=heads,
        REPEATS=heads // groups,
        N=n,
        P=p,
        C=INNER,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def mamba2_step(
    rows: Mamba2Rows, weights: Mamba2Weights, slots: RecurrentSlots, *, tiles: StepTiles | None = None
) -> torch.Tensor:
    """One row of each of several sequences, whose slots are [rows] int64. Returns [rows, H, P] as x."""
    num_rows, heads, p = rows.x.shape
    groups, n = rows.b.shape[1:]
    slots.check(num_rows)
    _check(rows, weights, slots)
    out = torch.empty((num_rows, heads, p), dtype=rows.x.dtype, device=rows.x.device)
    if num_rows:
        tiles = tiles or STEP.look_up(out.device, heads=heads, state_dim=n, head_dim=p)
        _step_kernel[(heads, num_rows)](
            *(rows.x, rows.b, rows.c, rows.dt, weights.a, weights.d, weights.dt_bias),
            *(slots.states, slots.slot_in, slots.slot_out, out),
            *(rows.x.stride(0), rows.b.stride(0), rows.dt.stride(0), slots.states.stride(0), weights.time_step_min),
            HEADS=heads,
            REPEATS=heads // groups,
            N=n,
            P=p,
            BN=triton.next_power_of_2(n),
            BP=triton.next_power_of_2(p),
            num_warps=tiles.num_warps,
        )
    return out


def _described(x: torch.Tensor) -> TensorDescriptor:
    """Of x [rows, heads, d] as a matrix, in blocks of INNER rows of one head."""
    assert x.stride(0) * x.element_size() % 16 == 0, "rows begin at multiples of 16 bytes"
    assert x.data_ptr() % 16 == 0
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [INNER, x.shape[2]])


def _check(rows: Mamba2Rows, weights: Mamba2Weights, slots: RecurrentSlots) -> None:
    num_rows, heads, p = rows.x.shape
    groups, n = rows.b.shape[1:]
    assert rows.dt.shape == (num_rows, heads)
    assert rows.dt.stride(1) == 1
    assert rows.b.shape == rows.c.shape == (num_rows, groups, n)
    assert rows.b.stride(0) == rows.c.stride(0)
    assert heads % groups == 0, f"{groups} groups do not divide {heads} heads"
    for part in (rows.x, rows.b, rows.c):
        assert part.stride(2) == 1
        assert part.stride(1) == part.shape[2], "heads of a row follow each other"
    for weight in (weights.a, weights.d, weights.dt_bias):
        assert weight.shape == (heads,)
        assert weight.dtype == torch.float32
    assert slots.states.shape[1:] == (heads, n, p), f"states are {tuple(slots.states.shape)}"
