"""Names of blocks: a chained 256-bit hash from the root of a namespace down to a block's own tokens.

The root holds everything that decides whether the bytes under it can be read at all: the state fingerprint, the
provenance and the namespace. Equal keys are still compared by their token ids wherever a block is matched.
"""

import hashlib
from array import array
from collections.abc import Sequence
from enum import StrEnum

KEY_BYTES = 32
TOKEN_BYTES = 4  # of a token id as `token_bytes` packs it


class Provenance(StrEnum):
    """How a block came about. An exact daemon never reads what a fast one wrote."""

    EXACT = "exact"
    FAST = "fast"


def state_fingerprint(parts: dict[str, bytes]) -> bytes:
    """32 bytes over named digests, each name and value length-prefixed, in order of name."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"downcore-state")
    for name in sorted(parts):
        for piece in (name.encode(), parts[name]):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    return digest.digest()


def root_key(fingerprint: bytes, provenance: Provenance, namespace: str) -> bytes:
    """The parent of a namespace's first blocks."""
    assert len(fingerprint) == KEY_BYTES
    digest = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=b"downcore-root")
    for piece in (provenance.value.encode(), namespace.encode()):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block under its parent; `tokens` as `token_bytes` makes them."""
    assert len(parent) == KEY_BYTES
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES, person=b"downcore-block").digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32: what keys hash and nodes keep for comparison."""
    packed = array("i", token_ids)
    assert packed.itemsize == TOKEN_BYTES
    return packed.tobytes()
