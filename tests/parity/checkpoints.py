"""Tiny random checkpoints of each family, with everything that starts as ones or zeros moved away from there."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from daemon.config import EngineConfig
from daemon.models.base import Model
from daemon.models.load import load_model

VOCAB_SIZE = 131
BLOCK_SIZE = 4
GRID = 16

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**changes: Any) -> PreTrainedModel:
    values: dict[str, Any] = COMMON | HEADS | {"intermediate_size": 96, "num_hidden_layers": 3} | changes
    return LlamaForCausalLM(LlamaConfig(**values))


def _qwen3(**changes: Any) -> PreTrainedModel:
    values: dict[str, Any] = (
        COMMON | HEADS | {"head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 3} | changes
    )
    return Qwen3ForCausalLM(Qwen3Config(**values))


def _qwen3_moe(**changes: Any) -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
    values: dict[str, Any] = COMMON | HEADS | experts | {"intermediate_size": 96, "num_hidden_layers": 4} | changes
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama tied, biased, llama3 rope": lambda: _llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3
    ),
    "llama yarn rope": lambda: _llama(rope_parameters=YARN),
    "llama linear rope, one kv head": lambda: _llama(
        num_key_value_heads=1, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "qwen3": _qwen3,
    "qwen3 tied, biased": lambda: _qwen3(tie_word_embeddings=True, attention_bias=True),
    "qwen3_moe": lambda: _qwen3_moe(mlp_only_layers=[1]),
    "qwen3_moe every second layer, not renormalised": lambda: _qwen3_moe(decoder_sparse_step=2, norm_topk_prob=False),
}
# Every expert is chosen for every token, so that rounding cannot tip a choice.
SMOOTH_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": lambda: _qwen3_moe(mlp_only_layers=[1], num_experts_per_tok=8),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The same weights twice."""

    theirs: PreTrainedModel
    ours: Model
    folder: Path

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of every position, computed whole by transformers: [tokens, vocab_size]."""
        with torch.inference_mode():
            return self.theirs(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


def make_pair(name: str, folder: Path, *, seed: int = 0, max_shard_size: str = "50GB") -> Pair:
    """Saves a random checkpoint and loads it both ways, in float32."""
    torch.manual_seed(seed)
    theirs = MAKERS[name]().eval()
    randomise(theirs, seed)
    theirs.save_pretrained(folder, max_shard_size=max_shard_size)
    return Pair(theirs, load(folder), folder)


def load(folder: Path, dtype: str = "float32") -> Model:
    config = EngineConfig(model_path=str(folder), dtype=dtype, device="cpu", block_size=BLOCK_SIZE, grid=GRID)
    return load_model(config, lambda done_bytes, total_bytes: None).model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Norms around one, biases away from zero, matrices that keep their input's size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(parameter.shape[-1])
                parameter.copy_(noise * scale)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(parameter + 0.2 * noise)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
