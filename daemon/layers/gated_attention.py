"""Grouped attention with zero-centred norms on heads, its output gated channel by channel (Qwen3-Next and later)."""

from dataclasses import dataclass

import torch

from daemon.layers.attention import Attention, places_of
from daemon.layers.inputs import Inputs
from daemon.layers.linear import Linear
from daemon.layers.norms import ZeroCentredRmsNorm
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.paged_attention import GatedQueries
from kernels.qk_rope import HeadNorm, HeadNorms, Heads
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
        norms = [ZeroCentredRmsNorm(scope, name, config.head_dim, config.norm_eps) for name in ("q_norm", "k_norm")]
        self.norms = HeadNorms(HeadNorm.WIDE, norms[0].weights.weight, norms[1].weights.weight, config.norm_eps)
        self._forms = scope.kernels.attention
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
        parts = Heads(heads[:, 0:num_q:2], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :])
        k_plane, v_plane = (pools.planes[plane.name] for plane in self.planes)
        q = self._forms.turn_and_write(parts, k_plane, v_plane, self.norms, places_of(batch, inputs.rotary))
        yield
        queries = GatedQueries(q, heads[:, 1:num_q:2])
        return self.out((yield from self._forms.attend_gated(queries, k_plane, v_plane, inputs.attention, self.scale)))
