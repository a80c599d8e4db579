"""What the chunk forms of GDN and KDA share on the GPU: the inverse within an inner chunk, and the scan over chunks.

kernels/delta_rule.py has the recurrence. For an inner chunk of `INNER` rows, with S the state before it, and all decays
relative to the chunk's beginning or end, so that no exponent is above 0:

    delta = T (v - R_k S)        out = R_q S + P delta        S <- keep S + W^T delta

T, P [INNER, INNER] and the factors are worked out for all chunks at once by the operation's own kernel; only this scan
is sequential. It holds the transposed state in registers, [dv, dk], because a matrix product takes its left side from
registers: state and deltas then never go through shared memory. Programs split dv, along which nothing is summed.
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
from kernels.recurrent_slots import RecurrentSlots


@dataclass(frozen=True, slots=True)
class DeltaTerms:
    """Of every inner chunk n of every value head; R_k, R_q and W are rows of k and q times factors.

    With a decay a head the factors are numbers, in `factors`, and k and q are as the convolution left them. With a
    decay a channel they are in the rows already.
    """

    solve: torch.Tensor  # [n, heads, INNER, INNER]: T
    within: torch.Tensor  # [n, heads, INNER, INNER]: P
    factors: torch.Tensor  # [n, heads, 4, INNER] fp32: of R_q, R_k, W, and keep INNER times; or [n, heads, dk]: keep
    read_q: torch.Tensor  # [rows, key heads, dk], any stride between rows
    read_k: torch.Tensor
    write_k: torch.Tensor

    def piece(self, begin: int, end: int) -> "DeltaTerms":
        """Of rows [begin, end); begin is where an inner chunk begins."""
        assert begin % INNER == 0
        chunks = slice(begin // INNER, triton.cdiv(end, INNER))
        rows = (x[begin:end] for x in (self.read_q, self.read_k, self.write_k))
        return DeltaTerms(self.solve[chunks], self.within[chunks], self.factors[chunks], *rows)


@dataclass(frozen=True, slots=True)
class ScanTiles:
    """How the scan is cut."""

    values: int  # value channels of a program: 64 is what one group of four warps multiplies
    num_warps: int
    num_stages: int


SCAN_TILES = ScanTiles(values=64, num_warps=4, num_stages=3)


@triton.jit
def _below(i, j, HALF: tl.constexpr):
    """Is (i, j) in the second half's rows and the first half's columns of a block of 2 HALF on the diagonal?"""
    return (i // (2 * HALF) == j // (2 * HALF)) & ((i // HALF) % 2 == 1) & ((j // HALF) % 2 == 0)


@triton.jit
def invert_unit_lower(lower):
    """(I + lower)^-1 of a strictly lower triangular [64, 64], float32.

    By doubling: with X the inverse of the blocks on the diagonal, X - X M X is that of blocks twice as long, M being
    what lies between. No power of `lower` is formed. Every X holds products of contractions, so its entries are at
    most 2 and float16 has three bits more for them than bfloat16.
    """
    a = tl.arange(0, 4)
    same = (a[:, None] == a[None, :])[:, None, :, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    blocks = tl.sum(tl.where(same, tl.reshape(lower, (4, 16, 4, 16)), 0.0), 2)  # [4, 16, 16]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(_below(i, j, 1), blocks, 0.0)
    for level in tl.static_range(1, 4):
        between = tl.where(_below(i, j, 2**level), blocks, 0.0).to(tl.float16)
        half = x.to(tl.float16)
        x -= tl.dot(tl.dot(half, between).to(tl.float16), half)
    whole = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), (64, 64))
    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    for level in tl.static_range(4, 6):
        between = tl.where(_below(row, column, 2**level), lower, 0.0).to(tl.float16)
        half = whole.to(tl.float16)
        whole -= tl.dot(tl.dot(half, between).to(tl.float16), half)
    return whole


@triton.jit
def _load_kept(factors_ptr, keys, steps, C: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """What multiplies the state, and what multiplies what q reads of it."""
    if PER_CHANNEL:
        return tl.load(factors_ptr + keys)[None, :], 1.0
    else:  # noqa: RET505 - decided while compiling
        return tl.load(factors_ptr + 3 * C), tl.load(factors_ptr + steps)[None, :]


@triton.jit
def _scan_kernel(
    read_q,  # descriptors of [num_rows, key heads * DK]
    read_k,
    write_k,
    values,  # of [num_rows, HEADS * DV], and so is `outs`
    outs,
    solve,  # of [n * HEADS * C, C]
    within,
    factors_ptr,
    states_ptr,  # [num_slots, HEADS, DK, DV]
    slot_in_ptr,  # [1] int64
    slot_out_ptr,
    num_chunks,
    state_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,  # value channels of a program
    C: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    first_value = tl.program_id(0) * BV
    head = tl.program_id(1)
    channels = first_value + tl.arange(0, BV)
    keys = tl.arange(0, DK)
    steps = tl.arange(0, C)
    state_at = head * (DK * DV) + keys[None, :] * DV + channels[:, None]
    state = tl.load(states_ptr + tl.load(slot_in_ptr) * state_stride + state_at)
    key_head = (head // REPEATS) * DK
    first_value += head * DV
    step: tl.constexpr = HEADS * (DK if PER_CHANNEL else 4 * C)
    factors_ptr += head * (DK if PER_CHANNEL else 4 * C)
    # What sums are multiplied by is loaded a chunk ahead: loads for the sums' own products are ahead by themselves.
    keep, since = _load_kept(factors_ptr, keys, steps, C, PER_CHANNEL)
    for chunk in range(0, num_chunks):
        row = chunk * C
        square = (chunk * HEADS + head) * C
        ahead_ptr = factors_ptr + tl.where(chunk + 1 < num_chunks, step, 0)
        next_keep, next_since = _load_kept(ahead_ptr, keys, steps, C, PER_CHANNEL)
        k = read_k.load([row, key_head])
        q = read_q.load([row, key_head])
        rounded = state.to(k.dtype)
        x = tl.dot(rounded, tl.trans(k))  # [BV, C]
        out = tl.dot(rounded, tl.trans(q))
        v = tl.trans(values.load([row, first_value])).to(tl.float32)
        if PER_CHANNEL:
            x = v - x
        else:
            x = v - x * tl.load(factors_ptr + C + steps)[None, :]
            out *= since
        delta = tl.dot(x.to(k.dtype), tl.trans(solve.load([square, 0])))
        out = tl.dot(delta.to(k.dtype), tl.trans(within.load([square, 0])), out)
        if PER_CHANNEL:
            k = write_k.load([row, key_head])
        else:
            delta *= tl.load(factors_ptr + 2 * C + steps)[None, :]
        state = tl.dot(delta.to(k.dtype), k, state * keep)
        outs.store([row, first_value], tl.trans(out.to(k.dtype)))
        factors_ptr += step
        keep, since = next_keep, next_since
    tl.store(states_ptr + tl.load(slot_out_ptr) * state_stride + state_at, state)


def scan(terms: DeltaTerms, v: torch.Tensor, out: torch.Tensor, slots: RecurrentSlots, tiles: ScanTiles) -> None:
    """Carries the state from slot_in to slot_out over one sequence's rows; v and `out` are [rows, Hv, dv], rows > 0.

    dk and dv are powers of two from 16 on; rows of q, k and v begin at multiples of 16 bytes.
    """
    num_rows, heads, dv = v.shape
    k_heads, dk = terms.read_k.shape[1:]
    assert dk >= 16
    assert dv >= 16
    assert dk & (dk - 1) == 0, "a head's keys are a power of two"
    assert dv & (dv - 1) == 0, "a head's values are a power of two"
    assert out.shape == v.shape
    assert out.dtype == v.dtype
    channels = min(tiles.values, dv)
    _scan_kernel[(dv // channels, heads)](
        *(_described(x, (INNER, dk)) for x in (terms.read_q, terms.read_k, terms.write_k)),
        *(_described(x, (INNER, channels)) for x in (v, out)),
        *(_described_squares(x) for x in (terms.solve, terms.within)),
        *(terms.factors, slots.states, slots.slot_in, slots.slot_out),
        *(triton.cdiv(num_rows, INNER), slots.states.stride(0)),
        HEADS=heads,
        REPEATS=heads // k_heads,
        DK=dk,
        DV=dv,
        BV=channels,
        C=INNER,
        PER_CHANNEL=terms.factors.dim() == 3,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _described(x: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Of the matrix [rows, heads d] that x [rows, heads, d] is.

    Where a block reaches past the last row, zeros are read, and nothing is written.
    """
    assert x.stride(1) == x.shape[2], "heads of a row follow each other"
    assert x.stride(2) == 1
    assert x.stride(0) * x.element_size() % 16 == 0, "rows begin at multiples of 16 bytes"
    assert x.data_ptr() % 16 == 0
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], list(block))


def _described_squares(x: torch.Tensor) -> TensorDescriptor:
    """Of x [n, heads, INNER, INNER], one below the other."""
    assert x.is_contiguous()
    return TensorDescriptor(x, [x.numel() // INNER, INNER], [INNER, 1], [INNER, INNER])
