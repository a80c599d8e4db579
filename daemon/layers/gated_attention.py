"""Grouped attention with zero-centred norms on heads, its output gated channel by channel (Qwen3-Next and later)."""

from dataclasses import dataclass

import torch

from daemon.layers.attention import Attention
from daemon.layers.inputs import Inputs
from daemon.layers.linear import Linear
from daemon.layers.norms import ZeroCentredRmsNorm
from daemon.layers.parameters import Scope
from daemon.layers.rope import rotate
from daemon.layers.steps import Steps
from kernels.paged_attention import paged_attention
from tiers.layout import Plane, SlotTensor
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class GatedAttentionConfig:
    """Sizes and variants of one attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    norm_eps: float


class GatedAttention:
    """Reads checkpoint names q_proj (a head: [query | gate]), k_proj, v_proj, o_proj, q_norm, k_norm of its scope."""

    caps = Attention.caps
    slots: tuple[SlotTensor, ...] = ()

    def __init__(self, scope: Scope, layer: int, config: GatedAttentionConfig) -> None:
        self.config = config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (("q_proj", 2 * q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv = Linear(scope, parts, config.hidden_size, bias=config.bias)
        self.out = Linear(scope, (("o_proj", config.hidden_size),), q_size, bias=config.bias)
        self.q_norm = ZeroCentredRmsNorm(scope, "q_norm", config.head_dim, config.norm_eps)
        self.k_norm = ZeroCentredRmsNorm(scope, "k_norm", config.head_dim, config.norm_eps)
        self.scale = config.head_dim**-0.5
        dtype = str(scope.parameters.dtype).removeprefix("torch.")
        row_shape = (config.num_kv_heads, config.head_dim)
        self.planes = (Plane(f"layers.{layer}.k", dtype, row_shape), Plane(f"layers.{layer}.v", dtype, row_shape))

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.config.hidden_size * (self.qkv.out_size + self.out.in_size)

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one history token."""
        return 4 * self.config.num_heads * self.config.head_dim

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """Writes the rows' keys and values, then attends: [num_rows, hidden_size] to the same."""
        assert inputs.rotary is not None
        config, batch, dim = self.config, inputs.batch, self.config.head_dim
        heads = self.qkv(hidden).view(hidden.shape[0], -1, dim)
        num_q, num_kv = 2 * config.num_heads, config.num_kv_heads
        q, gate = heads[:, 0:num_q:2], heads[:, 1:num_q:2]
        turning = torch.cat((self.q_norm(q), self.k_norm(heads[:, num_q : num_q + num_kv])), 1)
        turning = rotate(turning, inputs.rotary)
        k_plane, v_plane = (pools.planes[plane.name] for plane in self.planes)
        place = (batch.row_blocks, batch.row_offsets)
        k_plane.index_put_(place, turning[:, config.num_heads :])
        v_plane.index_put_(place, heads[:, num_q + num_kv :])
        yield
        mixed = yield from paged_attention(
            turning[:, : config.num_heads], k_plane, v_plane, inputs.attention, self.scale
        )
        return self.out(torch.sigmoid(gate).mul_(mixed).flatten(1))
