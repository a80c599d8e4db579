"""Norm and rotation of queries and keys, and the write of keys and values to their pages, in one pass over the rows.

In place of two norms, a rotation, a concatenation and two scattered writes. A row's heads are read once; queries come
out contiguous, keys and values go to the planes.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch_table import Bucket, Tunable, one_bucket
from kernels.qk_rope import HeadNorm, HeadNorms, Heads, Places
from kernels.triton_chain import chained, follow, lead

NONE = tl.constexpr(HeadNorm.NONE.value)
CAST_FIRST = tl.constexpr(HeadNorm.CAST_FIRST.value)


@dataclass(frozen=True, slots=True)
class TurnTiles:
    """How a launch is cut. It decides in which order a head's squares are summed."""

    heads: int  # of queries that a program takes, at most, a power of two
    num_warps: int


def _default_tiles(heads: int, _kv_heads: int, _head_dim: int) -> tuple[Bucket[TurnTiles], ...]:
    return one_bucket(TurnTiles(heads=triton.next_power_of_2(heads), num_warps=4))


TURN = Tunable("turn_and_write", ("heads", "kv_heads", "head_dim"), _default_tiles, neutral=False)


@triton.jit
def _turned(
    rows,  # pointers [HEADS, 1] to heads
    held,  # [HEADS, 1]
    weight_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
):
    """The heads [HEADS, WIDTH], normed and turned, float32."""
    channels = tl.arange(0, WIDTH)
    held = held & (channels < HEAD_DIM)[None, :]
    x = tl.load(rows + channels[None, :], mask=held, other=0.0)
    inverse = tl.zeros((x.shape[0],), tl.float32)
    if NORM != NONE:
        wide = x.to(tl.float32)
        inverse = tl.math.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
    y = _normed(x, inverse, weight_ptr, channels, HEAD_DIM, NORM)
    if ROTARY > 0:
        turning = channels < ROTARY
        # The other half's channel; loaded again rather than exchanged, from a cache line that is there.
        partner = tl.where(turning, (channels + ROTARY // 2) % ROTARY, channels)
        other = tl.load(rows + partner[None, :], mask=held, other=0.0)
        z = _normed(other, inverse, weight_ptr, partner, HEAD_DIM, NORM)
        cos = tl.load(cos_ptr + channels, mask=turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + channels, mask=turning, other=0.0).to(tl.float32)
        y = y * cos[None, :] + z * sin[None, :]
    return y


@triton.jit
def _normed(x, inverse, weight_ptr, channels, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """x times `inverse` and the weight, rounded to x's type, as float32."""
    y = x.to(tl.float32)
    if NORM != NONE:
        weight = tl.load(weight_ptr + channels, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
        y = y * inverse[:, None]
        if NORM == CAST_FIRST:
            y = y.to(x.dtype).to(tl.float32)
        y = (y * weight[None, :]).to(x.dtype).to(tl.float32)
    return y


@triton.jit
def _turn_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    row_blocks_ptr,
    row_offsets_ptr,
    q_out_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM]
    k_plane_ptr,
    v_plane_ptr,
    eps,
    k_factor,
    v_factor,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    cos_stride,
    block_stride,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of queries that a program takes
    KV_HEADS: tl.constexpr,  # NUM_KV_HEADS, padded to a power of two
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    lead(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, WIDTH)
    cos_ptr += row * cos_stride
    sin_ptr += row * cos_stride
    if tl.program_id(1) > 0:
        heads = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        held = (heads < NUM_HEADS)[:, None]
        rows = q_ptr + row * q_row_stride + (heads * q_head_stride)[:, None]
        q = _turned(rows, held, q_weight_ptr, cos_ptr, sin_ptr, eps, HEAD_DIM, WIDTH, ROTARY, NORM)
        out = q_out_ptr + row * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + channels[None, :]
        tl.store(out, q.to(q_out_ptr.dtype.element_ty), mask=held & (channels < HEAD_DIM)[None, :])
    else:
        block = tl.load(row_blocks_ptr + row).to(tl.int64)
        kv_heads = tl.arange(0, KV_HEADS)
        kv_held = (kv_heads < NUM_KV_HEADS)[:, None]
        k_rows = k_ptr + row * k_row_stride + (kv_heads * k_head_stride)[:, None]
        k = _turned(k_rows, kv_held, k_weight_ptr, cos_ptr, sin_ptr, eps, HEAD_DIM, WIDTH, ROTARY, NORM)
        v_rows = v_ptr + row * v_row_stride + (kv_heads * v_head_stride)[:, None]
        written = kv_held & (channels < HEAD_DIM)[None, :] & (block >= 0)
        v = tl.load(v_rows + channels[None, :], mask=written, other=0.0).to(tl.float32)
        place = block * block_stride + tl.load(row_offsets_ptr + row) * token_stride
        at = place + kv_heads[:, None] * head_stride + channels[None, :]
        tl.store(k_plane_ptr + at, (k * k_factor).to(k_plane_ptr.dtype.element_ty), mask=written)
        tl.store(v_plane_ptr + at, (v * v_factor).to(v_plane_ptr.dtype.element_ty), mask=written)


def turn_and_write(
    heads: Heads,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    norms: HeadNorms,
    places: Places,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    tiles: TurnTiles | None = None,
) -> torch.Tensor:
    """Norms and turns queries and keys, writes keys and values to their pages.

    Args:
        heads: of the rows.
        k_plane: [num_blocks, block_size, num_kv_heads, head_dim], bfloat16 or float8_e4m3fn.
        v_plane: as k_plane, of the same strides.
        norms: of this layer.
        places: of the rows.
        kv_scales: what keys and values are divided by on their way into planes of fp8.
        tiles: how to cut the work; default: by the table.

    Returns:
        The queries, contiguous [num_rows, num_heads, head_dim].
    """
    q, k, v = heads.q, heads.k, heads.v
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert k.shape == v.shape == (num_rows, num_kv_heads, head_dim)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert k_plane.shape == v_plane.shape
    assert k_plane.shape[2:] == (num_kv_heads, head_dim)
    assert k_plane.stride() == v_plane.stride()
    assert k_plane.stride(3) == 1
    assert k_plane.dtype == v_plane.dtype
    assert places.row_blocks.shape == places.row_offsets.shape == (num_rows,)
    assert (norms.kind == HeadNorm.NONE) == (norms.q_weight is None) == (norms.k_weight is None)
    assert (places.cos is None) == (places.sin is None)
    cos, sin = places.cos, places.sin
    rotary_dim = 0
    if cos is not None and sin is not None:
        rotary_dim = cos.shape[-1]
        assert cos.shape[0] == sin.shape[0] == num_rows
        assert rotary_dim % 2 == 0
        assert 0 < rotary_dim <= head_dim
        assert cos.stride(0) == sin.stride(0)
        assert cos.stride(-1) == sin.stride(-1) == 1
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    tiles = tiles or TURN.look_up(q.device, heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim)
    _turn_kernel[(num_rows, 1 + triton.cdiv(num_heads, tiles.heads))](
        q,
        k,
        v,
        norms.q_weight,
        norms.k_weight,
        q if cos is None else cos,
        q if sin is None else sin,
        places.row_blocks,
        places.row_offsets,
        out,
        k_plane,
        v_plane,
        norms.eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0 if cos is None else cos.stride(0),
        k_plane.stride(0),
        k_plane.stride(1),
        k_plane.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=tiles.heads,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        ROTARY=rotary_dim,
        NORM=norms.kind.value,
        **chained(),
        num_warps=tiles.num_warps,
    )
    return out


@triton.jit
def _turns_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,  # [num_rows, 2 * HALF]
    sin_ptr,
    position_stride,
    scale,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,  # HALF, padded
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < HALF
    frequencies = tl.load(frequencies_ptr + at, mask=inside, other=0.0)
    follow(CHAINED)
    angles = tl.load(positions_ptr + row * position_stride).to(tl.float32) * frequencies
    cos = (tl.cos(angles) * scale).to(cos_ptr.dtype.element_ty)
    sin = tl.sin(angles) * scale
    first = row * (2 * HALF) + at
    tl.store(cos_ptr + first, cos, mask=inside)
    tl.store(cos_ptr + first + HALF, cos, mask=inside)
    tl.store(sin_ptr + first, (-sin).to(sin_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + first + HALF, sin.to(sin_ptr.dtype.element_ty), mask=inside)


def turns(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each row's angles, as kernels/qk_rope.py's: positions [num_rows], frequencies [rotary_dim / 2]."""
    (num_rows,), (half,) = positions.shape, frequencies.shape
    assert frequencies.is_contiguous()
    assert frequencies.dtype == torch.float32
    cos, sin = torch.empty((2, num_rows, 1, 2 * half), dtype=dtype, device=positions.device)
    if num_rows:
        _turns_kernel[(num_rows,)](
            *(positions, frequencies, cos, sin, positions.stride(0), float(scale)),
            HALF=half,
            WIDTH=triton.next_power_of_2(half),
            **chained(),
            num_warps=1,
        )
    return cos, sin
