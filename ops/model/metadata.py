"""What a llama GGUF file says about itself, as the JSON files of a Hugging Face snapshot folder.

Every value comes from the GGUF metadata; a key that is missing is an error, never a default.
"""

import json
from dataclasses import dataclass
from typing import Any

import gguf

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of tokens like <|im_end|>
NORMAL_TOKEN = 1


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of the network."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that mean something to a server."""

    bos: int
    eos: int
    unknown: int
    padding: int


class Metadata:
    """The key-value part of a GGUF file, read once."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise ValueError(f"architecture {architecture!r}, expected 'llama'")
        model, pre = self.value("tokenizer.ggml.model"), self.value("tokenizer.ggml.pre")
        if (model, pre) != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {model!r} with pre-tokenizer {pre!r}, expected 'gpt2' with 'smollm'")

    def value(self, key: str) -> Any:
        """The value of a key.

        Raises:
            ValueError: the file has no such key.
        """
        field = self._reader.fields.get(key)
        if field is None:
            raise ValueError(f"the GGUF file has no {key}")
        return field.contents()

    def shape(self) -> LlamaShape:
        """Sizes of the network."""
        return LlamaShape(
            num_layers=self.value("llama.block_count"),
            hidden_size=self.value("llama.embedding_length"),
            intermediate_size=self.value("llama.feed_forward_length"),
            num_heads=self.value("llama.attention.head_count"),
            num_kv_heads=self.value("llama.attention.head_count_kv"),
            head_dim=self.value("llama.rope.dimension_count"),
            vocab_size=self.value("llama.vocab_size"),
            max_positions=self.value("llama.context_length"),
            rope_theta=float(self.value("llama.rope.freq_base")),
            # Stored as fp32: seven digits give back the number that was written.
            norm_eps=float(f"{self.value('llama.attention.layer_norm_rms_epsilon'):.6e}"),
            tied=all(tensor.name != "output.weight" for tensor in self._reader.tensors),
        )

    def special_tokens(self) -> SpecialTokens:
        """Ids of the special tokens."""
        return SpecialTokens(
            bos=self.value("tokenizer.ggml.bos_token_id"),
            eos=self.value("tokenizer.ggml.eos_token_id"),
            unknown=self.value("tokenizer.ggml.unknown_token_id"),
            padding=self.value("tokenizer.ggml.padding_token_id"),
        )


def config_json(shape: LlamaShape, special: SpecialTokens) -> str:
    """config.json of a LlamaForCausalLM."""
    return _dump(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": special.bos,
            "eos_token_id": special.eos,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate_size,
            "max_position_embeddings": shape.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "num_key_value_heads": shape.num_kv_heads,
            "pad_token_id": special.padding,
            "pretraining_tp": 1,
            "rms_norm_eps": shape.norm_eps,
            "rope_scaling": None,
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": shape.tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": shape.vocab_size,
        }
    )


def generation_config_json(special: SpecialTokens) -> str:
    """generation_config.json: which tokens begin, end and pad."""
    return _dump({"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.padding})


def tokenizer_json(metadata: Metadata) -> str:
    """tokenizer.json: byte-level BPE in which each digit stands alone before the words are split.

    Raises:
        ValueError: a token is neither normal nor control, or a merge is not two tokens.
    """
    tokens: list[str] = metadata.value("tokenizer.ggml.tokens")
    kinds: list[int] = metadata.value("tokenizer.ggml.token_type")
    merges = [merge.split(" ") for merge in metadata.value("tokenizer.ggml.merges")]
    if set(kinds) - {NORMAL_TOKEN, CONTROL_TOKEN}:
        raise ValueError(f"token types {sorted(set(kinds))}, expected only {NORMAL_TOKEN} and {CONTROL_TOKEN}")
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("a merge is not a pair of tokens")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return _dump(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token_id,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind == CONTROL_TOKEN
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: token_id for token_id, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )


def tokenizer_config_json(metadata: Metadata) -> str:
    """tokenizer_config.json: the chat template and the special tokens by their text."""
    tokens: list[str] = metadata.value("tokenizer.ggml.tokens")
    special = metadata.special_tokens()
    return _dump(
        {
            "add_bos_token": metadata.value("tokenizer.ggml.add_bos_token"),
            "add_prefix_space": metadata.value("tokenizer.ggml.add_space_prefix"),
            "bos_token": tokens[special.bos],
            "chat_template": metadata.value("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[special.eos],
            "model_max_length": metadata.shape().max_positions,
            "pad_token": tokens[special.padding],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[special.unknown],
        }
    )


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
