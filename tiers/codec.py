"""Images to payloads and back.

bf16 values have little to say in their high bytes (sign and exponent) and nothing to save in their low ones: the high
bytes are compressed, the low bytes are stored as they are. Other parts are stored raw unless a trial gained. A payload
is a row of stripes, each of some whole parts: one zstd frame, then the bytes that are not compressed. A stripe is small
enough that decoding it stays in a core's cache. Padding between parts is not stored.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiers.layout import Part

STRIPE_BYTES = 512 << 10  # a stripe takes no further part once it has so many bytes to compress
ZSTD_LEVEL = 1  # of -5, -1, 1 and 3, the smallest and the second fastest on K and V (FORMAT.md)
SPLIT_GAIN = 0.05  # share of a part that a coding must save in the trial
ZSTD_GAIN = 0.10

_PART = struct.Struct("<BxxxI")  # coding, bytes in the image
_STRIPE = struct.Struct("<IIII")  # parts, bytes before compression, bytes of the frame, bytes stored raw

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]


class Coding(IntEnum):
    """How a part is stored. The numbers are on disk."""

    RAW = 0
    SPLIT = 1  # high bytes of 16-bit words compressed, low bytes raw
    ZSTD = 2  # all bytes compressed


class CodecError(Exception):
    """A payload does not have the shape that its tables and the layout promise."""


@dataclass(frozen=True, slots=True)
class Span:
    """Parts that lie side by side in the image and have one coding: bytes [offset, offset + num_bytes)."""

    coding: Coding
    offset: int
    num_bytes: int

    @property
    def packed_bytes(self) -> int:
        """Of these, how many are compressed."""
        return {Coding.RAW: 0, Coding.SPLIT: self.num_bytes // 2, Coding.ZSTD: self.num_bytes}[self.coding]


@dataclass(frozen=True, slots=True)
class Stripe:
    """A run of parts that is coded together."""

    num_parts: int
    spans: tuple[Span, ...]

    @property
    def packed_bytes(self) -> int:
        """Bytes before compression."""
        return sum(span.packed_bytes for span in self.spans)

    @property
    def plain_bytes(self) -> int:
        """Bytes stored as they are."""
        return sum(span.num_bytes - span.packed_bytes for span in self.spans)


@dataclass(frozen=True, slots=True)
class Coded:
    """The tables of a payload that was written, for its header."""

    part_table: bytes
    stripe_table: bytes
    payload_bytes: int


class ImageCodec:
    """Codes images of one kind of one layout. Encodes on one thread at a time, decodes on any number."""

    def __init__(self, parts: tuple[Part, ...], image_bytes: int) -> None:
        self.parts = parts
        self.image_bytes = image_bytes
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)

    def trial(self, image: memoryview) -> tuple[Coding, ...]:
        """The coding of each part that this image speaks for."""
        whole = _as_bytes(image)
        return tuple(self._try_part(part, whole[part.offset : part.offset + part.num_bytes]) for part in self.parts)

    def table_bytes(self, codings: tuple[Coding, ...] | None = None) -> tuple[int, int]:
        """Sizes of part table and stripe table; the most that the latter can have where no codings are given."""
        num_stripes = len(self.parts) if codings is None else len(_plan(self.parts, codings))
        return _PART.size * len(self.parts), _STRIPE.size * num_stripes

    def most_payload_bytes(self) -> int:
        """No payload is longer, whatever the codings."""
        return sum(part.num_bytes + part.num_bytes // 128 + 1024 for part in self.parts)

    def encode(self, image: memoryview, codings: tuple[Coding, ...], out: memoryview) -> Coded:
        """Writes the payload to the beginning of `out`, of at least `most_payload_bytes`."""
        source, target = _as_bytes(image), _as_bytes(out)
        assert len(source) == self.image_bytes
        assert len(codings) == len(self.parts)
        at = 0
        lengths: list[bytes] = []
        for stripe in _plan(self.parts, codings):
            packed = np.empty(stripe.packed_bytes, np.uint8)
            plain = np.empty(stripe.plain_bytes, np.uint8)
            _gather(source, stripe, packed, plain)
            frame = self._compressor.compress(packed.data) if len(packed) else b""
            for piece in (frame, plain.data):
                target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            lengths.append(_STRIPE.pack(stripe.num_parts, len(packed), len(frame), len(plain)))
        return Coded(_part_table(self.parts, codings), b"".join(lengths), at)

    def decode(self, part_table: bytes, stripe_table: bytes, payload: memoryview, image: memoryview) -> None:
        """Writes every part to its place in `image`; padding is left as it is.

        Raises:
            CodecError: tables, lengths or a frame do not fit the layout. The image may be half written.
        """
        source, target = _as_bytes(payload), _as_bytes(image)
        assert len(target) == self.image_bytes
        stripes = _plan(self.parts, self._codings_of(part_table))
        if len(stripe_table) != _STRIPE.size * len(stripes):
            raise CodecError("number of stripes")
        decompressor = zstandard.ZstdDecompressor()
        at = 0
        for stripe, lengths in zip(stripes, _STRIPE.iter_unpack(stripe_table), strict=True):
            num_parts, packed_bytes, frame_bytes, plain_bytes = lengths
            if (num_parts, packed_bytes, plain_bytes) != (stripe.num_parts, stripe.packed_bytes, stripe.plain_bytes):
                raise CodecError("lengths of a stripe")
            if at + frame_bytes + plain_bytes > len(source):
                raise CodecError("the payload is too short")
            packed = _decompress(decompressor, payload[at : at + frame_bytes], packed_bytes)
            _scatter(stripe, packed, source[at + frame_bytes : at + frame_bytes + plain_bytes], target)
            at += frame_bytes + plain_bytes
        if at != len(source):
            raise CodecError("the payload is too long")

    def _try_part(self, part: Part, data: Bytes) -> Coding:
        if part.dtype in ("bfloat16", "float16"):
            high = data[1::2].copy()
            saved = len(high) - len(self._compressor.compress(high.data))
            return Coding.SPLIT if saved > SPLIT_GAIN * len(data) else Coding.RAW
        saved = len(data) - len(self._compressor.compress(data.data))
        return Coding.ZSTD if saved > ZSTD_GAIN * len(data) else Coding.RAW

    def _codings_of(self, part_table: bytes) -> tuple[Coding, ...]:
        if len(part_table) != _PART.size * len(self.parts):
            raise CodecError("number of parts")
        try:
            codings = tuple(Coding(coding) for coding, _ in _PART.iter_unpack(part_table))
        except ValueError:
            raise CodecError("unknown coding") from None
        if _part_table(self.parts, codings) != part_table:
            raise CodecError("lengths of the parts")
        return codings


@lru_cache(maxsize=16)
def _part_table(parts: tuple[Part, ...], codings: tuple[Coding, ...]) -> bytes:
    return b"".join(_PART.pack(coding, part.num_bytes) for part, coding in zip(parts, codings, strict=True))


@lru_cache(maxsize=16)
def _plan(parts: tuple[Part, ...], codings: tuple[Coding, ...]) -> tuple[Stripe, ...]:
    return tuple(_cut(parts, codings))


def _cut(parts: tuple[Part, ...], codings: tuple[Coding, ...]) -> Iterator[Stripe]:
    """Whole parts to a stripe, until it has enough."""
    spans: list[Span] = []
    num_parts = size = 0
    for part, coding in zip(parts, codings, strict=True):
        span = Span(coding, part.offset, part.num_bytes)
        size += max(span.packed_bytes, span.num_bytes // 2)
        last = spans[-1] if spans else None
        if last is not None and last.coding is coding and last.offset + last.num_bytes == part.offset:
            spans[-1] = Span(coding, last.offset, last.num_bytes + part.num_bytes)
        else:
            spans.append(span)
        num_parts += 1
        if size >= STRIPE_BYTES:
            yield Stripe(num_parts, tuple(spans))
            spans, num_parts, size = [], 0, 0
    if spans:
        yield Stripe(num_parts, tuple(spans))


def _gather(image: Bytes, stripe: Stripe, packed: Bytes, plain: Bytes) -> None:
    """Sorts a stripe's bytes into those to compress and the others."""
    packed_at = plain_at = 0
    for span in stripe.spans:
        data = image[span.offset : span.offset + span.num_bytes]
        high = packed[packed_at : packed_at + span.packed_bytes]
        low = plain[plain_at : plain_at + span.num_bytes - span.packed_bytes]
        if span.coding is Coding.SPLIT:
            _split(data.view(np.uint16), high, low)
        else:
            (low if span.coding is Coding.RAW else high)[:] = data
        packed_at += len(high)
        plain_at += len(low)


def _scatter(stripe: Stripe, packed: Bytes, plain: Bytes, image: Bytes) -> None:
    """The inverse of `_gather`."""
    packed_at = plain_at = 0
    for span in stripe.spans:
        data = image[span.offset : span.offset + span.num_bytes]
        high = packed[packed_at : packed_at + span.packed_bytes]
        low = plain[plain_at : plain_at + span.num_bytes - span.packed_bytes]
        if span.coding is Coding.SPLIT:
            _join(high, low, data.view(np.uint16))
        else:
            data[:] = low if span.coding is Coding.RAW else high
        packed_at += len(high)
        plain_at += len(low)


def _split(words: Words, high: Bytes, low: Bytes) -> None:
    np.right_shift(words, 8, out=high, casting="unsafe")
    np.copyto(low, words, casting="unsafe")  # keeps the low byte


def _join(high: Bytes, low: Bytes, words: Words) -> None:
    """Two calls that widen in numpy's own cache-sized buffers, without the GIL; other forms are slower (FORMAT.md)."""
    np.multiply(high, 256, out=words, dtype=np.uint16)
    np.add(words, low, out=words)


def _decompress(decompressor: zstandard.ZstdDecompressor, frame: memoryview, num_bytes: int) -> Bytes:
    """The frame's content, whose declared size is compared before any of it is allocated."""
    if not num_bytes:
        if len(frame):
            raise CodecError("a frame of nothing")
        return np.empty(0, np.uint8)
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise CodecError("a frame declares another size")
        content = decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(str(error)) from None
    return np.frombuffer(content, np.uint8)


def _as_bytes(data: memoryview) -> Bytes:
    return np.frombuffer(data, np.uint8)
