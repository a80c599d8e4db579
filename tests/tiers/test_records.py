"""Records as bytes: what is packed is parsed, what is changed is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
import xxhash
import zstandard

from tests.tiers.stores import IDENTITY, LAYOUT, chain, image_of, same_parts
from tiers.codec import CodecError, Coding, ImageCodec
from tiers.keys import Provenance
from tiers.layout import Part, Plane, SlotTensor, StateLayout
from tiers.records import (
    VERSION,
    Flaw,
    Header,
    Identity,
    RecordFlaw,
    RecordHead,
    RecordKind,
    check_wanted,
    checksum,
    pack_header,
    parse_header,
)
from tiers.segments import Place
from tiers.writing import Encoder


def encoded() -> list[tuple[Header, bytearray]]:
    """A chain as it goes to disk, record by record."""
    encoder = Encoder(IDENTITY, generation=100)
    pairs = [item.pair for item in chain(8)]
    encoder.try_codings(pairs)
    (piece,) = encoder.pieces(Place(3, 8192), pairs)
    records: list[tuple[Header, bytearray]] = []
    for header in piece.headers:
        begin = header.ref.offset - 8192
        records.append((header, bytearray(piece.data[begin : begin + header.ref.stored_bytes])))
    return records


def test_a_header_says_what_was_written() -> None:
    records = encoded()
    assert {header.head.kind for header, _ in records} == set(RecordKind)
    for header, data in records:
        assert parse_header(memoryview(data)) == header
        assert header.group_offset == 8192
        check_wanted(header, header.head, header.ref, IDENTITY)
        payload = memoryview(data)[header.num_bytes : header.num_bytes + header.payload_bytes]
        assert checksum(payload) == header.payload_checksum


def test_every_flipped_bit_of_a_header_is_found() -> None:
    header, data = encoded()[0]
    for at in range(header.num_bytes):
        data[at] ^= 1 << (at % 8)
        with pytest.raises(RecordFlaw):
            parse_header(memoryview(data))
        data[at] ^= 1 << (at % 8)
    assert parse_header(memoryview(data)) == header


@pytest.mark.parametrize("length", [0, 1, 16, 31, 32, 100, 300])
def test_a_cut_header_is_no_header(length: int) -> None:
    _, data = encoded()[0]
    with pytest.raises(RecordFlaw):
        parse_header(memoryview(data)[:length])


def test_another_version_is_told_apart_from_damage_and_keeps_its_length() -> None:
    header, data = encoded()[0]
    newer = bytearray(pack_header(header))
    newer[8:10] = (VERSION + 1).to_bytes(2, "little")
    # What a program of that version would write: its own checksum over the prefix.
    newer[24:32] = xxhash.xxh3_64_digest(bytes(newer[:24]))
    with pytest.raises(RecordFlaw) as caught:
        parse_header(memoryview(newer + data[len(newer) :]))
    assert caught.value.flaw is Flaw.OTHER_VERSION
    assert caught.value.stored_bytes == header.ref.stored_bytes


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({"namespace": "other"}, Flaw.OTHER_RECORD),
        ({"key": b"k" * 32}, Flaw.OTHER_RECORD),
        ({"parent": b"k" * 32}, Flaw.OTHER_RECORD),
        ({"depth": 9}, Flaw.OTHER_RECORD),
        ({"tokens": b"\1" * 32}, Flaw.OTHER_RECORD),
        ({"kind": RecordKind.CHECKPOINT}, Flaw.OTHER_RECORD),
        ({"provenance": Provenance.FAST}, Flaw.OTHER_RECORD),
    ],
)
def test_a_record_that_differs_in_one_field_is_not_the_one_wanted(change: dict[str, object], flaw: Flaw) -> None:
    header, _ = encoded()[0]
    with pytest.raises(RecordFlaw) as caught:
        check_wanted(header, replace(header.head, **change), header.ref, IDENTITY)
    assert caught.value.flaw is flaw


def test_a_record_of_another_place_generation_model_or_machine_is_not_the_one_wanted() -> None:
    header, _ = encoded()[0]
    ref = header.ref
    wrong = [
        (replace(ref, segment=4), IDENTITY, Flaw.MISPLACED),
        (replace(ref, offset=ref.offset + 4096), IDENTITY, Flaw.MISPLACED),
        (replace(ref, generation=ref.generation + 1), IDENTITY, Flaw.MISPLACED),
        (ref, replace(IDENTITY, fingerprint=b"x" * 32), Flaw.FOREIGN),
        (ref, replace(IDENTITY, profile=b"x" * 32), Flaw.FOREIGN),
    ]
    for place, identity, flaw in wrong:
        with pytest.raises(RecordFlaw) as caught:
            check_wanted(header, header.head, place, identity)
        assert caught.value.flaw is flaw


def test_what_was_computed_fast_does_not_ask_for_the_same_machine() -> None:
    header, _ = encoded()[0]
    fast = replace(header, head=replace(header.head, provenance=Provenance.FAST))
    check_wanted(fast, fast.head, fast.ref, replace(IDENTITY, profile=b"x" * 32))


ALL_DTYPES = StateLayout(
    planes=tuple(
        Plane(f"{dtype}.{dim}", dtype, (dim,))
        for dim in (1, 3, 64, 1000)
        for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float32", "int32", "int64", "uint8")
    ),
    slots=(SlotTensor("big", "bfloat16", (1200, 1024)), SlotTensor("zeros", "float32", (512, 512))),
    block_size=4,
)


@pytest.mark.parametrize("fill", ["values", "noise", "zeros"])
@pytest.mark.parametrize("kind", list(RecordKind))
def test_every_coding_gives_back_every_bit(kind: RecordKind, fill: str) -> None:
    identity = Identity(b"f" * 32, b"p" * 32, ALL_DTYPES)
    parts, size = identity.parts(kind), identity.image_bytes(kind)
    head = RecordHead(kind, Provenance.EXACT, "n", b"p" * 32, b"k" * 32, 1, b"")
    noise = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    image = {"values": image_of(head, identity), "noise": noise.data, "zeros": memoryview(bytes(size))}[fill]
    codec = ImageCodec(parts, size)
    tried = codec.trial(image)
    assert (fill == "noise") == (set(tried) == {Coding.RAW}), tried
    rng = random.Random(2)
    for codings in (tried, *(tuple(_any_coding(part.num_bytes, rng) for part in parts) for _ in range(3))):
        out = memoryview(bytearray(codec.most_payload_bytes()))
        coded = codec.encode(image, codings, out)
        assert (len(coded.part_table), len(coded.stripe_table)) == codec.table_bytes(codings)
        target = memoryview(bytearray(b"\x5a" * size))
        codec.decode(coded.part_table, coded.stripe_table, out[: coded.payload_bytes], target)
        assert same_parts(target, image, head, identity)
        assert _gaps(target, parts, size) <= {0x5A}, "padding between parts is left alone"


def test_bf16_values_become_smaller_and_the_rest_does_not_grow() -> None:
    codec = ImageCodec(LAYOUT.block_parts, LAYOUT.block_bytes)
    image = chain(1)[0].image
    codings = codec.trial(image)
    assert codings[:2] == (Coding.SPLIT, Coding.SPLIT)
    wide = StateLayout(tuple(Plane(f"p{i}", "bfloat16", (8, 64)) for i in range(40)), (), 64)
    identity = Identity(b"f" * 32, b"p" * 32, wide)
    head = chain(1, identity=identity)[0].head
    codec = ImageCodec(wide.block_parts, wide.block_bytes)
    image = image_of(head, identity)
    out = memoryview(bytearray(codec.most_payload_bytes()))
    coded = codec.encode(image, codec.trial(image), out)
    assert len(coded.stripe_table) // 16 > 1, "several stripes"
    assert len(image) / coded.payload_bytes > 1.35


def test_a_payload_that_does_not_fit_its_tables_is_refused() -> None:
    codec = ImageCodec(LAYOUT.block_parts, LAYOUT.block_bytes)
    image = chain(1)[0].image
    out = memoryview(bytearray(codec.most_payload_bytes()))
    coded = codec.encode(image, codec.trial(image), out)
    payload = out[: coded.payload_bytes]
    target = memoryview(bytearray(LAYOUT.block_bytes))
    tables = coded.part_table, coded.stripe_table
    wrong = [
        (tables[0][:-8], tables[1], payload),
        (tables[0], tables[1][:-16], payload),
        (b"\x09" + tables[0][1:], tables[1], payload),
        (tables[0][:4] + b"\xff" + tables[0][5:], tables[1], payload),
        (tables[0], b"\x01" + tables[1][1:], payload),
        (*tables, payload[:-1]),
        (*tables, out[: coded.payload_bytes + 1]),
    ]
    for part_table, stripe_table, data in wrong:
        with pytest.raises(CodecError):
            codec.decode(part_table, stripe_table, data, target)


def test_a_frame_that_would_grow_beyond_its_part_is_not_decompressed() -> None:
    codec = ImageCodec(LAYOUT.block_parts, LAYOUT.block_bytes)
    image = chain(1)[0].image
    out = memoryview(bytearray(codec.most_payload_bytes()))
    coded = codec.encode(image, codec.trial(image), out)
    num_parts, packed, frame_bytes, plain = np.frombuffer(coded.stripe_table, np.uint32)
    bomb = zstandard.ZstdCompressor().compress(bytes(512 << 20))
    nameless = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(int(packed)))
    for frame in (bomb, nameless, b"", bomb[:10], bytes(frame_bytes)):
        table = np.array([num_parts, packed, len(frame), plain], np.uint32).tobytes()
        payload = memoryview(frame + bytes(out[frame_bytes : coded.payload_bytes]))
        with pytest.raises(CodecError):
            codec.decode(coded.part_table, table, payload, memoryview(bytearray(LAYOUT.block_bytes)))


def _any_coding(num_bytes: int, rng: random.Random) -> Coding:
    return rng.choice([Coding.RAW, Coding.ZSTD] + [Coding.SPLIT] * (num_bytes % 2 == 0))


def _gaps(image: memoryview, parts: tuple[Part, ...], size: int) -> set[int]:
    covered = np.zeros(size, bool)
    for part in parts:
        covered[part.offset : part.offset + part.num_bytes] = True
    return set(np.frombuffer(image, np.uint8)[~covered].tolist())
