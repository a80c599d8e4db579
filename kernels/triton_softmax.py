"""The running softmax that all attention kernels share, and the merge of results over disjoint sets of keys.

A program walks tiles of keys in a fixed order with float32 (best, total, acc): the largest score so far in units of
log 2, the sum of the shares relative to it, and the values weighed by them. Nothing here depends on how many programs
run, or which.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_chain import chained, lead

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

MERGE_STEP = 8  # parts that a merge weighs relative to the largest of them; decides bytes


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """How a launch over latents or selected rows is cut. `split` and `keys` decide bytes, the rest only speed."""

    split: int  # keys of a split, a whole number of `keys`
    keys: int  # that a program takes at once
    heads: int  # query heads of a program, where all share one key
    num_warps: int
    num_stages: int  # tiles in flight


def merge_reference(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """softmax over parts of lses [rows, parts, heads], weighing outs [rows, parts, heads, dim]; float64."""
    shares = torch.softmax(lses.double(), 1)
    shares = shares.masked_fill(lses == -torch.inf, 0.0)
    present = outs.double().masked_fill((lses == -torch.inf).unsqueeze(-1), 0.0)
    return (present * shares.unsqueeze(-1)).sum(1)


@triton.jit
def fold_tile(scores, values, scale, best, total, acc):
    """Takes one tile's unscaled scores [rows, keys] and values [keys, dim] in; keys left out have scores of -inf.

    `scale` is positive and includes log2(e). A row that has seen no key keeps total 0.
    """
    new_best = tl.maximum(best, tl.max(scores, 1) * scale)
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    shares = tl.math.exp2(scores * scale - pivot[:, None])
    keep = tl.math.exp2(best - pivot)
    total = total * keep + tl.sum(shares, 1)
    acc = tl.dot(shares.to(values.dtype), values, acc * keep[:, None])
    return new_best, total, acc


@triton.jit
def finish_rows(best, total, acc):
    """The output of each row, and the natural log of its sum of exponentials; 0 and -inf where it saw no key."""
    seen = total > 0
    out = acc / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, (best + tl.math.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
    return out, lse


@dataclass(frozen=True, slots=True)
class MergeTiles:
    """How a merge is cut. No byte depends on it: a channel's parts are summed one after the other."""

    parts: int  # that are on their way at once, a whole number of steps
    channels: int  # of a program
    num_warps: int


def merge_tiles(num_rows: int, num_heads: int, dim: int, most_parts: int) -> MergeTiles:
    """What was fastest on an H200: few long rows spread over the card, many short ones cost few programs."""
    width = triton.next_power_of_2(dim)
    average = -(-most_parts // num_rows)
    is_few = num_rows * num_heads <= 64
    parts = 8 if average <= (8 if is_few else 16) else 32 if average <= 48 else 64
    channels = width if parts == 8 and not is_few else 32 if average > 64 and is_few else 64
    return MergeTiles(parts, min(channels, width), 1)


@triton.jit(do_not_specialize=["parts_per_row"])
def _merge_kernel(
    outs_ptr,  # [num_parts_of_all, num_heads, dim] float32, contiguous
    lses_ptr,  # [num_parts_of_all, num_heads] float32
    first_ptr,  # [num_rows] int32: parts [first[r], first[r] + num_parts[r]) belong to row r; read where RAGGED
    num_parts_ptr,  # [num_rows] int32; below 0: the row's parts are not there, and it becomes NaN
    gate_ptr,  # [num_rows, num_heads, dim], rows and heads at any stride; read where GATED
    merged_ptr,  # [num_rows, num_heads, dim]
    merged_lse_ptr,  # [num_rows, num_heads] float32, or anything where not WITH_LSE
    parts_per_row,  # where not RAGGED
    num_heads,
    gate_row_stride,
    gate_head_stride,
    out_scale,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    RAGGED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    GATED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    lead(CHAINED)
    row = tl.program_id(0)
    head = tl.program_id(1)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    held = channels < DIM
    if GATED:
        gate_at = row.to(tl.int64) * gate_row_stride + head * gate_head_stride + channels
        shut = tl.sigmoid(tl.load(gate_ptr + gate_at, mask=held, other=0.0).to(tl.float32))
    if RAGGED:
        first = tl.load(first_ptr + row)
        num_parts = tl.load(num_parts_ptr + row)
    else:
        first = row * parts_per_row
        num_parts = parts_per_row
    outs_ptr += (first.to(tl.int64) * num_heads + head) * DIM + channels
    lses_ptr += first.to(tl.int64) * num_heads + head
    best = float("-inf")
    total = 0.0
    acc = tl.zeros((CHANNELS,), tl.float32)
    for part in range(0, num_parts, PARTS):
        outs = ()
        lses = ()
        for i in tl.static_range(PARTS):
            inside = part + i < num_parts
            lses += (tl.load(lses_ptr + (part + i) * num_heads, mask=inside, other=float("-inf")),)
            outs += (tl.load(outs_ptr + (part + i) * (num_heads * DIM), mask=inside & held, other=0.0),)
        for step in tl.static_range(0, PARTS, STEP):
            new_best = best
            for i in tl.static_range(STEP):
                new_best = tl.maximum(new_best, lses[step + i])
            pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
            keep = tl.math.exp2((best - pivot) * LOG2E)
            acc *= keep
            total *= keep
            best = new_best
            for i in tl.static_range(STEP):
                share = tl.math.exp2((lses[step + i] - pivot) * LOG2E)
                # A part that saw no key may be unwritten.
                acc = tl.fma(share, tl.where(lses[step + i] > float("-inf"), outs[step + i], 0.0), acc)
                total += share
    pivot = tl.where(best == float("-inf"), 0.0, best)
    out = acc / tl.where(total > 0, total, 1.0)
    out = tl.where(num_parts < 0, float("nan"), out * out_scale)
    if GATED:  # rounded first, as where the gate is a launch of its own
        out = out.to(merged_ptr.dtype.element_ty).to(tl.float32) * shut
    place = row.to(tl.int64) * num_heads + head
    tl.store(merged_ptr + place * DIM + channels, out.to(merged_ptr.dtype.element_ty), mask=held)
    if WITH_LSE:  # noqa: SIM102 - decided while compiling
        if tl.program_id(2) == 0:
            seen = total > 0
            lse = tl.where(seen, pivot + tl.math.log2(tl.where(seen, total, 1.0)) * LN2, float("-inf"))
            tl.store(merged_lse_ptr + place, lse)


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts each row has: [first[r], first[r] + count[r])."""

    first: torch.Tensor  # [num_rows] or longer, int32
    count: torch.Tensor  # [num_rows] int32; below 0: they are not there, and the row becomes NaN


def merge_ragged(
    outs: torch.Tensor,
    lses: torch.Tensor,
    parts: Parts,
    out: torch.Tensor,
    *,
    out_scale: float = 1.0,
    gate: torch.Tensor | None = None,
    tiles: MergeTiles | None = None,
) -> None:
    """Merges each row's parts, in order, into out [num_rows, heads, dim].

    Args:
        outs: [most_parts, heads, dim] fp32; a part whose lse is -inf may hold anything.
        lses: [most_parts, heads] fp32 natural log-sum-exp.
        parts: all of them below most_parts.
        out: contiguous; a row without parts becomes 0.
        out_scale: factor of the result.
        gate: [rows, heads, dim], of which a sigmoid is the last factor; rows and heads at any stride.
        tiles: how to cut the work; default: what was fastest.
    """
    assert parts.first.dtype == parts.count.dtype == torch.int32
    assert parts.count.shape == (out.shape[0],)
    assert gate is None or (gate.shape == out.shape and gate.stride(2) == 1)
    _merge(outs, lses, parts, out, None, out_scale, gate, tiles)


def merge_partials(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor | None) -> None:
    """Merges as many parts for every row: outs [rows, parts, heads, dim], lses [rows, parts, heads], both fp32.

    `out` [rows, heads, dim] is any float type; `out_lse` [rows, heads] fp32, if wanted.
    """
    assert outs.shape[:3] == lses.shape
    assert outs.shape[0] == out.shape[0]
    _merge(outs.flatten(0, 1), lses.flatten(0, 1), None, out, out_lse, 1.0, None)


def _merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    parts: Parts | None,
    out: torch.Tensor,
    out_lse: torch.Tensor | None,
    out_scale: float,
    gate: torch.Tensor | None,
    tiles: MergeTiles | None = None,
) -> None:
    most_parts, num_heads, dim = outs.shape
    num_rows = out.shape[0]
    assert outs.dtype == lses.dtype == torch.float32
    assert lses.shape == (most_parts, num_heads)
    assert out.shape == (num_rows, num_heads, dim)
    assert outs.is_contiguous()
    assert lses.is_contiguous()
    assert out.is_contiguous()
    assert out_lse is None or (out_lse.shape == out.shape[:2] and out_lse.is_contiguous())
    if num_rows == 0:
        return
    tiles = tiles or merge_tiles(num_rows, num_heads, dim, most_parts)
    _merge_kernel[(num_rows, num_heads, triton.cdiv(dim, tiles.channels))](
        outs,
        lses,
        None if parts is None else parts.first,
        None if parts is None else parts.count,
        gate,
        out,
        out_lse,
        0 if parts is not None else most_parts // num_rows,
        num_heads,
        *((0, 0) if gate is None else gate.stride()[:2]),
        out_scale,
        DIM=dim,
        CHANNELS=tiles.channels,
        PARTS=tiles.parts,
        STEP=MERGE_STEP,
        RAGGED=parts is not None,
        WITH_LSE=out_lse is not None,
        GATED=gate is not None,
        num_warps=tiles.num_warps,
        **chained(),
    )
