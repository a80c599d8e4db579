"""GLM-5.3 (text): three Kimi delta attentions to one sparse latent attention, over four hyper-connected residual
streams.

Each block reads one row that the streams are collapsed to, and its output is spread over them again; the stack ends in
their mean. The latent layers have no positions and select among pooled keys. All gated products are clamped.
"""

import math
from dataclasses import dataclass

from torch.nn import functional

from daemon.batch import Batch
from daemon.layers.caps import combine
from daemon.layers.dsa import SelectingLatentAttention
from daemon.layers.experts import ExpertSizes, Mlp, Moe
from daemon.layers.hyper import HyperConnection
from daemon.layers.indexer import DsaIndexConfig, IndexSizes
from daemon.layers.inputs import InputForm, make_inputs
from daemon.layers.kda import KdaConfig, KimiDeltaAttention
from daemon.layers.linear import Embedding, Linear
from daemon.layers.mixing import Mixer, mix
from daemon.layers.mla import LatentConfig
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.steps import Steps
from daemon.models.base import BuildOptions, Compute, Model, ModelFacts
from daemon.models.fields import Fields
from daemon.models.sparse_latent import (
    expert_sizes,
    latent_config,
    mlp_types,
    sigmoid_moe,
    sigmoid_rule,
    with_text_part,
)
from kernels.hyper_connections import HyperRule, collapse_streams, expand_streams
from kernels.moe import Activation, ActivationKind, SigmoidRule
from tiers.layout import StateLayout
from tiers.pools import DevicePools

DELTA, SPARSE = "linear_attention", "indexed_attention"


@dataclass(frozen=True, slots=True)
class Glm5NextConfig:
    """The fields of the text model."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_context_tokens: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]
    mixer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    dense_size: int
    delta: KdaConfig
    latent: LatentConfig
    index: DsaIndexConfig
    experts: ExpertSizes
    rule: SigmoidRule
    num_shared_experts: int
    num_streams: int
    hyper: HyperRule


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    if not fields.has("text_config"):
        raise fields.fail("text_config", "is missing")
    return Glm5Next(_config(with_text_part(fields), options), options, parameters)


@dataclass(frozen=True, slots=True)
class Glm5NextLayer:
    """Two blocks, each between a way into and out of the streams."""

    mixer_way: HyperConnection
    mixer_norm: RmsNorm
    mixer: Mixer
    mlp_way: HyperConnection
    mlp_norm: RmsNorm
    mlp: Mlp | Moe


class Glm5Next:
    """Embedding, layers over streams, last norm, head."""

    def __init__(self, config: Glm5NextConfig, options: BuildOptions, parameters: Parameters) -> None:
        root, size = parameters.root, config.hidden_size
        body = root / "model" / "language_model"
        # The vision tower, and layers past the last one, which predict more than one token, are not part of this model.
        parameters.ignore(
            r"model\.visual\..*",
            rf"model\.language_model\.layers\.{len(config.mixer_types)}\..*",
            r"model\.language_model\.layers\.\d+\.shared_head\..*",
        )
        if config.index.sizes.pool == 1:
            parameters.ignore(r".*\.indexer\.index_kpool_compress_(gate|ape)")  # a softmax over one token is 1
        self.num_streams = config.num_streams
        self.form = InputForm(parameters.kernels, options.tile, options.dtype, None)
        self.embedding = Embedding(body, "embed_tokens", config.vocab_size, size)
        self.layers = [_layer(body / "layers" / str(i), i, config) for i in range(len(config.mixer_types))]
        self.norm = RmsNorm(body, "norm", size, config.norm_eps)
        self.head: Linear | None = None
        if config.is_tied:
            parameters.ignore(r"lm_head\.weight")
        else:
            self.head = Linear(root, (("lm_head", config.vocab_size),), size, makes_logits=True)
        self.facts = ModelFacts(
            family="glm5_next",
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            eos_token_ids=config.eos_token_ids,
            num_parameters=parameters.num_parameters,
            weight_bytes=parameters.num_bytes,
            dtype=options.dtype,
            device=options.device,
        )
        self.caps = combine([layer.mixer.caps for layer in self.layers])
        parts = [part for layer in self.layers for part in (layer.mixer_way, layer.mixer, layer.mlp_way, layer.mlp)]
        self.compute = Compute(
            matmul_params=sum(part.active_params for part in parts) + config.vocab_size * size,
            pair_flops=sum(layer.mixer.pair_flops for layer in self.layers),
        )

    def layout(self, block_size: int) -> StateLayout:
        """Latents and pooled keys in planes; recurrent states, convolutions and open pools in slots."""
        planes = tuple(plane for layer in self.layers for plane in layer.mixer.planes)
        slots = tuple(slot for layer in self.layers for slot in layer.mixer.slots)
        return StateLayout(planes, slots, block_size)

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Logits [len(batch.logit_rows), vocab_size] in float32."""
        streams = expand_streams(self.embedding(batch.token_ids), self.num_streams)
        inputs = make_inputs(batch, pools.layout.block_size, self.form, None)
        for layer in self.layers:
            way = layer.mixer_way.enter(streams)
            out = yield from mix(layer.mixer, layer.mixer_norm(way.collapsed), inputs, pools)
            streams = layer.mixer_way.leave(out, streams, way)
            yield
            way = layer.mlp_way.enter(streams)
            out = yield from layer.mlp.forward(layer.mlp_norm(way.collapsed))
            streams = layer.mlp_way.leave(out, streams, way)
            yield
        last = self.norm(collapse_streams(streams.index_select(0, batch.logit_rows)))
        logits = functional.linear(last, self.embedding.weight) if self.head is None else self.head(last)
        return logits.float()


def _layer(scope: Scope, i: int, config: Glm5NextConfig) -> Glm5NextLayer:
    size, eps = config.hidden_size, config.norm_eps

    def way(name: str) -> HyperConnection:
        return HyperConnection(scope, name, num_streams=config.num_streams, hidden=size, rule=config.hyper)

    if config.mixer_types[i] == DELTA:
        mixer = KimiDeltaAttention(scope / "self_attn", i, config.delta)
    else:
        mixer = SelectingLatentAttention(scope / "self_attn", i, config.latent, config.index)
    if config.mlp_types[i] == "dense":
        mlp = Mlp(scope / "mlp", size, config.dense_size, config.experts.activation)
    else:
        mlp = sigmoid_moe(scope / "mlp", config.experts, config.rule, config.num_shared_experts)
    return Glm5NextLayer(
        mixer_way=way("hc_attn"),
        mixer_norm=RmsNorm(scope, "input_layernorm", size, eps),
        mixer=mixer,
        mlp_way=way("hc_ffn"),
        mlp_norm=RmsNorm(scope, "post_attention_layernorm", size, eps),
        mlp=mlp,
    )


def _config(fields: Fields, options: BuildOptions) -> Glm5NextConfig:
    fields.require("hidden_act", "silu")
    fields.require("quantization_config", None)
    fields.require("attention_bias", False)
    fields.require("qk_rope_head_dim", 0)
    fields.require("index_kpool_always_select_tail", True)
    num_layers, size = fields.count("num_hidden_layers"), fields.count("hidden_size")
    norm_eps, vocab_size = fields.number("rms_norm_eps", 1e-5), fields.count("vocab_size")
    pool, topk = fields.count("index_kpool", 16), fields.count("index_topk", 2048)
    if topk % pool:
        raise fields.fail("index_topk", f"{topk} is not a multiple of index_kpool {pool}")
    activation = Activation(ActivationKind.SWIGLU, fields.number("swiglu_limit", 10.0))
    return Glm5NextConfig(
        vocab_size=vocab_size,
        hidden_size=size,
        norm_eps=norm_eps,
        max_context_tokens=fields.count("max_position_embeddings", 1 << 20),
        is_tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
        mixer_types=_mixer_types(fields, num_layers),
        mlp_types=mlp_types(fields, num_layers),
        dense_size=fields.count("intermediate_size"),
        delta=_delta_config(fields, size, norm_eps),
        latent=latent_config(fields, options, rope=None, norm_eps=norm_eps),
        index=DsaIndexConfig(
            sizes=IndexSizes(
                heads=fields.count("index_n_heads", 32),
                head_dim=fields.count("index_head_dim", 128),
                pool=pool,
                count=topk // pool,
            ),
            hidden_size=size,
            q_rank=fields.count("q_lora_rank"),
            heads_dtype=options.dtype,
            rope_dim=0,
            rotation=None,
        ),
        experts=expert_sizes(fields, activation),
        rule=sigmoid_rule(fields),
        num_shared_experts=fields.count("n_shared_experts", 1),
        num_streams=fields.count("hc_mult", 4),
        hyper=HyperRule(norm_eps, fields.number("hc_eps", 1e-6), fields.count("hc_sinkhorn_iters", 20)),
    )


def _mixer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = tuple(SPARSE if kind == "full_attention" else kind for kind in fields.texts("layer_types"))
    types = types or tuple(SPARSE if i % 4 == 3 else DELTA for i in range(num_layers))
    if len(types) != num_layers or set(types) - {DELTA, SPARSE}:
        raise fields.fail("layer_types", f"must be {num_layers} of {DELTA!r} and {SPARSE!r}")
    index_types = fields.texts("indexer_types") or ("full",) * num_layers
    if any(kind == SPARSE and index != "full" for kind, index in zip(types, index_types, strict=False)):
        raise fields.fail("indexer_types", "must be 'full' in every layer that selects")
    return types


def _delta_config(fields: Fields, hidden_size: int, norm_eps: float) -> KdaConfig:
    """In either spelling: fields of their own, or an object."""
    group = fields.section("linear_attn_config") or Fields({}, fields.where)
    head_dim = group.count("head_dim", fields.count("linear_head_dim", 128))
    heads = group.count("num_heads", fields.count("linear_num_heads", 64))
    bound = group.values.get("gate_lower_bound", fields.values.get("linear_lower_bound", -5.0))
    if bound is not None and (type(bound) not in (int, float) or not -math.inf < float(str(bound)) < 0):
        raise fields.fail("linear_lower_bound", f"must be a negative number or null, not {bound!r}")
    return KdaConfig(
        hidden_size=hidden_size,
        heads=heads,
        head_dim=head_dim,
        conv_taps=group.count("short_conv_kernel_size", fields.count("linear_conv_kernel_dim", 4, least=2), least=2),
        decay_rank=head_dim,
        gate_rank=head_dim,
        a_log_shape=(heads,),
        norm_eps=norm_eps,
        lower_bound=None if bound is None else float(str(bound)),
        is_conv_wide=True,
    )
