"""Softmax attention with grouped heads over paged keys and values."""

from dataclasses import dataclass

import torch

from daemon.batch import Batch
from daemon.layers.caps import LayerCaps
from daemon.layers.inputs import Inputs, Rotary
from daemon.layers.linear import Linear
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.qk_rope import NO_NORMS, HeadNorm, HeadNorms, Heads, Places
from tiers.layout import Plane, SlotTensor
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes and variants of one attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    head_norm_eps: float | None  # RMS norm of each query and key head before the rotation; None: none


def places_of(batch: Batch, rotary: Rotary | None) -> Places:
    """Where a batch's rows go, and how they turn."""
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    return Places(batch.row_blocks, batch.row_offsets, cos, sin)


class Attention:
    """Reads checkpoint names q_proj, k_proj, v_proj, o_proj, q_norm, k_norm of its scope."""

    caps = LayerCaps(
        batched_decode=True,
        verify_rows=True,
        graph_capture=True,
        no_host_stage=True,
        streaming=True,
        reads_history=True,
    )
    slots: tuple[SlotTensor, ...] = ()

    def __init__(self, scope: Scope, layer: int, config: AttentionConfig) -> None:
        self.config = config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            scope,
            (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)),
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self.out = Linear(scope, (("o_proj", config.hidden_size),), q_size, bias=config.output_bias)
        self.norms = NO_NORMS
        if config.head_norm_eps is not None:
            q_norm = RmsNorm(scope, "q_norm", config.head_dim, config.head_norm_eps)
            k_norm = RmsNorm(scope, "k_norm", config.head_dim, config.head_norm_eps)
            weights = q_norm.weights.weight, k_norm.weights.weight
            self.norms = HeadNorms(HeadNorm.CAST_FIRST, *weights, config.head_norm_eps)
        self._forms = scope.kernels.attention
        self.scale = config.head_dim**-0.5
        dtype = str(scope.parameters.dtype).removeprefix("torch.")
        row_shape = (config.num_kv_heads, config.head_dim)
        self.planes = (Plane(f"layers.{layer}.k", dtype, row_shape), Plane(f"layers.{layer}.v", dtype, row_shape))

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.qkv.in_size * self.qkv.out_size + self.out.in_size * self.out.out_size

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one history token."""
        return 4 * self.config.num_heads * self.config.head_dim

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """Writes the rows' keys and values, then attends: [num_rows, hidden_size] to the same."""
        config, batch = self.config, inputs.batch
        num_q, num_kv = config.num_heads, config.num_kv_heads
        heads = self.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        turning, v = heads.split_with_sizes((num_q + num_kv, num_kv), 1)
        q, k = turning.split_with_sizes((num_q, num_kv), 1)
        parts = Heads(q, k, v, joined=turning)
        k_plane, v_plane = (pools.planes[plane.name] for plane in self.planes)
        places = places_of(batch, inputs.rotary)
        q = self._forms.turn_and_write(parts, k_plane, v_plane, self.norms, places)
        yield
        mixed = yield from self._forms.attend(q, k_plane, v_plane, inputs.attention, self.scale)
        return self.out(mixed.flatten(1))
