"""Norm and rotation of queries and keys, and the write of keys and values to their pages: torch's form.

kernels/triton_qk_rope.py does the same in one pass.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels.norms import RmsWeights, rms_norm


class HeadNorm(IntEnum):
    """How heads are normed before the rotation; all take the root mean square in float32."""

    NONE = 0
    CAST_FIRST = 1  # cast, then times the weight
    WIDE = 2  # times the weight in float32, then cast


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of one layer."""

    kind: HeadNorm
    q_weight: torch.Tensor | None  # [head_dim]; None where kind is NONE
    k_weight: torch.Tensor | None
    eps: float


NO_NORMS = HeadNorms(HeadNorm.NONE, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows' keys and values go, and how the rows turn."""

    row_blocks: torch.Tensor  # [num_rows] int64: the block of each row
    row_offsets: torch.Tensor  # [num_rows] int64: its place in the block
    cos: torch.Tensor | None  # [num_rows, rotary_dim], or with one dimension more between; None: no rotation
    sin: torch.Tensor | None  # the same, the sign of the half-rotation inside


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of some rows, [num_rows, heads, head_dim] each, rows and heads any distance apart."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    joined: torch.Tensor | None = None  # queries and keys as one tensor, where they lie side by side


def turn_and_write(
    heads: Heads, k_plane: torch.Tensor, v_plane: torch.Tensor, norms: HeadNorms, places: Places
) -> torch.Tensor:
    """Norms and turns queries and keys, writes keys and values to their pages; returns the queries.

    Args:
        heads: of the rows.
        k_plane: [num_blocks, block_size, num_kv_heads, head_dim].
        v_plane: as k_plane.
        norms: of this layer.
        places: of the rows.
    """
    num_heads = heads.q.shape[1]
    if norms.kind is not HeadNorm.NONE:
        assert norms.q_weight is not None
        assert norms.k_weight is not None
        cast_first = norms.kind is HeadNorm.CAST_FIRST
        q = rms_norm(heads.q, RmsWeights(norms.q_weight, norms.eps, cast_first))
        turning = torch.cat((q, rms_norm(heads.k, RmsWeights(norms.k_weight, norms.eps, cast_first))), 1)
    else:
        turning = torch.cat((heads.q, heads.k), 1) if heads.joined is None else heads.joined
    if places.cos is not None:
        assert places.sin is not None
        turning = rotate(turning, places.cos, places.sin)
    place = (places.row_blocks, places.row_offsets)
    q, k = turning.split_with_sizes((num_heads, turning.shape[1] - num_heads), 1)
    k_plane.index_put_(place, k)
    v_plane.index_put_(place, heads.v)
    return q


def turns(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each row's angles, [num_rows, 1, rotary_dim] each: worked out in float32, scaled, then cast.

    Frequencies are [rotary_dim / 2] float32 and belong to both halves; the sign of the half-rotation is in sin.
    """
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scale != 1:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return torch.cat((cos, cos), -1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each head's leading dimensions, first half against second: [num_rows, heads, head_dim], a new tensor.

    cos and sin are [num_rows, 1, rotary_dim], the sign of the half-rotation in sin.
    Both products round before their sum.
    """
    rotary_dim = cos.shape[2]
    turning = x[..., :rotary_dim] if rotary_dim < x.shape[2] else x
    turned = (turning * cos).add_(turning.roll(rotary_dim // 2, -1).mul_(sin))
    if rotary_dim == x.shape[2]:
        return turned
    return torch.cat((turned, x[..., rotary_dim:]), -1)
