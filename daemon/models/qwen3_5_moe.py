"""Qwen3.5-MoE (text): as Qwen3.5, with experts and a gated shared expert in the place of every MLP."""

from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.qwen_hybrid import (
    Parts,
    hybrid_config,
    hybrid_model,
    separate_projection,
    shared_expert_moe,
    text_part,
)


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    fields, body = text_part(fields, parameters)
    parts = Parts(separate_projection, lambda scope, layer: shared_expert_moe(scope, fields, renormalise=True))
    return hybrid_model("qwen3_5_moe", hybrid_config(fields), parts, options, body)
