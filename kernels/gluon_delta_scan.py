"""The scan of GDN and KDA over inner chunks with its products side by side: one group of warps multiplies, one loads.

The same computation as kernels/triton_delta_scan.py, which spells it out. A step waits for three products, one after
the other: k with the state, T with what is left of v, W with the deltas. What only the outputs need is given to the
matrix units between those, so that they work while the registers are rounded. It is written in Gluon, Triton's lower
level, whose interface is experimental; kernels/gluon_interface.py says whether this Triton has it.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.delta_rule import INNER
from kernels.gluon_interface import bring_tile, bring_values, is_available, take_tile, tile_layout
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_delta_scan import DeltaTerms

KEY_DIM = 128  # channels of a key; a half of it is what one row of the copy engine's tiles holds
C = gl.constexpr(64)  # rows of an inner chunk, value channels of a program, and keys of a half
STAGES, CHANNEL_STAGES = 3, 2  # inner chunks in shared memory; with a decay a channel W is a tile of its own


def is_fit(device: torch.device, *, dk: int, dv: int) -> bool:
    """Whether the kernels run there, for such heads: their matrix instructions are those of sm_90 alone."""
    if device.type != "cuda" or not is_available() or dk != KEY_DIM or dv % INNER:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@gluon.jit
def _bring_chunks(
    k_bulk, q_bulk, w_bulk, v_bulk, solve_bulk, within_bulk, factors_ptr, num_chunks, head, key_at, value_at,
    k_ring, q_ring, w_ring, v_ring, solve_ring, within_ring, factors_ring, full, empty,
    HEADS: gl.constexpr, PARTS: gl.constexpr, PER_CHANNEL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies chunk after chunk into the rings, as fast as their slots become free."""
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    BYTES: gl.constexpr = k_bulk.block_type.nbytes * (9 if PER_CHANNEL else 7)
    numbers = gl.arange(0, C, lanes)
    for chunk in range(num_chunks):
        slot = chunk % STAGES
        turn = (chunk // STAGES) & 1
        place = chunk * HEADS + head
        row = chunk * C
        mbarrier.wait(empty.index(slot), turn ^ 1)
        came = full.index(slot)
        for part in gl.static_range(PARTS):
            from_ptr = factors_ptr + (place * PARTS + part) * C + numbers
            bring_values(factors_ring.index(slot * PARTS + part), from_ptr)
        async_copy.mbarrier_arrive(came)
        mbarrier.expect(came, BYTES)
        bring_tile(k_bulk, [row, key_at], came, k_ring.index(2 * slot))
        bring_tile(k_bulk, [row, key_at + C], came, k_ring.index(2 * slot + 1))
        bring_tile(q_bulk, [row, key_at], came, q_ring.index(2 * slot))
        bring_tile(q_bulk, [row, key_at + C], came, q_ring.index(2 * slot + 1))
        bring_tile(v_bulk, [row, value_at], came, v_ring.index(slot))
        bring_tile(solve_bulk, [place * C, 0], came, solve_ring.index(slot))
        bring_tile(within_bulk, [place * C, 0], came, within_ring.index(slot))
        if PER_CHANNEL:
            bring_tile(w_bulk, [row, key_at], came, w_ring.index(2 * slot))
            bring_tile(w_bulk, [row, key_at + C], came, w_ring.index(2 * slot + 1))


@gluon.jit
def _send(out_bulk, tile, out, row, value_at):
    """Copies out [values, rows] to rows of `out_bulk`, once the tile is free of what left before."""
    tma.store_wait(0)
    tile.permute([1, 0]).store(out)
    fence_async_shared()
    take_tile(out_bulk, [row, value_at], tile)


@gluon.jit
def _carry_state(
    out_bulk, states_ptr, slot_in_ptr, slot_out_ptr, num_chunks, state_stride, head, value_at, first_value,
    k_ring, q_ring, w_ring, v_ring, solve_ring, within_ring, factors_ring, out_tile, full, empty,
    PARTS: gl.constexpr, PER_CHANNEL: gl.constexpr, STAGES: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Holds C value channels of the transposed state, as two halves of its keys."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    across: gl.constexpr = gl.SliceLayout(0, sums)
    zeros = gl.full([C, C], 0.0, gl.float32, sums)
    values = first_value + gl.arange(0, C, gl.SliceLayout(1, sums))
    keys = gl.arange(0, C, across)
    state_at = head * (2 * C * DV) + keys[None, :] * DV + values[:, None]
    from_ptr = states_ptr + gl.load(slot_in_ptr) * state_stride + state_at
    state_0 = gl.load(from_ptr)
    state_1 = gl.load(from_ptr + C * DV)
    rounded_0 = gl.convert_layout(state_0.to(gl.bfloat16), left)
    rounded_1 = gl.convert_layout(state_1.to(gl.bfloat16), left)
    done = zeros.to(gl.bfloat16)
    for chunk in range(num_chunks):
        slot = chunk % STAGES
        factors = slot * PARTS
        mbarrier.wait(full.index(slot), (chunk // STAGES) & 1)
        k_0, k_1 = k_ring.index(2 * slot), k_ring.index(2 * slot + 1)
        q_0, q_1 = q_ring.index(2 * slot), q_ring.index(2 * slot + 1)
        x = warpgroup_mma(rounded_0, k_0.permute([1, 0]), zeros, use_acc=False, is_async=True)
        x = warpgroup_mma(rounded_1, k_1.permute([1, 0]), x, is_async=True)
        out = warpgroup_mma(rounded_0, q_0.permute([1, 0]), zeros, use_acc=False, is_async=True)
        if chunk > 0:
            _send(out_bulk, out_tile, done, (chunk - 1) * C, value_at)
        v = v_ring.index(slot).permute([1, 0]).load(sums).to(gl.float32)
        x = warpgroup_mma_wait(1, deps=[x])
        if not PER_CHANNEL:
            x = x * factors_ring.index(factors + 1).load(across)[None, :]
        x = gl.convert_layout((v - x).to(gl.bfloat16), left)
        delta = warpgroup_mma(x, solve_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
        out = warpgroup_mma(rounded_1, q_1.permute([1, 0]), out, is_async=True)
        if PER_CHANNEL:
            state_0 = state_0 * factors_ring.index(factors).load(across)[None, :]
            state_1 = state_1 * factors_ring.index(factors + 1).load(across)[None, :]
        else:
            keep = factors_ring.index(factors + 3).load(across)[None, :]
            state_0 = state_0 * keep
            state_1 = state_1 * keep
        delta = warpgroup_mma_wait(1, deps=[delta])
        read = gl.convert_layout(delta.to(gl.bfloat16), left)
        if PER_CHANNEL:
            written = read
            w_0, w_1 = w_ring.index(2 * slot), w_ring.index(2 * slot + 1)
        else:
            delta = delta * factors_ring.index(factors + 2).load(across)[None, :]
            written = gl.convert_layout(delta.to(gl.bfloat16), left)
            w_0, w_1 = k_0, k_1
        state_0 = warpgroup_mma(written, w_0, state_0, is_async=True)
        state_1 = warpgroup_mma(written, w_1, state_1, is_async=True)
        if not PER_CHANNEL:
            out = warpgroup_mma_wait(2, deps=[out])
            out = out * factors_ring.index(factors).load(across)[None, :]
        out = warpgroup_mma(read, within_ring.index(slot).permute([1, 0]), out, is_async=True)
        state_0, state_1 = warpgroup_mma_wait(1, deps=[state_0, state_1])
        rounded_0 = gl.convert_layout(state_0.to(gl.bfloat16), left)
        rounded_1 = gl.convert_layout(state_1.to(gl.bfloat16), left)
        # Both halves are rounded before the next products begin: an assembler that rounds one among them waits.
        out, rounded_0, rounded_1 = warpgroup_mma_wait(0, deps=[out, rounded_0, rounded_1])
        mbarrier.arrive(empty.index(slot))
        done = out.to(gl.bfloat16)
    _send(out_bulk, out_tile, done, (num_chunks - 1) * C, value_at)
    to_ptr = states_ptr + gl.load(slot_out_ptr) * state_stride + state_at
    gl.store(to_ptr, state_0)
    gl.store(to_ptr + C * DV, state_1)
    tma.store_wait(0)


@gluon.jit
def _grouped_scan_kernel(
    k_bulk,  # descriptors of [num_rows, key heads * 2 C]
    q_bulk,
    w_bulk,
    v_bulk,  # of [num_rows, HEADS * DV], and so is `out_bulk`
    out_bulk,
    solve_bulk,  # of [num_chunks * HEADS * C, C]
    within_bulk,
    factors_ptr,  # [num_chunks, HEADS, PARTS, C]
    states_ptr,  # [num_slots, HEADS, 2 C, DV]
    slot_in_ptr,  # [1] int64
    slot_out_ptr,
    num_chunks,
    state_stride,
    HEADS: gl.constexpr,
    REPEATS: gl.constexpr,
    DV: gl.constexpr,
    PER_CHANNEL: gl.constexpr,
    STAGES: gl.constexpr,
):
    PARTS: gl.constexpr = 2 if PER_CHANNEL else 4
    first_value = gl.program_id(0) * C
    head = gl.program_id(1)
    key_at = (head // REPEATS) * (2 * C)
    value_at = head * DV + first_value
    tile: gl.constexpr = k_bulk.layout
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, C, C], tile)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, C, C], tile)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, C, C], tile) if PER_CHANNEL else k_ring
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tile)
    solve_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tile)
    within_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tile)
    out_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors_ring = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, C], flat)
    # Full once all bytes of a chunk have come, empty once its products are done.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_carry_state, (out_bulk, states_ptr, slot_in_ptr, slot_out_ptr, num_chunks, state_stride, head, value_at,
                            first_value, k_ring, q_ring, w_ring, v_ring, solve_ring, within_ring, factors_ring,
                            out_tile, full, empty, PARTS, PER_CHANNEL, STAGES, DV)),
            (_bring_chunks, (k_bulk, q_bulk, w_bulk, v_bulk, solve_bulk, within_bulk, factors_ptr, num_chunks, head,
                             key_at, value_at, k_ring, q_ring, w_ring, v_ring, solve_ring, within_ring, factors_ring,
                             full, empty, HEADS, PARTS, PER_CHANNEL, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


def grouped_scan(terms: DeltaTerms, v: torch.Tensor, out: torch.Tensor, slots: RecurrentSlots) -> None:
    """As `scan` of kernels/triton_delta_scan.py, for what `is_fit` says."""
    num_rows, heads, dv = v.shape
    k_heads, dk = terms.read_k.shape[1:]
    assert dk == KEY_DIM
    assert dv % INNER == 0
    assert num_rows > 0
    assert out.shape == v.shape
    assert v.dtype == out.dtype == terms.solve.dtype == torch.bfloat16
    per_channel = terms.factors.dim() == 3
    _grouped_scan_kernel[(dv // INNER, heads)](
        *(row_tiles(x, INNER) for x in (terms.read_k, terms.read_q, terms.write_k, v, out)),
        *(square_tiles(x) for x in (terms.solve, terms.within)),
        *(terms.factors, slots.states, slots.slot_in, slots.slot_out),
        *(triton.cdiv(num_rows, INNER), slots.states.stride(0)),
        HEADS=heads,
        REPEATS=heads // k_heads,
        DV=dv,
        PER_CHANNEL=per_channel,
        STAGES=CHANNEL_STAGES if per_channel else STAGES,
        num_warps=4,
    )


def row_tiles(x: torch.Tensor, width: int) -> TensorDescriptor:
    """Tiles [INNER, width] of the matrix [rows, heads d] that x [rows, heads, d] is; past its rows zeros are read."""
    assert x.stride(1) == x.shape[2], "heads of a row follow each other"
    assert x.stride(2) == 1
    assert x.stride(0) * x.element_size() % 16 == 0, "rows begin at multiples of 16 bytes"
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [INNER, width], tile_layout(2))


def square_tiles(x: torch.Tensor) -> TensorDescriptor:
    """Tiles of x [n, heads, INNER, INNER], one below the other."""
    assert x.is_contiguous()
    return TensorDescriptor(x, [x.numel() // INNER, INNER], [INNER, 1], [INNER, INNER], tile_layout(2))
