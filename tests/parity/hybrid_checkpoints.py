"""Tiny random checkpoints of the families with recurrent layers beside dense attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from tests.parity.checkpoints import COMMON, Pair, load
from tests.parity.sparse_checkpoints import randomise

HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SHARED: dict[str, Any] = EXPERTS | {"shared_expert_intermediate_size": 48}


def _qwen3_5(**changes: Any) -> PreTrainedModel:
    values: dict[str, Any] = COMMON | HEADS | DELTA | {"intermediate_size": 96} | changes
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))


def _qwen3_5_moe(**changes: Any) -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(COMMON | HEADS | DELTA | SHARED | changes)))


def _qwen3_next(**changes: Any) -> PreTrainedModel:
    dense: dict[str, Any] = {"intermediate_size": 96, "mlp_only_layers": [1]}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**(COMMON | HEADS | DELTA | SHARED | dense | changes)))


def _nemotron_h(**changes: Any) -> PreTrainedModel:
    kinds = ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "linear_attention", "moe"]
    mamba: dict[str, Any] = {
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "chunk_size": 16,
    }
    experts: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    experts |= {"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5}
    values: dict[str, Any] = (
        COMMON | HEADS | mamba | experts | {"intermediate_size": 96, "layers_block_type": kinds} | changes
    )
    values.pop("num_hidden_layers")
    return NemotronHForCausalLM(NemotronHConfig(**values))


def _kimi_linear(**changes: Any) -> PreTrainedModel:
    latent: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 20}
    latent |= {"qk_nope_head_dim": 16, "intermediate_size": 96, "linear_head_dim": 16, "linear_num_heads": 3}
    experts: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1}
    values: dict[str, Any] = COMMON | HEADS | latent | experts | ids | {"num_hidden_layers": 6} | changes
    values.pop("head_dim")
    return KimiLinearForCausalLM(KimiLinearConfig(**values))


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_5 tied, biased, one head each": lambda: _qwen3_5(
        tie_word_embeddings=True, attention_bias=True, linear_num_key_heads=1, linear_num_value_heads=1
    ),
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_next not renormalised, every second layer": lambda: _qwen3_next(
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[]
    ),
    "nemotron_h": _nemotron_h,
    "nemotron_h groups, biases": lambda: _nemotron_h(n_group=4, topk_group=2, use_bias=True, use_conv_bias=False),
    "nemotron_h, a long clamp": lambda: _nemotron_h(time_step_min=0.5),
    "kimi_linear": _kimi_linear,
    "kimi_linear groups, two shared experts": lambda: _kimi_linear(n_group=4, topk_group=2, n_shared_experts=2),
}
# Every expert is chosen for every token, so that rounding cannot tip a choice.
SMOOTH_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": lambda: _qwen3_5_moe(num_experts_per_tok=8),
    "qwen3_next": lambda: _qwen3_next(num_experts_per_tok=8),
    "nemotron_h": lambda: _nemotron_h(num_experts_per_tok=8),
    "kimi_linear": lambda: _kimi_linear(num_experts_per_tok=8),
}
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "kimi_linear")


def make_pair(maker: Callable[[], PreTrainedModel], folder: Path, *, seed: int = 0) -> Pair:
    """Saves a random checkpoint and loads it both ways, in float32."""
    torch.manual_seed(seed)
    theirs = maker().eval()
    randomise(theirs, seed)
    theirs.save_pretrained(folder)
    name_dense_layers(folder)
    return Pair(theirs, load(folder), folder)


def name_dense_layers(folder: Path) -> None:
    """Kimi's dense layers are `mlp` in real checkpoints; transformers writes them under the experts' name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    below = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    renamed: dict[str, Any] = {
        name.replace("block_sparse_moe", "mlp") if name.split("block_sparse_moe.")[-1] in below else name: tensor
        for name, tensor in tensors.items()
    }
    if renamed.keys() != tensors.keys():
        save_file(renamed, path, metadata={"format": "pt"})
