"""Streams a snapshot folder's tensors into parameters, through one bounded buffer, hashing every byte on the way.

Host memory holds the parameters and one buffer, never the model twice. Files are read once, in the order of their
bytes. Only safetensors are read; nothing in the folder is ever executed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import xxhash

from daemon.layers.parameters import Parameters
from daemon.weights.errors import CheckpointError
from daemon.weights.header import TensorEntry, read_header

BUFFER_BYTES = 16 << 20
MAX_INDEX_BYTES = 100 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weights file and those of its tensors that belong to the model."""

    path: Path
    entries: tuple[TensorEntry, ...]


def load_weights(folder: Path, parameters: Parameters, progress: Progress) -> bytes:
    """Fills all parameters; returns a 32-byte digest of names, dtypes, shapes and bytes that resharding leaves alone.

    Raises:
        CheckpointError: a file is damaged, or tensors are missing, superfluous, or of another shape or kind.
    """
    shards = match_weights(folder, parameters)
    total = sum(entry.num_bytes for shard in shards for entry in shard.entries)
    done = 0
    hashes: dict[str, bytes] = {}
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    progress(0, total)
    for shard in shards:
        with shard.path.open("rb", buffering=0) as file:
            for entry in shard.entries:
                hasher = xxhash.xxh3_128(repr((entry.name, str(entry.dtype), entry.shape)).encode())
                view = parameters.targets[entry.name].view
                for content in _stream(file.fileno(), shard, entry, view, buffer):
                    hasher.update(content)
                    done += len(content)
                    progress(done, total)
                hashes[entry.name] = hasher.digest()
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(hashes):
        digest.update(hashes[name])
    return digest.digest()


def match_weights(folder: Path, parameters: Parameters) -> list[Shard]:
    """The files and tensors that fill all parameters, from the files' headers alone.

    Raises:
        CheckpointError: a file is damaged, or tensors are missing, superfluous, or of another shape or kind.
    """
    return _match([Shard(path, read_header(path)) for path in weight_files(folder)], parameters)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one.

    Raises:
        CheckpointError: a file is missing, or the index is not one.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise CheckpointError(f"the folder has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return [folder / SINGLE_NAME]
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{INDEX_NAME}: larger than {MAX_INDEX_BYTES} bytes")
    try:
        content: object = json.loads(index.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{INDEX_NAME}: not JSON") from None
    weight_map = cast(dict[str, object], content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX_NAME}: no weight_map")
    names = set(cast(dict[str, object], weight_map).values())
    files: list[Path] = []
    for name in sorted(str(name) for name in names):
        # A name is a plain file name: no separators, no way out of the folder, nothing but safetensors.
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise CheckpointError(f"{INDEX_NAME}: {name[:200]!r} is not a safetensors file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{INDEX_NAME}: {name[:200]!r} is not there")
        files.append(folder / name)
    return files


def _match(shards: list[Shard], parameters: Parameters) -> list[Shard]:
    """Checks all names, shapes and kinds before a byte is read; drops what the family ignores."""
    seen: set[str] = set()
    kept: list[Shard] = []
    for shard in shards:
        entries: list[TensorEntry] = []
        for entry in shard.entries:
            target = parameters.targets.get(entry.name)
            if target is None:
                if parameters.is_ignored(entry.name):
                    continue
                raise CheckpointError(f"{shard.path.name}: tensor {entry.name[:200]!r} does not belong to this model")
            if entry.name in seen:
                raise CheckpointError(f"{shard.path.name}: tensor {entry.name!r} is in two files")
            if entry.shape != target.shape:
                raise CheckpointError(
                    f"tensor {entry.name!r} has shape {list(entry.shape)}, the configuration says {list(target.shape)}"
                )
            if entry.dtype.is_floating_point != target.view.dtype.is_floating_point or entry.dtype.itemsize == 1:
                raise CheckpointError(f"tensor {entry.name!r} is {entry.dtype}, which {target.view.dtype} cannot take")
            seen.add(entry.name)
            entries.append(entry)
        kept.append(Shard(shard.path, tuple(entries)))
    missing = sorted(parameters.targets.keys() - seen)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:3])}{more}")
    return kept


def _stream(
    file: int, shard: Shard, entry: TensorEntry, view: torch.Tensor, buffer: torch.Tensor
) -> Iterator[memoryview]:
    """Reads one tensor into its place, yielding the bytes of each part while they are in the buffer."""
    target = view.view(-1) if view.is_contiguous() else view
    if target.numel() == 0:
        return
    row_elements = target.numel() // target.shape[0]
    row_bytes = row_elements * entry.dtype.itemsize
    if row_bytes > buffer.numel():
        buffer = torch.empty(row_bytes, dtype=torch.uint8)
    step = buffer.numel() // row_bytes
    for begin in range(0, target.shape[0], step):
        end = min(begin + step, target.shape[0])
        part = buffer[: (end - begin) * row_bytes]
        content = part.numpy().data
        _read_exactly(file, content, entry.offset + begin * row_bytes, shard.path.name)
        target[begin:end].copy_(part.view(entry.dtype).view(end - begin, *target.shape[1:]))
        yield content


def _read_exactly(file: int, content: memoryview, offset: int, file_name: str) -> None:
    done = 0
    while done < len(content):
        try:
            count = os.preadv(file, [content[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{file_name}: cannot be read: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{file_name}: truncated while it was read")
        done += count
