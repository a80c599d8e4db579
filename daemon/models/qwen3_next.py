"""Qwen3-Next: three gated delta nets to one gated attention, experts with a gated shared expert in most layers.

Its delta nets' projections come interleaved: each key head's queries, keys, values and z lie together, and so do its
value heads' b and a. They are put in order once, after loading.
"""

import torch

from daemon.layers.experts import Moe
from daemon.layers.gated_delta_net import GatedDeltaSizes
from daemon.layers.linear import Linear
from daemon.layers.mlp import GatedMlp
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.recurrent import columns
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.qwen_hybrid import HybridConfig, Parts, hybrid_config, hybrid_model, shared_expert_moe


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    config = hybrid_config(fields)
    dense_layers, sparse_step = set(fields.counts("mlp_only_layers")), fields.count("decoder_sparse_step", 1)
    renormalise = fields.flag("norm_topk_prob", True)

    def mlp(scope: Scope, layer: int) -> GatedMlp | Moe:
        if layer in dense_layers or (layer + 1) % sparse_step:
            return GatedMlp(scope, config.hidden_size, fields.count("intermediate_size"))
        return shared_expert_moe(scope, fields, renormalise=renormalise)

    return hybrid_model("qwen3_next", config, Parts(_interleaved_projection, mlp), options, parameters.root / "model")


def _interleaved_projection(scope: Scope, config: HybridConfig) -> Linear:
    mixed, z, b, a = config.delta.projection_parts
    parts = (("in_proj_qkvz", mixed + z), ("in_proj_ba", b + a))
    return _OrderedLinear(scope, parts, config.hidden_size, deinterleaved(config.delta))


class _OrderedLinear(Linear):
    """A product whose rows are brought into another order once they are loaded."""

    def __init__(self, scope: Scope, parts: tuple[tuple[str, int], ...], in_size: int, order: torch.Tensor) -> None:
        super().__init__(scope, parts, in_size)
        self.order = order

    def _pack(self) -> None:
        self.weight.copy_(self.weight.index_select(0, self.order.to(self.weight.device)))
        super()._pack()


def deinterleaved(sizes: GatedDeltaSizes) -> torch.Tensor:
    """Which row of [qkvz | ba] comes at each place of [q | k | v | z | b | a], heads contiguous in each."""
    repeats = sizes.v_heads // sizes.k_heads
    values = repeats * sizes.dv
    heads = torch.arange(sizes.k_heads * 2 * (sizes.dk + values)).view(sizes.k_heads, -1)
    q, k, v, z = (part.flatten() for part in columns(heads, (sizes.dk, sizes.dk, values, values)))
    gates = torch.arange(2 * sizes.v_heads).view(sizes.k_heads, 2, repeats) + heads.numel()
    return torch.cat((q, k, v, z, gates[:, 0].flatten(), gates[:, 1].flatten()))
