"""Weights of a llama GGUF file as the bf16 tensors of a Hugging Face checkpoint.

Dequantizing is exact in fp32; the one rounding is the one to bf16, to nearest, ties to even. So the same GGUF gives the
same bytes everywhere. Imports no torch.
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import safetensors
from gguf.quants import dequantize

from ops.model.metadata import LlamaShape

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_weights(reader: gguf.GGUFReader, shape: LlamaShape, path: Path, on_progress: Callable[[int], None]) -> None:
    """Writes every tensor of the file to `path` as safetensors.

    `on_progress` is told the GGUF bytes of each tensor as it is done.

    Raises:
        ValueError: a tensor has a name that llama does not have, or a value that is not finite.
    """
    arrays: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = checkpoint_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            values = unpermute(values, shape.num_heads)
        elif name.endswith("k_proj.weight"):
            values = unpermute(values, shape.num_kv_heads)
        if not np.isfinite(values).all():
            raise ValueError(f"tensor {tensor.name} has values that are not finite")
        arrays[name] = to_bfloat16(values)
        on_progress(int(tensor.n_bytes))
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in sorted(arrays.items())
    }
    safetensors.serialize_file(specs, path, {"format": "pt"})  # `arrays` outlives the call, as its pointers must


def checkpoint_name(gguf_name: str) -> str:
    """ "blk.3.attn_q.weight" is "model.layers.3.self_attn.q_proj.weight"."""
    stem, dot, suffix = gguf_name.rpartition(".")
    parts = stem.split(".")
    if dot and parts[0] == "blk" and len(parts) == 3 and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{int(parts[1])}.{_BLOCK_NAMES[parts[2]]}.{suffix}"
    if dot and stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{suffix}"
    raise ValueError(f"tensor {gguf_name!r} is none of a llama model")


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from GGUF's order (rotary pairs adjacent) to halves: [heads * d, in]."""
    rows, width = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite fp32 values as the uint16 bits of bf16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
