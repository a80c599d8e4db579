"""What the sparse latent families (DeepSeek-V3.2, GLM-5) have in common: configuration, layers, model.

Each layer attends to the tokens that an indexer selects; a layer marked "shared" uses the selection of the layer
before. A family says how the indexer's rope part turns.
"""

from dataclasses import dataclass
from math import log

import torch
from torch.nn import functional

from daemon.batch import Batch
from daemon.layers.caps import combine
from daemon.layers.decoder import last_rows
from daemon.layers.dsa import SparseLatentAttention
from daemon.layers.experts import Experts, ExpertSizes, Mlp, Moe, SigmoidRouter
from daemon.layers.indexer import DsaIndexConfig, IndexSizes
from daemon.layers.inputs import InputForm, make_inputs
from daemon.layers.linear import Embedding, Linear
from daemon.layers.mla import LatentConfig, Rotation, rotate_interleaved
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.rope import Rope, RopeConfig, RopeKind
from daemon.layers.steps import Steps
from daemon.models.base import BuildOptions, Compute, Model, ModelFacts
from daemon.models.fields import Fields, context_tokens, rope_config
from kernels.indexer import Selection
from kernels.moe import Activation, ActivationKind, SigmoidRule
from tiers.layout import StateLayout
from tiers.pools import DevicePools

LATENT_NORM_EPS = 1e-6  # of the latents' norms, whatever the configuration says of the others
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
SWIGLU = Activation(ActivationKind.SWIGLU, None)


@dataclass(frozen=True, slots=True)
class SparseLatentConfig:
    """The fields that the families share."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    rope: RopeConfig
    max_context_tokens: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]
    dense_size: int  # inner size of the dense MLPs
    mlp_types: tuple[str, ...]  # of each layer: dense or sparse
    index_types: tuple[str, ...]  # of each layer: full or shared
    latent: LatentConfig
    index: DsaIndexConfig
    experts: ExpertSizes
    rule: SigmoidRule
    num_shared_experts: int


def sparse_latent_config(fields: Fields, options: BuildOptions, index_rotation: Rotation) -> SparseLatentConfig:
    """Reads and checks the fields.

    Raises:
        ConfigError: a value is missing, out of bounds, or asks for something that is not done here.
    """
    fields.require("hidden_act", "silu")
    fields.require("quantization_config", None)
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    num_layers, hidden_size = fields.count("num_hidden_layers"), fields.count("hidden_size")
    rope_dim = fields.count("qk_rope_head_dim", least=2)
    rope = rope_config(fields, rope_dim)
    vocab_size = fields.count("vocab_size")
    latent = latent_config(fields, options, rope=rope, norm_eps=LATENT_NORM_EPS)
    q_rank = fields.count("q_lora_rank")
    index = DsaIndexConfig(
        sizes=IndexSizes(
            heads=fields.count("index_n_heads"),
            head_dim=fields.count("index_head_dim", least=rope_dim),
            pool=1,
            count=fields.count("index_topk"),
        ),
        hidden_size=hidden_size,
        q_rank=q_rank,
        heads_dtype=torch.float32,
        rope_dim=rope_dim,
        rotation=index_rotation,
    )
    return SparseLatentConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_context_tokens=context_tokens(fields, rope, 4096),
        is_tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
        dense_size=fields.count("intermediate_size"),
        mlp_types=mlp_types(fields, num_layers),
        index_types=_index_types(fields, num_layers),
        latent=latent,
        index=index,
        experts=expert_sizes(fields, SWIGLU),
        rule=sigmoid_rule(fields),
        num_shared_experts=fields.count("n_shared_experts", 1),
    )


def with_text_part(fields: Fields) -> Fields:
    """A nested configuration as one: what its `text_config` says, null included, and what only the outer part says."""
    text = fields.section("text_config")
    return fields if text is None else Fields({**fields.values, **text.values}, text.where)


def latent_config(fields: Fields, options: BuildOptions, *, rope: RopeConfig | None, norm_eps: float) -> LatentConfig:
    """Latent attention's sizes. Without `rope` nothing rotates."""
    nope_dim = fields.count("qk_nope_head_dim")
    rope_dim = fields.count("qk_rope_head_dim", least=0)
    scale = (nope_dim + rope_dim) ** -0.5
    if rope is not None and rope.kind is not RopeKind.DEFAULT and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * log(rope.factor) + 1.0) ** 2
    return LatentConfig(
        hidden_size=fields.count("hidden_size"),
        heads=fields.count("num_attention_heads"),
        q_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        latent_dim=fields.count("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.count("v_head_dim"),
        scale=scale,
        norm_eps=norm_eps,
        rotation=None if rope is None else rotate_interleaved,
    )


def expert_sizes(fields: Fields, activation: Activation) -> ExpertSizes:
    """Of the routed experts."""
    key = next(
        (k for k in ("n_routed_experts", "num_local_experts", "num_experts") if fields.has(k)), "n_routed_experts"
    )
    return ExpertSizes(
        hidden=fields.count("hidden_size"),
        inner=fields.count("moe_intermediate_size"),
        num_experts=fields.count(key, most=1 << 16),
        activation=activation,
    )


def sigmoid_rule(fields: Fields) -> SigmoidRule:
    """How a router of sigmoids selects and weighs."""
    num_experts = expert_sizes(fields, SWIGLU).num_experts
    num_groups, top_groups = fields.count("n_group", 1), fields.count("topk_group", 1)
    if num_experts % num_groups or top_groups > num_groups:
        raise fields.fail("n_group", f"{num_groups} does not fit {num_experts} experts, {top_groups} groups of a token")
    top_k = fields.count("num_experts_per_tok")
    if top_k > num_experts // num_groups * top_groups:
        raise fields.fail("num_experts_per_tok", f"{top_k} exceeds the experts of {top_groups} groups")
    return SigmoidRule(
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalise=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 1.0),
    )


def mlp_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Of each layer: "dense" or "sparse"."""
    types = fields.texts("mlp_layer_types")
    if not types:
        num_dense = min(fields.count("first_k_dense_replace", 3, least=0), num_layers)
        return ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
    if len(types) != num_layers or set(types) - {"dense", "sparse"}:
        raise fields.fail("mlp_layer_types", f"must be {num_layers} of 'dense' and 'sparse'")
    return types


def sigmoid_moe(scope: Scope, sizes: ExpertSizes, rule: SigmoidRule, num_shared: int) -> Moe:
    """Routed experts beside an ungated shared one."""
    return Moe(
        SigmoidRouter(scope, sizes, rule),
        Experts(scope, sizes, EXPERT_NAMES),
        Mlp(scope / "shared_experts", sizes.hidden, num_shared * sizes.inner, sizes.activation),
        None,
    )


@dataclass(frozen=True, slots=True)
class SparseLatentLayer:
    """h += attention(norm(h)); h += mlp(norm(h))."""

    attention_norm: RmsNorm
    attention: SparseLatentAttention
    mlp_norm: RmsNorm
    mlp: Mlp | Moe


class SparseLatentModel:
    """Embedding, layers that hand their selection on, last norm, head."""

    def __init__(self, family: str, config: SparseLatentConfig, options: BuildOptions, parameters: Parameters) -> None:
        root, size = parameters.root, config.hidden_size
        body = root / "model"
        self.embedding = Embedding(body, "embed_tokens", config.vocab_size, size)
        self.layers = [self._layer(body / "layers" / str(i), i, config) for i in range(len(config.mlp_types))]
        self.norm = RmsNorm(body, "norm", size, config.norm_eps)
        self.head: Linear | None = None
        # Layers past the last one predict more than one token; they are not part of this model.
        parameters.ignore(rf"model\.layers\.{len(self.layers)}\..*")
        if config.is_tied:
            parameters.ignore(r"lm_head\.weight")
        else:
            self.head = Linear(root, (("lm_head", config.vocab_size),), size, makes_logits=True)
        self.rope = Rope(config.rope, options.device, parameters.kernels)
        self.form = InputForm(parameters.kernels, options.tile, options.dtype, None)
        self.facts = ModelFacts(
            family=family,
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            eos_token_ids=config.eos_token_ids,
            num_parameters=parameters.num_parameters,
            weight_bytes=parameters.num_bytes,
            dtype=options.dtype,
            device=options.device,
        )
        self.caps = combine([layer.attention.caps for layer in self.layers])
        self.compute = Compute(
            matmul_params=sum(layer.attention.active_params + layer.mlp.active_params for layer in self.layers)
            + config.vocab_size * size,
            pair_flops=sum(layer.attention.pair_flops for layer in self.layers),
        )

    def layout(self, block_size: int) -> StateLayout:
        """Latents of every layer, index keys of those that select."""
        attentions = [layer.attention for layer in self.layers]
        planes = tuple(plane for attention in attentions for plane in attention.planes)
        slots = tuple(slot for attention in attentions for slot in attention.slots)
        return StateLayout(planes, slots, block_size)

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Logits [len(batch.logit_rows), vocab_size] in float32."""
        hidden = self.embedding(batch.token_ids)
        rotary = self.rope.rows(batch.positions, hidden.dtype)
        inputs = make_inputs(batch, pools.layout.block_size, self.form, rotary)
        selections: list[Selection] | None = None
        out: torch.Tensor | None = None  # of the layer before, not added yet
        for layer in self.layers:
            normed = layer.attention_norm.added(hidden, out)
            result = yield from layer.attention.forward(normed, inputs, pools, selections)
            selections = result.selections
            normed = layer.mlp_norm.added(hidden, result.out)
            yield
            out = yield from layer.mlp.forward(normed)
            yield
        last = last_rows(self.norm, hidden, out, batch)
        logits = functional.linear(last, self.embedding.weight) if self.head is None else self.head(last)
        return logits.float()

    def _layer(self, scope: Scope, i: int, config: SparseLatentConfig) -> SparseLatentLayer:
        size = config.hidden_size
        index = config.index if config.index_types[i] == "full" else None
        return SparseLatentLayer(
            attention_norm=RmsNorm(scope, "input_layernorm", size, config.norm_eps),
            attention=SparseLatentAttention(scope / "self_attn", i, config.latent, index),
            mlp_norm=RmsNorm(scope, "post_attention_layernorm", size, config.norm_eps),
            mlp=Mlp(scope / "mlp", size, config.dense_size, SWIGLU)
            if config.mlp_types[i] == "dense"
            else sigmoid_moe(scope / "mlp", config.experts, config.rule, config.num_shared_experts),
        )


def sparse_latent_model(
    family: str, config: SparseLatentConfig, options: BuildOptions, parameters: Parameters
) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    return SparseLatentModel(family, config, options, parameters)


def _index_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = fields.texts("indexer_types")
    if not types:
        return ("full",) * num_layers
    if len(types) != num_layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise fields.fail("indexer_types", f"must be {num_layers} of 'full' and 'shared', the first 'full'")
    return types
