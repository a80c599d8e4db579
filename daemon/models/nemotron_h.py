"""Nemotron-H: one mixer or one MLP a block, h += part(norm(h)); Mamba2, attention without positions, experts.

MLPs and experts are squared relus without a gate.
"""

from dataclasses import dataclass

import torch

from daemon.batch import Batch
from daemon.layers.attention import Attention, AttentionConfig
from daemon.layers.caps import combine
from daemon.layers.decoder import last_rows
from daemon.layers.experts import Experts, ExpertSizes, Mlp, Moe, SigmoidRouter
from daemon.layers.inputs import InputForm, make_inputs
from daemon.layers.linear import Embedding, Linear
from daemon.layers.mamba2 import Mamba2Config, Mamba2Mixer
from daemon.layers.mixing import mix
from daemon.layers.norms import WideRmsNorm
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.steps import Steps
from daemon.models.base import BuildOptions, Compute, Model, ModelFacts
from daemon.models.fields import Fields, context_tokens
from daemon.models.sparse_latent import EXPERT_NAMES, expert_sizes, sigmoid_rule
from kernels.moe import Activation, ActivationKind, SigmoidRule
from tiers.layout import StateLayout
from tiers.pools import DevicePools

MAMBA, ATTENTION, EXPERTS, DENSE = "linear_attention", "full_attention", "moe", "mlp"
PATTERN = {"M": MAMBA, "*": ATTENTION, "E": EXPERTS, "-": DENSE}  # of hybrid_override_pattern
OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
RELU_SQUARED = Activation(ActivationKind.RELU_SQUARED, None)


@dataclass(frozen=True, slots=True)
class NemotronConfig:
    """The fields of the family."""

    vocab_size: int
    hidden_size: int
    blocks: tuple[str, ...]
    norm_eps: float
    mamba: Mamba2Config | None  # where any block is one
    attention: AttentionConfig | None
    dense_size: int
    experts: ExpertSizes | None
    rule: SigmoidRule | None
    shared_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    return NemotronModel(_config(fields), options, parameters)


@dataclass(frozen=True, slots=True)
class Block:
    """h += part(norm(h))."""

    norm: WideRmsNorm
    part: Attention | Mamba2Mixer | Moe | Mlp


class NemotronModel:
    """Embedding, blocks, last norm, head."""

    def __init__(self, config: NemotronConfig, options: BuildOptions, parameters: Parameters) -> None:
        root, size = parameters.root, config.hidden_size
        body = root / "backbone"
        parameters.ignore(r"mtp\..*")  # layers that predict more than one token are not part of this model
        self.embedding = Embedding(body, "embeddings", config.vocab_size, size)
        self.blocks = [
            Block(
                WideRmsNorm(body / "layers" / str(i), "norm", size, config.norm_eps),
                _part(body / "layers" / str(i) / "mixer", i, config),
            )
            for i in range(len(config.blocks))
        ]
        self.norm = WideRmsNorm(body, "norm_f", size, config.norm_eps)
        self.head = Linear(root, (("lm_head", config.vocab_size),), size, makes_logits=True)
        head_dim = 0 if config.attention is None else config.attention.head_dim
        self.form = InputForm(parameters.kernels, options.tile, options.dtype, head_dim or None)
        self.facts = ModelFacts(
            family="nemotron_h",
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            eos_token_ids=config.eos_token_ids,
            num_parameters=parameters.num_parameters,
            weight_bytes=parameters.num_bytes,
            dtype=options.dtype,
            device=options.device,
        )
        self.mixers = [block.part for block in self.blocks if isinstance(block.part, Attention | Mamba2Mixer)]
        self.caps = combine([mixer.caps for mixer in self.mixers])
        self.compute = Compute(
            matmul_params=sum(block.part.active_params for block in self.blocks) + config.vocab_size * size,
            pair_flops=sum(mixer.pair_flops for mixer in self.mixers),
        )

    def layout(self, block_size: int) -> StateLayout:
        """The state of every mixer, in order."""
        planes = tuple(plane for mixer in self.mixers for plane in mixer.planes)
        return StateLayout(planes, tuple(slot for mixer in self.mixers for slot in mixer.slots), block_size)

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Logits [len(batch.logit_rows), vocab_size] in float32."""
        hidden = self.embedding(batch.token_ids)
        inputs = make_inputs(batch, pools.layout.block_size, self.form, None)
        out: torch.Tensor | None = None  # of the block before, not added yet
        for block in self.blocks:
            normed = block.norm.added(hidden, out)
            if isinstance(block.part, Attention | Mamba2Mixer):
                out = yield from mix(block.part, normed, inputs, pools)
            else:
                out = yield from block.part.forward(normed)
            yield
        return self.head(last_rows(self.norm, hidden, out, batch)).float()


def _part(scope: Scope, i: int, config: NemotronConfig) -> Attention | Mamba2Mixer | Moe | Mlp:
    match config.blocks[i]:
        case "linear_attention":
            assert config.mamba is not None
            return Mamba2Mixer(scope, i, config.mamba)
        case "full_attention":
            assert config.attention is not None
            return Attention(scope, i, config.attention)
        case "moe":
            assert config.experts is not None
            assert config.rule is not None
            return Moe(
                SigmoidRouter(scope, config.experts, config.rule),
                Experts(scope, config.experts, EXPERT_NAMES),
                Mlp(scope / "shared_experts", config.hidden_size, config.shared_size, RELU_SQUARED),
                None,
            )
        case _:
            return Mlp(scope, config.hidden_size, config.dense_size, RELU_SQUARED)


def _config(fields: Fields) -> NemotronConfig:
    fields.require("mlp_hidden_act", "relu2")
    fields.require("mamba_hidden_act", "silu")
    fields.require("quantization_config", None)
    fields.require("sliding_window", None)
    fields.require("mlp_bias", False)
    fields.require("attention_bias", False)
    fields.require("tie_word_embeddings", False)
    fields.require("moe_latent_size", None)
    fields.require("n_shared_experts", 1)
    blocks, norm_eps = _blocks(fields), fields.number("layer_norm_epsilon", 1e-5)
    has_experts = EXPERTS in blocks
    vocab_size = fields.count("vocab_size")
    return NemotronConfig(
        vocab_size=vocab_size,
        hidden_size=fields.count("hidden_size"),
        blocks=blocks,
        norm_eps=norm_eps,
        mamba=_mamba_config(fields, norm_eps) if MAMBA in blocks else None,
        attention=_attention_config(fields) if ATTENTION in blocks else None,
        dense_size=fields.count("intermediate_size") if DENSE in blocks else 0,
        experts=expert_sizes(fields, RELU_SQUARED) if has_experts else None,
        rule=sigmoid_rule(fields) if has_experts else None,
        shared_size=fields.count("moe_shared_expert_intermediate_size") if has_experts else 0,
        max_context_tokens=context_tokens(fields, None, 4096),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
    )


def _blocks(fields: Fields) -> tuple[str, ...]:
    if fields.has("hybrid_override_pattern"):
        pattern = fields.text("hybrid_override_pattern")
        if not pattern or set(pattern) - set(PATTERN):
            raise fields.fail("hybrid_override_pattern", f"must be made of {''.join(PATTERN)}")
        blocks = tuple(PATTERN[sign] for sign in pattern)
    else:
        key = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
        blocks = tuple(OLDER_NAMES.get(name, name) for name in fields.texts(key))
        if not blocks or set(blocks) - set(PATTERN.values()):
            raise fields.fail(key, f"must be a list of {', '.join(PATTERN.values())}")
    if not {MAMBA, ATTENTION} & set(blocks):
        raise fields.fail("layers_block_type", "has no block that looks at other tokens")
    return blocks


def _mamba_config(fields: Fields, norm_eps: float) -> Mamba2Config:
    heads, groups = fields.count("mamba_num_heads"), fields.count("n_groups", 8)
    if heads % groups:
        raise fields.fail("mamba_num_heads", f"{heads} is not a multiple of n_groups {groups}")
    return Mamba2Config(
        hidden_size=fields.count("hidden_size"),
        heads=heads,
        head_dim=fields.count("mamba_head_dim"),
        groups=groups,
        state_dim=fields.count("ssm_state_size", 128),
        conv_taps=fields.count("conv_kernel", 4, least=2),
        conv_bias=fields.flag("use_conv_bias", True),
        proj_bias=fields.flag("use_bias", False),
        time_step_min=fields.number("time_step_min", 0.001),
        norm_eps=norm_eps,
    )


def _attention_config(fields: Fields) -> AttentionConfig:
    num_heads, num_kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.fail("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    return AttentionConfig(
        hidden_size=fields.count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.count("head_dim"),
        qkv_bias=False,
        output_bias=False,
        head_norm_eps=None,
    )
