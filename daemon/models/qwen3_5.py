"""Qwen3.5 (text): three gated delta nets to one gated attention, a dense gated MLP in each layer."""

from daemon.layers.mlp import GatedMlp
from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.qwen_hybrid import Parts, hybrid_config, hybrid_model, separate_projection, text_part


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    fields, body = text_part(fields, parameters)
    config = hybrid_config(fields)
    inner_size = fields.count("intermediate_size")
    parts = Parts(separate_projection, lambda scope, layer: GatedMlp(scope, config.hidden_size, inner_size))
    return hybrid_model("qwen3_5", config, parts, options, body)
