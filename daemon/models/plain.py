"""What the plain decoders (attention and an MLP in each layer) have in common: their configuration and their model."""

from dataclasses import dataclass

from daemon.batch import Batch
from daemon.layers.attention import AttentionConfig
from daemon.layers.decoder import Decoder
from daemon.layers.linear import Embedding, Linear
from daemon.layers.parameters import Scope
from daemon.layers.rope import RopeConfig
from daemon.layers.steps import Steps
from daemon.models.base import BuildOptions, Compute, ModelFacts
from daemon.models.fields import Fields, context_tokens, rope_config
from tiers.layout import StateLayout
from tiers.pools import DevicePools

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The fields that llama, qwen3 and qwen3_moe share."""

    vocab_size: int
    num_layers: int
    inner_size: int
    norm_eps: float
    attention: AttentionConfig
    rope: RopeConfig
    max_context_tokens: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadDefaults:
    """Where the families differ about heads."""

    head_dim: int | None  # where the configuration has none; None: hidden_size / heads
    has_head_norms: bool


def plain_config(fields: Fields, heads: HeadDefaults) -> PlainConfig:
    """Reads and checks the shared fields.

    Raises:
        ConfigError: a value is missing, out of bounds, or asks for something that is not done here.
    """
    fields.require("hidden_act", "silu")
    fields.require("use_sliding_window", False, None)
    fields.require("quantization_config", None)
    if set(fields.texts("layer_types")) - {"full_attention"}:
        raise fields.fail("layer_types", "may hold nothing but 'full_attention' in this family")
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.fail("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if heads.head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.fail("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = fields.count("head_dim", heads.head_dim or hidden_size // num_heads)
    norm_eps = fields.number("rms_norm_eps", 1e-6)
    has_bias = fields.flag("attention_bias", False)
    rope = rope_config(fields, head_dim)
    vocab_size = fields.count("vocab_size")
    return PlainConfig(
        vocab_size=vocab_size,
        num_layers=fields.count("num_hidden_layers", most=MAX_LAYERS),
        inner_size=fields.count("intermediate_size"),
        norm_eps=norm_eps,
        attention=AttentionConfig(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=has_bias,
            output_bias=has_bias,
            head_norm_eps=norm_eps if heads.has_head_norms else None,
        ),
        rope=rope,
        max_context_tokens=context_tokens(fields, rope, 2048),
        is_tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
    )


def token_matrices(root: Scope, config: PlainConfig) -> tuple[Embedding, Linear | None]:
    """The embedding, and the head where it is a matrix of its own."""
    hidden_size = config.attention.hidden_size
    embedding = Embedding(root, "model.embed_tokens", config.vocab_size, hidden_size, makes_logits=config.is_tied)
    if config.is_tied:
        root.parameters.ignore(r"lm_head\.weight")  # a second copy of the embedding, where a checkpoint holds it
        return embedding, None
    return embedding, Linear(root, (("lm_head", config.vocab_size),), hidden_size, makes_logits=True)


class PlainModel:
    """A decoder with the facts about it."""

    def __init__(self, facts: ModelFacts, decoder: Decoder) -> None:
        self.facts = facts
        self.decoder = decoder
        self.caps = decoder.caps
        layers = decoder.layers
        head_params = facts.vocab_size * decoder.embedding.weight.shape[1]
        self.compute = Compute(
            matmul_params=sum(layer.mixer.active_params + layer.mlp.active_params for layer in layers) + head_params,
            pair_flops=sum(layer.mixer.pair_flops for layer in layers),
        )

    def layout(self, block_size: int) -> StateLayout:
        """The state of every layer's mixer, in order."""
        planes = tuple(plane for layer in self.decoder.layers for plane in layer.mixer.planes)
        slots = tuple(slot for layer in self.decoder.layers for slot in layer.mixer.slots)
        return StateLayout(planes, slots, block_size)

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Logits [len(batch.logit_rows), vocab_size] in float32."""
        return self.decoder.forward(batch, pools)


def plain_model(family: str, config: PlainConfig, decoder: Decoder, root: Scope, options: BuildOptions) -> PlainModel:
    """The model of a decoder whose parameters are all declared."""
    facts = ModelFacts(
        family=family,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        eos_token_ids=config.eos_token_ids,
        num_parameters=root.parameters.num_parameters,
        weight_bytes=root.parameters.num_bytes,
        dtype=options.dtype,
        device=options.device,
    )
    return PlainModel(facts, decoder)
