"""Qwen3-MoE: as Qwen3, with a mixture of experts in most layers in place of the MLP."""

from daemon.layers.attention import Attention
from daemon.layers.decoder import Decoder, DecoderLayer
from daemon.layers.inputs import InputForm
from daemon.layers.mlp import GatedMlp, SoftmaxMoe, SoftmaxMoeConfig
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Parameters
from daemon.layers.rope import Rope
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.plain import HeadDefaults, plain_config, plain_model, token_matrices

MAX_EXPERTS = 1 << 16


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    config = plain_config(fields, HeadDefaults(head_dim=None, has_head_norms=True))
    moe = _moe_config(fields, config.attention.hidden_size)
    dense_layers = set(fields.counts("mlp_only_layers"))
    sparse_step = fields.count("decoder_sparse_step", 1)
    hidden_size = config.attention.hidden_size
    root = parameters.root

    embedding, head = token_matrices(root, config)
    layers: list[DecoderLayer] = []
    for i in range(config.num_layers):
        scope = root / "model" / "layers" / str(i)
        is_sparse = i not in dense_layers and (i + 1) % sparse_step == 0
        layers.append(
            DecoderLayer(
                mixer_norm=RmsNorm(scope, "input_layernorm", hidden_size, config.norm_eps),
                mixer=Attention(scope / "self_attn", i, config.attention),
                mlp_norm=RmsNorm(scope, "post_attention_layernorm", hidden_size, config.norm_eps),
                mlp=SoftmaxMoe(scope / "mlp", moe)
                if is_sparse
                else GatedMlp(scope / "mlp", hidden_size, config.inner_size),
            )
        )
    norm = RmsNorm(root / "model", "norm", hidden_size, config.norm_eps)
    form = InputForm(parameters.kernels, options.tile, options.dtype, config.attention.head_dim)
    decoder = Decoder(embedding, tuple(layers), norm, head, Rope(config.rope, options.device, parameters.kernels), form)
    return plain_model("qwen3_moe", config, decoder, root, options)


def _moe_config(fields: Fields, hidden_size: int) -> SoftmaxMoeConfig:
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.count(key, most=MAX_EXPERTS)
    top_k = fields.count("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"{top_k} exceeds the number of experts, {num_experts}")
    return SoftmaxMoeConfig(
        hidden_size=hidden_size,
        inner_size=fields.count("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        renormalise=fields.flag("norm_topk_prob", False),
    )
