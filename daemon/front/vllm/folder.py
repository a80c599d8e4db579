"""What a gateway needs of the model folder: the tokenizer's files as one archive, and a few facts of the configuration.

The archive of the same files is the same bytes, wherever and whenever it is made.
"""

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.json", "chat_template.jinja", "config.json",
    "generation_config.json",
)  # fmt: skip
MAX_FILE_BYTES = 64 << 20
MAX_CONFIG_BYTES = 1 << 20
BEGIN = (1980, 1, 1, 0, 0, 0)  # the earliest time that an archive can name: no file's own


class NoTokenizer(Exception):
    """The model folder has no tokenizer that could be sent."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip archive and the SHA-256 of its bytes, in hexadecimal."""

    data: bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What config.json says; empty or None where it says nothing."""

    architectures: tuple[str, ...]
    bos_token_id: int | None
    pad_token_id: int | None


def archive_of(folder: Path) -> Archive:
    """The tokenizer's files. Reads and compresses megabytes: not for an event loop.

    Raises:
        NoTokenizer: none is there, or a file is larger than MAX_FILE_BYTES.
        OSError: a file cannot be read.
    """
    buffer = io.BytesIO()
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if not any(path.name.startswith(("tokenizer.", "vocab.", "tiktoken.")) for path in found):
        raise NoTokenizer("the model folder has no tokenizer")
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in found:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise NoTokenizer(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
            archive.writestr(zipfile.ZipInfo(path.name, BEGIN), content, zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


def facts_of(folder: Path) -> Facts:
    """What config.json says; nothing where there is none, or none that can be read."""
    fields = _config(folder)
    inner = fields.get("text_config")
    text = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
    named = fields.get("architectures")
    architectures = cast("list[object]", named) if isinstance(named, list) else []
    return Facts(
        architectures=tuple(str(name) for name in architectures),
        bos_token_id=_id(fields.get("bos_token_id", text.get("bos_token_id"))),
        pad_token_id=_id(fields.get("pad_token_id", text.get("pad_token_id"))),
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        with (folder / "config.json").open("rb") as file:
            fields = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}


def _id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None
