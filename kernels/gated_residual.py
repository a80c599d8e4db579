"""Gated residual streams: a block reads a gated mean of them and enters each by a weight of its own.

Streams lie side by side in one row, [N, n D]. The norm is by stream, (1 + w) in fp32; the gate is low-rank. There is no
other norm in the model: neither before a block, after it, nor at the end.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class GatedResidualWeights:
    """Of one block, for n streams of width D; `inject` is None at the end of the stack, where nothing is injected."""

    norm: torch.Tensor  # [n D]
    down: torch.Tensor  # [rank, n D]
    up: torch.Tensor  # [n D, rank]
    inject: torch.Tensor | None  # [n, n D]


@dataclass(frozen=True, slots=True)
class GatedMix:
    """What a block reads, and with what weight its output enters each stream."""

    mixed: torch.Tensor  # [N, D]
    injection: torch.Tensor | None  # [N, n]


def grouped_rms_norm(rows: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float) -> torch.Tensor:
    """RMSNorm of each of `num_groups` equal parts of a row [N, n D], times (1 + weight), in fp32, then cast back."""
    assert rows.shape[-1] == weight.shape[0]
    assert rows.shape[-1] % num_groups == 0
    parts = rows.float().unflatten(-1, (num_groups, -1))
    parts = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    return (parts.flatten(-2) * (1.0 + weight.float())).to(rows.dtype)


def mix_residual(streams: torch.Tensor, weights: GatedResidualWeights, *, num_streams: int, eps: float) -> GatedMix:
    """The block's input and its injection weights, from streams [N, n D]."""
    assert streams.ndim == 2
    assert streams.shape[1] % num_streams == 0
    assert weights.down.shape[1] == streams.shape[1]
    assert weights.up.shape == (streams.shape[1], weights.down.shape[0])
    normed = grouped_rms_norm(streams, weights.norm, num_streams, eps)
    low = functional.silu(functional.linear(normed, weights.down) / num_streams)
    gate = torch.sigmoid(functional.linear(low, weights.up))
    mixed = (gate * normed).unflatten(-1, (num_streams, -1)).mean(dim=-2)
    if weights.inject is None:
        return GatedMix(mixed, None)
    return GatedMix(mixed, 2 * torch.sigmoid(functional.linear(normed, weights.inject) / num_streams))


def inject_residual(output: torch.Tensor, streams: torch.Tensor, injection: torch.Tensor) -> torch.Tensor:
    """Streams after the block: each plus its weight times the output [N, D]."""
    assert injection.shape[0] == output.shape[0]
    assert streams.shape[1] == injection.shape[1] * output.shape[1]
    return streams + (output[:, None, :] * injection[:, :, None]).flatten(1)
