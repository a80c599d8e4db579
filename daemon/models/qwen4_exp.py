"""Qwen4 (text): three gated delta nets to one sparse attention, experts everywhere, over gated residual streams.

There is no norm but the streams' own: each block reads a gated mean of them, and so does the head. Some layers begin by
adding what the last tokens look up in a table of n-grams, which stays on disk: the reads begin before the first layer
and go on while layers compute.
"""

from dataclasses import dataclass

from torch.nn import functional

from daemon.batch import Batch
from daemon.layers.caps import combine
from daemon.layers.experts import Experts, ExpertSizes, Mlp, Moe, SoftmaxRouter
from daemon.layers.gated_delta_net import GatedDeltaNet, GatedDeltaSizes
from daemon.layers.hyper import GatedResidual, StreamSizes
from daemon.layers.indexer import IndexSizes
from daemon.layers.inputs import InputForm, make_inputs
from daemon.layers.linear import Embedding, Linear
from daemon.layers.mixing import Mixer, mix
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.ple import NgramPle, PleSizes
from daemon.layers.qsa import QsaAttention, QsaConfig
from daemon.layers.rope import Rope, RopeConfig
from daemon.layers.steps import Steps
from daemon.models.base import BuildOptions, Compute, Model, ModelFacts
from daemon.models.fields import Fields, context_tokens, rope_config
from daemon.models.ngram_tables import NgramConfig, ngram_config, open_table
from daemon.models.sparse_latent import EXPERT_NAMES, SWIGLU, expert_sizes, with_text_part
from tiers.layout import StateLayout
from tiers.pools import DevicePools

DELTA, SPARSE = "linear_attention", "indexed_attention"
PROJECTION_NAMES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@dataclass(frozen=True, slots=True)
class Qwen4ExpConfig:
    """The fields of the text model."""

    vocab_size: int
    rope: RopeConfig
    max_context_tokens: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]
    mixer_types: tuple[str, ...]
    delta: GatedDeltaSizes
    attention: QsaConfig
    experts: ExpertSizes
    top_k: int
    renormalise: bool
    shared_size: int  # inner size of the shared expert
    streams: StreamSizes
    ple_layers: tuple[int, ...]  # from 0, rising
    ple: PleSizes
    ngrams: NgramConfig | None


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    body = parameters.root / "model"
    if fields.has("text_config"):
        body = body / "language_model"
    return Qwen4Exp(_config(with_text_part(fields), options), options, body, parameters.root)


@dataclass(frozen=True, slots=True)
class Qwen4ExpLayer:
    """Two blocks, each between a way into and out of the streams."""

    ple: NgramPle | None
    mixer_way: GatedResidual
    mixer: Mixer
    mlp_way: GatedResidual
    mlp: Moe


class Qwen4Exp:
    """Embedding, layers over streams, a last mean of them, head."""

    def __init__(self, config: Qwen4ExpConfig, options: BuildOptions, body: Scope, root: Scope) -> None:
        size, parameters = config.streams.hidden, root.parameters
        # Vision towers and layers that predict more than one token are not part of this model.
        parameters.ignore(r"(model\.)?visual\..*", r"mtp\..*")
        self.num_streams = config.streams.num_streams
        self.form = InputForm(parameters.kernels, options.tile, options.dtype, None)
        self.rope = Rope(config.rope, options.device, parameters.kernels)
        self.embedding = Embedding(body, "embed_tokens", config.vocab_size, size)
        self.layers: list[Qwen4ExpLayer] = []
        for i in range(len(config.mixer_types)):
            self.layers.append(self._layer(body / "layers" / str(i), i, config, options))
        self.last_way = GatedResidual(body / "hyper_connection_mixer", config.streams, is_last=True)
        self.head: Linear | None = None
        if config.is_tied:
            parameters.ignore(r"lm_head\.weight")
        else:
            self.head = Linear(root, (("lm_head", config.vocab_size),), size, makes_logits=True)
        self.facts = ModelFacts(
            family="qwen4_exp",
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            eos_token_ids=config.eos_token_ids,
            num_parameters=parameters.num_parameters,
            weight_bytes=parameters.num_bytes,
            dtype=options.dtype,
            device=options.device,
        )
        self.ples = [layer.ple for layer in self.layers if layer.ple is not None]
        self.caps = combine([layer.mixer.caps for layer in self.layers] + [ple.caps for ple in self.ples])
        ways = [way for layer in self.layers for way in (layer.mixer_way, layer.mlp_way)] + [self.last_way]
        blocks = [block for layer in self.layers for block in (layer.mixer, layer.mlp)]
        self.compute = Compute(
            matmul_params=sum(part.active_params for part in (*ways, *blocks, *self.ples)) + config.vocab_size * size,
            pair_flops=sum(layer.mixer.pair_flops for layer in self.layers),
        )

    def layout(self, block_size: int) -> StateLayout:
        """Keys, values and block keys in planes; recurrent states, convolutions, open pools and last ids in slots."""
        planes = tuple(plane for layer in self.layers for plane in layer.mixer.planes)
        mixer_slots = tuple(slot for layer in self.layers for slot in layer.mixer.slots)
        return StateLayout(planes, mixer_slots + tuple(slot for ple in self.ples for slot in ple.slots), block_size)

    def prefetch(self, earlier_ids: list[int], token_ids: list[int]) -> None:
        """Begins to read what a later chunk of these tokens will look up, after others of the same sequence."""
        for ple in self.ples:
            ple.prefetch(earlier_ids, token_ids)

    def tables_digest(self) -> bytes:
        """Tells the tables on disk from others."""
        return b"".join(ple.table.digest() for ple in self.ples)

    def close(self) -> None:
        """Closes the tables' files."""
        for ple in self.ples:
            ple.table.close()

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Logits [len(batch.logit_rows), vocab_size] in float32."""
        fetches = [ple.stage(batch, pools) for ple in self.ples]
        if batch.is_decode:  # slots are written in place: whatever can fail must fail before the first of them
            for ple, fetch in zip(self.ples, fetches, strict=True):
                ple.wait(fetch)
        yield
        streams = self.embedding(batch.token_ids).repeat(1, self.num_streams)
        rotary = self.rope.rows(batch.positions, streams.dtype)
        inputs = make_inputs(batch, pools.layout.block_size, self.form, rotary)
        for layer in self.layers:
            if layer.ple is not None:
                streams = yield from layer.ple.forward(streams, fetches.pop(0), batch, pools)
            way = layer.mixer_way.enter(streams)
            out = yield from mix(layer.mixer, way.mixed, inputs, pools)
            streams = layer.mixer_way.leave(out, streams, way)
            yield
            way = layer.mlp_way.enter(streams)
            out = yield from layer.mlp.forward(way.mixed)
            streams = layer.mlp_way.leave(out, streams, way)
            yield
        last = self.last_way.enter(streams.index_select(0, batch.logit_rows)).mixed
        logits = functional.linear(last, self.embedding.weight) if self.head is None else self.head(last)
        return logits.float()

    def _layer(self, scope: Scope, i: int, config: Qwen4ExpConfig, options: BuildOptions) -> Qwen4ExpLayer:
        if config.mixer_types[i] == DELTA:
            below, size = scope / "linear_attn", config.streams.hidden
            projection = Linear(below, tuple(zip(PROJECTION_NAMES, config.delta.projection_parts, strict=True)), size)
            mixer = GatedDeltaNet(below, i, config.delta, projection, norm_eps=config.streams.norm_eps)
        else:
            mixer = QsaAttention(scope / "self_attn", i, config.attention, self.rope)
        ple = None
        if i in config.ple_layers:
            assert config.ngrams is not None
            below = scope / "ple"
            hash_, table = open_table(below / "ple_embedding", config.ngrams, config.ple_layers.index(i), options)
            ple = NgramPle(below, config.ple, hash_, table, i)
        return Qwen4ExpLayer(
            ple=ple,
            mixer_way=GatedResidual(scope / "attn_hyper_connection", config.streams, is_last=False),
            mixer=mixer,
            mlp_way=GatedResidual(scope / "mlp_hyper_connection", config.streams, is_last=False),
            mlp=_moe(scope / "mlp", config),
        )


def _moe(scope: Scope, config: Qwen4ExpConfig) -> Moe:
    """Routed by softmax, beside a shared expert that each row gates."""
    sizes = config.experts
    return Moe(
        SoftmaxRouter(scope, sizes, top_k=config.top_k, renormalise=config.renormalise),
        Experts(scope, sizes, EXPERT_NAMES),
        Mlp(scope / "shared_expert", sizes.hidden, config.shared_size, SWIGLU),
        scope.tensor("shared_expert_gate.weight", 1, sizes.hidden),
    )


def _config(fields: Fields, options: BuildOptions) -> Qwen4ExpConfig:
    fields.require("hidden_act", "silu")
    fields.require("quantization_config", None)
    fields.require("attention_bias", False)
    fields.require("output_gate_type", None, "silu")
    fields.require("indexer_kv_heads", 1)
    hidden, head_dim = fields.count("hidden_size"), fields.count("head_dim", 256)
    norm_eps, vocab_size = fields.number("rms_norm_eps", 1e-6), fields.count("vocab_size")
    rope = rope_config(fields, head_dim)
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if heads % kv_heads:
        raise fields.fail("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    ratio, budget = fields.count("indexer_compress_ratio"), fields.count("indexer_budget")
    if budget % ratio:
        raise fields.fail("indexer_budget", f"{budget} is not a multiple of indexer_compress_ratio {ratio}")
    index = IndexSizes(
        heads=fields.count("indexer_n_heads"),
        head_dim=fields.count("indexer_head_dim", least=rope.rotary_dim),
        pool=ratio,
        count=budget // ratio,
    )
    experts, top_k = expert_sizes(fields, SWIGLU), fields.count("num_experts_per_tok")
    if top_k > experts.num_experts:
        raise fields.fail("num_experts_per_tok", f"{top_k} exceeds the number of experts, {experts.num_experts}")
    mixer_types = _mixer_types(fields)
    ple_layers = tuple(sorted({layer - 1 for layer in fields.counts("ple_layer_ids", least=1)}))
    if any(layer >= len(mixer_types) for layer in ple_layers):
        raise fields.fail("ple_layer_ids", f"must be at most {len(mixer_types)}")
    num_streams = fields.count("hc_count", 4, least=2)
    embed_dim = fields.count("ple_embed_dim", hidden)
    return Qwen4ExpConfig(
        vocab_size=vocab_size,
        rope=rope,
        max_context_tokens=context_tokens(fields, rope, 32768),
        is_tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=tuple(sorted({token for token in fields.counts("eos_token_id") if token < vocab_size})),
        mixer_types=mixer_types,
        delta=_delta_sizes(fields),
        attention=QsaConfig(hidden, heads, kv_heads, head_dim, index, norm_eps),
        experts=experts,
        top_k=top_k,
        renormalise=fields.flag("norm_topk_prob", True),
        shared_size=fields.count("shared_expert_intermediate_size", 512),
        streams=StreamSizes(num_streams, hidden, fields.count("hc_lowrank", 320), norm_eps),
        ple_layers=ple_layers,
        ple=PleSizes(num_streams, hidden, embed_dim, fields.count("ple_conv_kernel_size", 4, least=2), norm_eps),
        ngrams=ngram_config(fields, options, embed_dim) if ple_layers else None,
    )


def _mixer_types(fields: Fields) -> tuple[str, ...]:
    num_layers = fields.count("num_hidden_layers")
    types = tuple(SPARSE if kind == "full_attention" else kind for kind in fields.texts("layer_types"))
    if not types:
        interval = fields.count("full_attention_interval", 4)
        types = tuple(SPARSE if (i + 1) % interval == 0 else DELTA for i in range(num_layers))
    if len(types) != num_layers or set(types) - {DELTA, SPARSE}:
        raise fields.fail("layer_types", f"must be {num_layers} of {DELTA!r} and {SPARSE!r}")
    return types


def _delta_sizes(fields: Fields) -> GatedDeltaSizes:
    k_heads, v_heads = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    if v_heads % k_heads:
        raise fields.fail("linear_num_value_heads", f"{v_heads} is not a multiple of linear_num_key_heads {k_heads}")
    return GatedDeltaSizes(
        k_heads=k_heads,
        v_heads=v_heads,
        dk=fields.count("linear_key_head_dim", 128),
        dv=fields.count("linear_value_head_dim", 128),
        conv_taps=fields.count("linear_conv_kernel_dim", 4, least=2),
    )
