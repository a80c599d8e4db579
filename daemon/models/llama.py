"""Llama: pre-norm layers of grouped attention with rotary positions and a gated MLP."""

from daemon.layers.attention import Attention
from daemon.layers.decoder import Decoder, DecoderLayer
from daemon.layers.inputs import InputForm
from daemon.layers.mlp import GatedMlp
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Parameters
from daemon.layers.rope import Rope
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.plain import HeadDefaults, plain_config, plain_model, token_matrices


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    config = plain_config(fields, HeadDefaults(head_dim=None, has_head_norms=False))
    has_mlp_bias = fields.flag("mlp_bias", False)
    hidden_size = config.attention.hidden_size
    root = parameters.root
    parameters.ignore(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

    embedding, head = token_matrices(root, config)
    layers: list[DecoderLayer] = []
    for i in range(config.num_layers):
        scope = root / "model" / "layers" / str(i)
        layers.append(
            DecoderLayer(
                mixer_norm=RmsNorm(scope, "input_layernorm", hidden_size, config.norm_eps),
                mixer=Attention(scope / "self_attn", i, config.attention),
                mlp_norm=RmsNorm(scope, "post_attention_layernorm", hidden_size, config.norm_eps),
                mlp=GatedMlp(scope / "mlp", hidden_size, config.inner_size, bias=has_mlp_bias),
            )
        )
    norm = RmsNorm(root / "model", "norm", hidden_size, config.norm_eps)
    form = InputForm(parameters.kernels, options.tile, options.dtype, config.attention.head_dim)
    decoder = Decoder(embedding, tuple(layers), norm, head, Rope(config.rope, options.device, parameters.kernels), form)
    return plain_model("llama", config, decoder, root, options)
