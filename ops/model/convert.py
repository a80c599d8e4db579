"""A llama GGUF file into a snapshot folder: config, weights, tokenizer, chat template. The same bytes every time."""

from collections.abc import Callable
from pathlib import Path

import gguf

from ops.model.metadata import (
    Metadata,
    config_json,
    generation_config_json,
    tokenizer_config_json,
    tokenizer_json,
)
from ops.model.weights import write_weights


def convert_gguf(gguf_path: Path, folder: Path, on_progress: Callable[[int], None]) -> None:
    """Writes a snapshot folder's files into `folder`, which must exist.

    `on_progress` is told the GGUF bytes of each tensor as it is done.

    Raises:
        ValueError: the file is not a llama model with a byte-level tokenizer, or a part is missing.
    """
    reader = gguf.GGUFReader(gguf_path)
    metadata = Metadata(reader)
    shape, special = metadata.shape(), metadata.special_tokens()
    texts = {
        "config.json": config_json(shape, special),
        "generation_config.json": generation_config_json(special),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config_json(metadata),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_weights(reader, shape, folder / "model.safetensors", on_progress)
