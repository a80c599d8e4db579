"""The header of a safetensors file, read with suspicion: every length and offset is checked before it is used.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes, to which the JSON's
offsets refer.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch

from daemon.weights.errors import CheckpointError

MAX_HEADER_BYTES = 100 << 20
MAX_DIMENSIONS = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes [offset, offset + num_bytes) of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """All tensors of a file, in the order of their bytes.

    Raises:
        CheckpointError: the file is truncated, or its header lies.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path.name}: shorter than the 8 bytes of a header length")
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path.name}: header of {header_bytes} bytes, limit {MAX_HEADER_BYTES}")
            if 8 + header_bytes > file_bytes:
                raise CheckpointError(
                    f"{path.name}: truncated: header of {header_bytes} bytes in a file of {file_bytes}"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None
    return _parse(path.name, text, 8 + header_bytes, file_bytes)


def _parse(file_name: str, text: bytes, data_begin: int, file_bytes: int) -> tuple[TensorEntry, ...]:
    try:
        header: object = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file_name}: the header is not JSON, or names a tensor twice") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file_name}: the header is not a JSON object")
    fields = cast(dict[str, object], header)
    entries = [_entry(file_name, name, value, data_begin) for name, value in fields.items() if name != "__metadata__"]
    entries.sort(key=lambda e: (e.offset, e.num_bytes))
    end = data_begin
    for entry in entries:
        if entry.offset < end:
            raise CheckpointError(f"{file_name}: tensor {entry.name!r} overlaps another")
        end = entry.offset + entry.num_bytes
        if end > file_bytes:
            raise CheckpointError(f"{file_name}: truncated: tensor {entry.name!r} ends at byte {end} of {file_bytes}")
    return tuple(entries)


def _entry(file_name: str, name: str, value: object, data_begin: int) -> TensorEntry:
    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{file_name}: tensor {name[:200]!r}: {what}")

    if not isinstance(value, dict):
        raise fail("its entry is not a JSON object")
    fields = cast(dict[str, object], value)
    dtype_name, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise fail(f"unknown dtype {str(dtype_name)[:40]!r}")
    dims = _naturals(shape)
    if dims is None or len(dims) > MAX_DIMENSIONS:
        raise fail("its shape is not a short list of natural numbers")
    ends = _naturals(offsets)
    if ends is None or len(ends) != 2 or ends[0] > ends[1]:
        raise fail("its offsets are not two natural numbers in order")
    num_bytes = prod(dims) * dtype.itemsize
    if ends[1] - ends[0] != num_bytes:
        raise fail(f"shape and dtype make {num_bytes} bytes, its offsets {ends[1] - ends[0]}")
    return TensorEntry(name, dtype, dims, data_begin + ends[0], num_bytes)


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast(list[object], value)
    if not all(type(item) is int and 0 <= item < 1 << 63 for item in items):
        return None
    return tuple(cast(list[int], items))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key comes twice")
    return fields
