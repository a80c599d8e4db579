"""What the Qwen hybrids (gated delta nets beside gated attention) have in common: configuration, layers, model.

A family says how its delta net's projection is named, and what stands in the place of the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass

from daemon.layers.decoder import Decoder, DecoderLayer
from daemon.layers.decoder import Mlp as AnyMlp
from daemon.layers.experts import Experts, Mlp, Moe, SoftmaxRouter
from daemon.layers.gated_attention import GatedAttention, GatedAttentionConfig
from daemon.layers.gated_delta_net import GatedDeltaNet, GatedDeltaSizes
from daemon.layers.inputs import InputForm
from daemon.layers.linear import Embedding, Linear
from daemon.layers.norms import ZeroCentredRmsNorm
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.rope import Rope, RopeConfig
from daemon.models.base import BuildOptions, Model, ModelFacts
from daemon.models.fields import Fields, context_tokens, rope_config
from daemon.models.plain import PlainModel
from daemon.models.sparse_latent import EXPERT_NAMES, SWIGLU, expert_sizes, with_text_part

DELTA, ATTENTION = "linear_attention", "full_attention"
PARTIAL_ROTARY = 0.25  # of a head, where the configuration does not say


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The fields that the families share."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    norm_eps: float
    attention: GatedAttentionConfig
    delta: GatedDeltaSizes
    rope: RopeConfig
    max_context_tokens: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the families differ."""

    delta_projection: Callable[[Scope, HybridConfig], Linear]
    mlp: Callable[[Scope, int], AnyMlp]  # of a layer's scope and number


def text_part(fields: Fields, parameters: Parameters) -> tuple[Fields, Scope]:
    """What of a configuration is about text, and the scope of the text model's tensors.

    Beside a vision tower both are one level down.
    """
    body = parameters.root / "model"
    return with_text_part(fields), body / "language_model" if fields.has("text_config") else body


def hybrid_config(fields: Fields) -> HybridConfig:
    """Reads and checks the shared fields.

    Raises:
        ConfigError: a value is missing, out of bounds, or asks for something that is not done here.
    """
    fields.require("hidden_act", "silu")
    fields.require("quantization_config", None)
    hidden_size, head_dim = fields.count("hidden_size"), fields.count("head_dim", 256)
    num_heads, num_kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.fail("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    norm_eps = fields.number("rms_norm_eps", 1e-6)
    vocab_size = fields.count("vocab_size")
    rope = rope_config(Fields({"partial_rotary_factor": PARTIAL_ROTARY, **fields.values}, fields.where), head_dim)
    try:
        delta = GatedDeltaSizes(
            k_heads=fields.count("linear_num_key_heads", 16),
            v_heads=fields.count("linear_num_value_heads", 32),
            dk=fields.count("linear_key_head_dim", 128),
            dv=fields.count("linear_value_head_dim", 128),
            conv_taps=fields.count("linear_conv_kernel_dim", 4, least=2),
        )
    except ValueError as error:
        raise fields.fail("linear_num_value_heads", f"does not fit: {error}") from None
    return HybridConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layer_types=_layer_types(fields),
        norm_eps=norm_eps,
        attention=GatedAttentionConfig(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=fields.flag("attention_bias", False),
            norm_eps=norm_eps,
        ),
        delta=delta,
        rope=rope,
        max_context_tokens=context_tokens(fields, rope, 32768),
        is_tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
    )


def separate_projection(scope: Scope, config: HybridConfig) -> Linear:
    """A delta net's projection from in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return Linear(scope, tuple(zip(names, config.delta.projection_parts, strict=True)), config.hidden_size)


def shared_expert_moe(scope: Scope, fields: Fields, *, renormalise: bool) -> Moe:
    """Experts routed by softmax, beside a shared one that each row gates."""
    sizes, top_k = expert_sizes(fields, SWIGLU), fields.count("num_experts_per_tok")
    if top_k > sizes.num_experts:
        raise fields.fail("num_experts_per_tok", f"{top_k} exceeds the number of experts, {sizes.num_experts}")
    return Moe(
        SoftmaxRouter(scope, sizes, top_k=top_k, renormalise=renormalise),
        Experts(scope, sizes, EXPERT_NAMES),
        Mlp(scope / "shared_expert", sizes.hidden, fields.count("shared_expert_intermediate_size"), SWIGLU),
        scope.tensor("shared_expert_gate.weight", 1, sizes.hidden),
    )


def hybrid_model(family: str, config: HybridConfig, parts: Parts, options: BuildOptions, body: Scope) -> Model:
    """Declares the model of a configuration below `body`; its parameters are filled afterwards."""
    parameters = body.parameters
    # Vision towers and layers that predict more than one token are not part of this model.
    parameters.ignore(r"(model\.)?visual\..*", r"mtp\..*")
    root, size, eps = parameters.root, config.hidden_size, config.norm_eps
    embedding = Embedding(body, "embed_tokens", config.vocab_size, size)
    layers: list[DecoderLayer] = []
    for i, layer_type in enumerate(config.layer_types):
        scope = body / "layers" / str(i)
        if layer_type == ATTENTION:
            mixer = GatedAttention(scope / "self_attn", i, config.attention)
        else:
            below = scope / "linear_attn"
            projection = parts.delta_projection(below, config)
            mixer = GatedDeltaNet(below, i, config.delta, projection, norm_eps=eps)
        layers.append(
            DecoderLayer(
                mixer_norm=ZeroCentredRmsNorm(scope, "input_layernorm", size, eps),
                mixer=mixer,
                mlp_norm=ZeroCentredRmsNorm(scope, "post_attention_layernorm", size, eps),
                mlp=parts.mlp(scope / "mlp", i),
            )
        )
    norm = ZeroCentredRmsNorm(body, "norm", size, eps)
    head = None
    if config.is_tied:
        parameters.ignore(r"lm_head\.weight")  # a second copy of the embedding, where a checkpoint holds it
    else:
        head = Linear(root, (("lm_head", config.vocab_size),), size, makes_logits=True)
    facts = ModelFacts(
        family=family,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        eos_token_ids=config.eos_token_ids,
        num_parameters=parameters.num_parameters,
        weight_bytes=parameters.num_bytes,
        dtype=options.dtype,
        device=options.device,
    )
    form = InputForm(parameters.kernels, options.tile, options.dtype, config.attention.head_dim)
    decoder = Decoder(embedding, tuple(layers), norm, head, Rope(config.rope, options.device, parameters.kernels), form)
    return PlainModel(facts, decoder)


def _layer_types(fields: Fields) -> tuple[str, ...]:
    num_layers = fields.count("num_hidden_layers")
    types = fields.texts("layer_types")
    if not types:
        interval = fields.count("full_attention_interval", 4)
        return tuple(ATTENTION if (i + 1) % interval == 0 else DELTA for i in range(num_layers))
    if len(types) != num_layers or set(types) - {DELTA, ATTENTION}:
        raise fields.fail("layer_types", f"must be {num_layers} of {DELTA!r} and {ATTENTION!r}")
    return types
