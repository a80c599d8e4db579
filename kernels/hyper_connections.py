"""Manifold-constrained hyper-connections: several residual streams, mixed by weights of their own making.

Before a block the streams are collapsed into one row (pre); after it its output is spread over them (post) and the old
streams are mixed (comb), by a matrix made doubly stochastic with Sinkhorn's iteration so that mixing neither grows nor
shrinks them.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Of one block, for n streams of width D."""

    fn: torch.Tensor  # [(2 + n) n, n D]
    base: torch.Tensor  # [(2 + n) n] fp32
    scale: torch.Tensor  # [3] fp32: of pre, post and comb


@dataclass(frozen=True, slots=True)
class HyperRule:
    """Constants of the mixing."""

    norm_eps: float
    eps: float
    iterations: int  # column normalisations; each after the first is preceded by one of the rows


@dataclass(frozen=True, slots=True)
class HyperMix:
    """What a block reads, and how its output goes back into the streams."""

    collapsed: torch.Tensor  # [N, D]
    post: torch.Tensor  # [N, n] fp32
    comb: torch.Tensor  # [N, n, n] fp32: comb[i, j] is the share of old stream i in new stream j


def expand_streams(rows: torch.Tensor, num_streams: int) -> torch.Tensor:
    """Every stream begins as the embedding: [N, D] to [N, n, D]."""
    return rows[:, None, :].expand(-1, num_streams, -1).contiguous()


def collapse_streams(streams: torch.Tensor) -> torch.Tensor:
    """The stack's output, the mean of the streams: [N, n, D] to [N, D]."""
    return streams.mean(dim=1)


def mix_streams(streams: torch.Tensor, weights: HyperWeights, rule: HyperRule) -> HyperMix:
    """Weights of the block's way in and out, from streams [N, n, D]; all arithmetic in fp32."""
    assert streams.ndim == 3
    num_rows, n, width = streams.shape
    assert weights.fn.shape == ((2 + n) * n, n * width)
    assert weights.base.shape == ((2 + n) * n,)
    assert weights.scale.shape == (3,)
    assert rule.iterations >= 1
    flat = streams.reshape(num_rows, n * width).float()
    flat = flat * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + rule.norm_eps)
    mixes = functional.linear(flat, weights.fn.float())
    base, scale = weights.base.float(), weights.scale.float()
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + rule.eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = mixes[:, 2 * n :] * scale[2] + base[2 * n :]
    comb = sinkhorn(logits.view(num_rows, n, n), rule)
    collapsed = (pre[:, :, None] * streams).sum(dim=1).to(streams.dtype)
    return HyperMix(collapsed, post, comb)


def sinkhorn(logits: torch.Tensor, rule: HyperRule) -> torch.Tensor:
    """Nearly doubly stochastic matrices [N, n, n]: softmax of rows, then columns, then rows and columns in turn."""
    comb = logits.softmax(dim=-1) + rule.eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + rule.eps)
    for _ in range(rule.iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + rule.eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + rule.eps)
    return comb


def inject(output: torch.Tensor, streams: torch.Tensor, mix: HyperMix) -> torch.Tensor:
    """Streams after the block: new_j = post_j output + sum_i comb[i, j] old_i; [N, n, D] in their own dtype."""
    assert output.shape == mix.collapsed.shape
    dtype = streams.dtype
    spread = mix.post.to(dtype)[:, :, None] * output[:, None, :]
    return spread + mix.comb.to(dtype).transpose(1, 2) @ streams
