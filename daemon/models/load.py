"""From a snapshot folder to a model that can compute.

`model_type` of config.json names a module of this package; whatever else the folder holds is never executed.
"""

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import daemon.models
from daemon.config import EngineConfig, LoadFormat
from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, HostStaged, Model
from daemon.models.fields import Fields, read_json
from daemon.weights.dummy import fill_with_dummies
from daemon.weights.errors import ConfigError, LoadError
from daemon.weights.reader import Progress, load_weights

Build = Callable[[Fields, BuildOptions, Parameters], Model]
"""What a family's module offers as `build`: declares a model, its parameters allocated and not yet filled."""

MAX_TILE = 1024  # tokens
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What config.json may say without changing a byte of state.
UNREAD_KEYS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and what identifies them in a state fingerprint."""

    model: Model
    weights_digest: bytes  # 32: tensor names, dtypes, shapes and bytes
    architecture_digest: bytes  # 32: the configuration


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Builds the model of `config.model_path` and fills it; `progress` is called with (bytes done, bytes in all).

    Raises:
        LoadError: the folder cannot be served.
    """
    folder = Path(config.model_path)
    if not folder.is_dir():
        raise LoadError("the model path is not a folder")
    fields = _with_all_end_tokens(read_json(folder / "config.json"), folder)
    options = BuildOptions(
        checkpoint_dtype(fields) if config.dtype == "auto" else DTYPES[config.dtype],
        _device(config),
        choose_tile(config.grid, config.block_size),
        None if config.load_format is LoadFormat.DUMMY else folder,
    )
    parameters = Parameters(options.device, options.dtype)
    model = build_model(fields, options, parameters)
    if config.load_format is LoadFormat.DUMMY:
        digest = fill_with_dummies(parameters, config.seed, progress)
    else:
        digest = load_weights(folder, parameters, progress)
    parameters.finish()
    if isinstance(model, HostStaged):
        digest = hashlib.blake2b(digest + model.tables_digest(), digest_size=32).digest()
    return LoadedModel(model, digest, _architecture_digest(fields))


def build_dummy(values: Mapping[str, object], options: BuildOptions, seed: int = 0) -> Model:
    """A model of any configuration with seeded weights, from no files at all."""
    parameters = Parameters(options.device, options.dtype)
    model = build_model(Fields(values), options, parameters)
    fill_with_dummies(parameters, seed, lambda done_bytes, total_bytes: None)
    parameters.finish()
    return model


def read_shape(path: Path, num_layers: int | None) -> tuple[Fields, Fields]:
    """A configuration's file, cut to so many layers, and the part of it that tells of the text model.

    Raises:
        ConfigError: it cannot be read.
    """
    fields = read_json(path)
    text = dict((fields.section("text_config") or fields).values)
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
    values = {**fields.values, "text_config": text} if fields.has("text_config") else text
    return Fields(values, fields.where), Fields(text, fields.where)


def build_model(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration: its parameters are allocated, and not yet filled.

    Raises:
        ConfigError: the family is unknown, a value is out of bounds, or the parameters do not fit.
    """
    build = _family(fields)
    try:
        return build(fields, options, parameters)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"the parameters cannot be allocated: {str(error).splitlines()[0][:200]}") from None


def checkpoint_dtype(fields: Fields) -> torch.dtype:
    """What a model computes in unless told otherwise: what its configuration, or the text part of it, says."""
    for part in (fields, fields.section("text_config") or Fields({}, fields.where)):
        for key in ("dtype", "torch_dtype"):
            if part.has(key):
                # float16 fits into float32 without loss, and into bfloat16 not at all well.
                return DTYPES.get(part.text(key), torch.float32)
    return torch.float32


def known_families() -> tuple[str, ...]:
    """Every model_type that can be served: the modules of this package that offer a `build`."""
    return tuple(sorted(name for name in _modules() if _builds(name) is not None))


def choose_tile(grid: int | None, block_size: int) -> int:
    """Tokens of an attention tile: whole blocks, a divisor of the grid, at most MAX_TILE unless a block is longer."""
    grid = grid or max(MAX_TILE, block_size)
    blocks = max(1, min(grid, MAX_TILE) // block_size)
    while grid % (blocks * block_size) and blocks > 1:
        blocks -= 1
    return blocks * block_size


def _family(fields: Fields) -> Build:
    name = fields.text("model_type")
    # Looked up among the files that are there, so that a configuration cannot name any other module.
    build = _builds(name) if name in _modules() else None
    if build is None:
        raise fields.fail("model_type", f"{name!r} is not supported, only {', '.join(known_families())}")
    return build


def _modules() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(daemon.models.__path__)) - {"load"}


def _builds(name: str) -> Build | None:
    return getattr(importlib.import_module(f"daemon.models.{name}"), "build", None)


def _with_all_end_tokens(fields: Fields, folder: Path) -> Fields:
    """Every part with the end tokens of all: the configuration, its text part, and generation_config.json."""
    text, path = fields.section("text_config"), folder / "generation_config.json"
    places = [fields, *([] if text is None else [text]), *([read_json(path)] if path.is_file() else [])]
    ends = sorted({token for place in places for token in place.counts("eos_token_id")})
    values = {**fields.values, "eos_token_id": ends}
    if text is not None:
        values["text_config"] = {**text.values, "eos_token_id": ends}
    return Fields(values, fields.where)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise LoadError(f"unknown device {config.device!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"device must be auto, cpu or cuda, not {config.device!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"there is no device {config.device!r} on this machine")
    return device


def _architecture_digest(fields: Fields) -> bytes:
    values = {key: value for key, value in fields.values.items() if key not in UNREAD_KEYS}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=32).digest()
