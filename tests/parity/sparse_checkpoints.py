"""Tiny random checkpoints of the families that select what they attend to."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration

from tests.parity.checkpoints import COMMON, Pair, load

BASE: dict[str, Any] = dict(COMMON)
LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
INDEX: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _deepseek(**changes: Any) -> PreTrainedModel:
    groups: dict[str, Any] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**(BASE | LATENT | INDEX | groups | changes)))


def _glm(**changes: Any) -> PreTrainedModel:
    kinds: dict[str, Any] = {
        "indexer_types": ["full", "shared", "full", "shared"],
        "first_k_dense_replace": 1,
        "num_hidden_layers": 4,
    }
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**(BASE | LATENT | INDEX | kinds | changes)))


def _glm5_next(**changes: Any) -> PreTrainedModel:
    delta = {"linear_head_dim": 16, "linear_num_heads": 4}
    pools = {"index_topk": 16, "index_kpool": 4, "qk_rope_head_dim": 0, "hc_mult": 4}
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
    text: dict[str, Any] = BASE | LATENT | INDEX | delta | pools | layers | {"pad_token_id": 0} | changes
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    marks = ("image_token_id", "image_start_token_id", "image_end_token_id")
    marks += ("video_token_id", "video_start_token_id", "video_end_token_id")
    config = Glm5NextConfig(
        text_config=text,
        vision_config=vision | {"projection_intermediate_size": 32},
        **dict[str, Any]({mark: 120 + i for i, mark in enumerate(marks)}),
    )
    return Glm5NextForConditionalGeneration(config)


def _qwen4_exp(**changes: Any) -> PreTrainedModel:
    return Qwen4ExpForCausalLM(_qwen4_exp_text(**changes))


def _qwen4_exp_with_vision() -> PreTrainedModel:
    marks = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen4ExpConfig(
        text_config=_qwen4_exp_text().to_dict(),
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
        **dict[str, Any]({mark: 120 + i for i, mark in enumerate(marks)}),
    )
    return Qwen4ExpForConditionalGeneration(config)


def _qwen4_exp_text(**changes: Any) -> Qwen4ExpTextConfig:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    delta = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    delta |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    index = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    index |= {"indexer_budget": 8, "indexer_compress_ratio": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32}
    streams = {"hc_count": 4, "hc_lowrank": 16}
    ngrams = {"ple_layer_ids": [1, 3], "ple_embed_dim": 64, "ngram_size": 3, "heads_per_ngram": 4}
    ngrams |= {"ngram_vocab_size_base": 1000, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2}
    values: dict[str, Any] = (
        BASE | attention | delta | index | experts | streams | ngrams | layers | {"rope_parameters": rope}
    )
    return Qwen4ExpTextConfig(**(values | changes))


# Of the random weights: chosen so that no selection of the tests nearly ties (see SelectionGaps).
SEEDS = {"deepseek_v32": 2, "deepseek_v32 yarn, two shared experts": 1, "glm_moe_dsa": 2}

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v32": _deepseek,
    "deepseek_v32 yarn, two shared experts": lambda: _deepseek(rope_parameters=YARN, n_shared_experts=2),
    "deepseek_v32 more kept than there is": lambda: _deepseek(index_topk=500),
    "glm_moe_dsa": _glm,
    "qwen4_exp": _qwen4_exp,
    "qwen4_exp beside a vision tower": _qwen4_exp_with_vision,
    "qwen4_exp without n-grams": lambda: _qwen4_exp(ple_layer_ids=None),
    "qwen4_exp 4-grams, wide blocks": lambda: _qwen4_exp(ngram_size=4, ple_embed_dim=96, indexer_compress_ratio=2),
    "glm5_next": _glm5_next,
    "glm5_next every token its own pool": lambda: _glm5_next(index_kpool=1),
    "glm5_next softplus decay, small clamp": lambda: _glm5_next(linear_lower_bound=None, swiglu_limit=0.5),
}
# Every expert is chosen for every token and every key is kept, so that rounding cannot tip a choice.
ALL: dict[str, Any] = {"num_experts_per_tok": 8, "index_topk": 1024}
SMOOTH_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v32": lambda: _deepseek(**ALL, topk_group=4),
    "glm_moe_dsa": lambda: _glm(**ALL),
    "glm5_next": lambda: _glm5_next(**ALL),
    "qwen4_exp": lambda: _qwen4_exp(num_experts_per_tok=8, indexer_budget=1024),
}


def make_pair(name: str, folder: Path, change: Callable[[PreTrainedModel], None] | None = None) -> Pair:
    """Saves a random checkpoint, changed where asked, and loads it both ways, in float32."""
    seed = SEEDS.get(name, 0)
    torch.manual_seed(seed)
    theirs = MAKERS[name]().eval()
    randomise(theirs, seed)
    if change is not None:
        with torch.no_grad():
            change(theirs)
    theirs.save_pretrained(folder)
    return Pair(theirs, load(folder), folder)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Nothing stays at the value that it starts with: norms, gates, decays and the routers' biases neither."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                scale = 1.0 if "embed" in name else 0.4 if "conv" in name else 1 / math.sqrt(parameter.shape[-1])
                parameter.copy_(noise * scale)
            elif "A_log" in name:
                parameter.copy_(noise * 0.5)
            elif "dt_bias" in name:
                parameter.copy_(noise * 0.5 - 1)
            elif "norm" in name and not name.endswith("bias"):
                parameter.copy_(parameter + 0.2 * noise)
            else:
                parameter.copy_(noise * 0.3)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
