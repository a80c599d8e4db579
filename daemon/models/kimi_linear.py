"""Kimi Linear: three Kimi delta attentions to one latent attention without positions; experts in all but the first
layers."""

from dataclasses import dataclass

from daemon.layers.decoder import Decoder, DecoderLayer
from daemon.layers.experts import Experts, Mlp, Moe, SigmoidRouter
from daemon.layers.inputs import InputForm
from daemon.layers.kda import KdaConfig, KimiDeltaAttention
from daemon.layers.linear import Embedding, Linear
from daemon.layers.mla import LatentAttention, LatentConfig
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Parameters, Scope
from daemon.models.base import BuildOptions, Model, ModelFacts
from daemon.models.fields import Fields, context_tokens
from daemon.models.plain import PlainModel
from daemon.models.sparse_latent import LATENT_NORM_EPS, SWIGLU, expert_sizes, latent_config, mlp_types, sigmoid_rule

DELTA, ATTENTION = "linear_attention", "full_attention"
EXPERT_NAMES = ("w1", "w3", "w2")
OTHER_NAMES = {  # checkpoints' own names for what other families call otherwise
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class KimiConfig:
    """The fields of the family."""

    hidden_size: int
    norm_eps: float
    mixer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    delta: KdaConfig
    latent: LatentConfig


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    fields = Fields({OTHER_NAMES.get(key, key): value for key, value in fields.values.items()}, fields.where)
    config = _config(fields, options)
    root, size, vocab_size = parameters.root, config.hidden_size, fields.count("vocab_size")
    body = root / "model"
    embedding = Embedding(body, "embed_tokens", vocab_size, size)
    layers: list[DecoderLayer] = []
    for i, mixer_type in enumerate(config.mixer_types):
        scope = body / "layers" / str(i)
        below = scope / "self_attn"
        layers.append(
            DecoderLayer(
                mixer_norm=RmsNorm(scope, "input_layernorm", size, config.norm_eps),
                mixer=KimiDeltaAttention(below, i, config.delta)
                if mixer_type == DELTA
                else LatentAttention(below, i, config.latent),
                mlp_norm=RmsNorm(scope, "post_attention_layernorm", size, config.norm_eps),
                mlp=Mlp(scope / "mlp", size, fields.count("intermediate_size"), SWIGLU)
                if config.mlp_types[i] == "dense"
                else _moe(scope / "block_sparse_moe", fields),
            )
        )
    norm = RmsNorm(body, "norm", size, config.norm_eps)
    head = Linear(root, (("lm_head", vocab_size),), size, makes_logits=True)
    facts = ModelFacts(
        family="kimi_linear",
        vocab_size=vocab_size,
        max_context_tokens=context_tokens(fields, None, 1 << 20),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
        num_parameters=parameters.num_parameters,
        weight_bytes=parameters.num_bytes,
        dtype=options.dtype,
        device=options.device,
    )
    form = InputForm(parameters.kernels, options.tile, options.dtype, None)
    return PlainModel(facts, Decoder(embedding, tuple(layers), norm, head, None, form))


def _moe(scope: Scope, fields: Fields) -> Moe:
    """Routed by sigmoid, beside an ungated shared expert."""
    sizes, num_shared = expert_sizes(fields, SWIGLU), fields.count("n_shared_experts", 1)
    return Moe(
        SigmoidRouter(scope, sizes, sigmoid_rule(fields)),
        Experts(scope, sizes, EXPERT_NAMES),
        Mlp(scope / "shared_experts", sizes.hidden, num_shared * sizes.inner, SWIGLU),
        None,
    )


def _config(fields: Fields, options: BuildOptions) -> KimiConfig:
    fields.require("hidden_act", "silu")
    fields.require("quantization_config", None)
    fields.require("attention_bias", False)
    fields.require("tie_word_embeddings", False)
    fields.require("mla_use_nope", True)
    fields.require("moe_router_activation_func", "sigmoid")
    hidden_size, norm_eps = fields.count("hidden_size"), fields.number("rms_norm_eps", 1e-5)
    mixer_types = _mixer_types(fields)
    # Checkpoints keep the sizes of their linear attention in an object of its own.
    sizes = fields.section("linear_attn_config") or Fields({}, fields.where)
    heads = sizes.count("num_heads", fields.count("linear_num_heads", 32))
    head_dim = sizes.count("head_dim", fields.count("linear_head_dim", 128))
    dense_first = Fields({"first_k_dense_replace": 1, **fields.values}, fields.where)
    return KimiConfig(
        hidden_size=hidden_size,
        norm_eps=norm_eps,
        mixer_types=mixer_types,
        mlp_types=mlp_types(dense_first, len(mixer_types)),
        delta=KdaConfig(
            hidden_size=hidden_size,
            heads=heads,
            head_dim=head_dim,
            conv_taps=sizes.count(
                "short_conv_kernel_size", fields.count("linear_conv_kernel_dim", 4, least=2), least=2
            ),
            decay_rank=head_dim,
            gate_rank=head_dim,
            a_log_shape=(1, 1, heads, 1),
            norm_eps=norm_eps,
            lower_bound=None,
            is_conv_wide=False,
        ),
        latent=latent_config(fields, options, rope=None, norm_eps=LATENT_NORM_EPS),
    )


def _mixer_types(fields: Fields) -> tuple[str, ...]:
    num_layers = fields.count("num_hidden_layers")
    lists = fields.section("linear_attn_config")
    types = fields.texts("layer_types")
    if not types and lists is not None and lists.has("full_attn_layers"):
        latent = set(lists.counts("full_attn_layers", least=1))  # counted from 1
        types = tuple(ATTENTION if i + 1 in latent else DELTA for i in range(num_layers))
    elif not types:
        types = tuple(ATTENTION if i and i % 4 == 0 else DELTA for i in range(num_layers))
    if len(types) != num_layers or set(types) - {DELTA, ATTENTION}:
        raise fields.fail("layer_types", f"must be {num_layers} of {DELTA!r} and {ATTENTION!r}")
    return types
