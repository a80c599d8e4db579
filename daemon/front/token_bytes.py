"""The bytes of every token, from a tokenizer's vocabulary: what the front needs to turn tokens into text by itself.

Two kinds of vocabulary are known. Byte-level ones spell each byte as one printable character. Metaspace ones write a
space as U+2581 and bytes outside their vocabulary as <0xNN>.
"""

import re
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


class UnsupportedTokenizer(ValueError):
    """The tokenizer's way from tokens to text is none of those known here."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the model's own vocabulary. A special one has no text."""

    content: str
    special: bool


def token_bytes(
    vocabulary: dict[str, int], added: dict[int, AddedToken], decoder: dict[str, Any] | None
) -> list[bytes]:
    """The bytes of each id, from a tokenizer's ids by spelling, its added tokens by id, and tokenizer.json's decoder.

    Special tokens and unused ids have none.

    Raises:
        UnsupportedTokenizer: the decoder is neither byte-level nor metaspace.
    """
    table = [b""] * (1 + max([*vocabulary.values(), *added], default=-1))
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        byte_of = _byte_of_character()
        for token, token_id in vocabulary.items():
            table[token_id] = _byte_level(token, byte_of)
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        for token, token_id in vocabulary.items():
            table[token_id] = _metaspace(token)
    else:
        raise UnsupportedTokenizer(f"tokenizer with decoder {sorted(kinds) or 'none'} is not supported")
    for token_id, token in added.items():
        table[token_id] = b"" if token.special else token.content.encode()
    return table


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The types of a decoder and of those inside it."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def _byte_of_character() -> dict[str, int]:
    """Byte-level's alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[char] for char in token)
    except KeyError:  # a token outside the alphabet stands for its own text
        return token.encode()


def _metaspace(token: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes((int(found[1], 16),)) if found else token.replace(_METASPACE, " ").encode()
