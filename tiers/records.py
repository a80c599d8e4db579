"""What a record on disk says of itself, byte for byte (FORMAT.md), and the values that name one.

A record is a header, a payload right after it, and zeros up to the next sector. The header holds everything that
decides whether the payload may be used, under a checksum of its own; a record that is moved, cut, flipped or left over
does not parse, or does not agree with what its reader expects.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import xxhash

from tiers.files import SECTOR_BYTES, round_up
from tiers.keys import Provenance
from tiers.layout import Part, StateLayout

MAGIC = b"DCRECORD"
VERSION = 1
MAX_HEADER_BYTES = 1 << 20
CHECKSUM_BYTES = 16

# magic, version, header bytes, stored bytes, checksum of these: the same in every version, so that a store can skip,
# count and remove what it cannot read.
_PREFIX = struct.Struct("<8sHxxIQ8s")
# kind, provenance, namespace bytes, depth, token bytes, part table bytes, stripe table bytes, payload bytes,
# generation, segment, offset, offset of the group, fingerprint, profile, parent, key, payload checksum
_BODY = struct.Struct("<BBHIIIIQQQQQ32s32s32s32s16s")
_PROVENANCES = (Provenance.EXACT, Provenance.FAST)


class RecordKind(IntEnum):
    """What a record holds. The numbers are on disk."""

    BLOCK = 1  # the rows of all planes for one block
    CHECKPOINT = 2  # all slot tensors after the last token of the block whose key it has


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose bytes these are. `fingerprint`: can they be read; `profile`: would this machine compute the same."""

    fingerprint: bytes  # 32 bytes
    profile: bytes  # 32 bytes
    layout: StateLayout

    def parts(self, kind: RecordKind) -> tuple[Part, ...]:
        """The parts of an image of this kind."""
        return self.layout.block_parts if kind is RecordKind.BLOCK else self.layout.slot_parts

    def image_bytes(self, kind: RecordKind) -> int:
        """Size of an image of this kind, padding included."""
        return self.layout.block_bytes if kind is RecordKind.BLOCK else self.layout.slot_bytes


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What is stored, apart from the bytes."""

    kind: RecordKind
    provenance: Provenance
    namespace: str
    parent: bytes  # key of the block above; the root's key for a first block
    key: bytes  # the block's; a checkpoint has the key of the block after whose last token it stands
    depth: int  # in blocks
    tokens: bytes  # the block's token ids as little-endian int32; empty for a checkpoint


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Where a record lies. The generation is never used twice in a directory, so a stale reference finds nothing."""

    segment: int
    offset: int
    stored_bytes: int  # header and padding included; what the quota is charged
    generation: int

    @property
    def end(self) -> int:
        """Where the next record may begin."""
        return self.offset + self.stored_bytes


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A committed record. `last_use` is whatever clock the caller of `touch` has."""

    head: RecordHead
    ref: RecordRef
    last_use: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed or to be written header. Part and stripe table are the codec's."""

    head: RecordHead
    ref: RecordRef
    group_offset: int  # where the records begin that were committed together with this one
    fingerprint: bytes
    profile: bytes
    part_table: bytes
    stripe_table: bytes
    payload_bytes: int
    payload_checksum: bytes

    @property
    def num_bytes(self) -> int:
        """Of the header alone; the payload follows at once."""
        return header_bytes(self.head, len(self.part_table), len(self.stripe_table))


class Flaw(StrEnum):
    """Why bytes are not the record that was expected."""

    MISSING = "missing"  # no file, or it ends before the record
    ERASED = "erased"  # no header here
    DAMAGED = "damaged"  # a checksum or a length is wrong
    MISPLACED = "misplaced"  # a good header, written for another place or another generation
    FOREIGN = "foreign"  # another model, layout or numerics profile
    OTHER_VERSION = "other version"
    OTHER_RECORD = "other record"  # key, tokens, namespace or another field differs from what was asked for
    UNREADABLE = "unreadable"  # the system says so
    LATE = "late"  # the disk does not answer in time
    REFUSED = "refused"  # not tried: the disk failed lately; the record may be good
    QUARANTINED = "quarantined"  # not tried: an earlier read found it flawed


class RecordFlaw(Exception):
    """Why a record cannot be had: to the request that wanted it, a miss.

    `stored_bytes` is its length where the prefix could be trusted, else 0.
    """

    def __init__(self, flaw: Flaw, detail: str, stored_bytes: int = 0) -> None:
        super().__init__(f"{flaw.value}: {detail}")
        self.flaw = flaw
        self.stored_bytes = stored_bytes


def is_refusal(flaw: Exception | None) -> bool:
    """The disk was not asked: nothing is known against the record."""
    return isinstance(flaw, RecordFlaw) and flaw.flaw is Flaw.REFUSED


def checksum(data: memoryview | bytes) -> bytes:
    """xxh3-128."""
    return xxhash.xxh3_128_digest(data)


def header_bytes(head: RecordHead, part_table_bytes: int, stripe_table_bytes: int) -> int:
    """Length of a header with tables of these sizes."""
    variable = len(head.namespace.encode()) + len(head.tokens) + part_table_bytes + stripe_table_bytes
    return _PREFIX.size + _BODY.size + variable + CHECKSUM_BYTES


def pack_header(header: Header) -> bytes:
    """The header's bytes."""
    head, ref = header.head, header.ref
    namespace = head.namespace.encode()
    num_bytes = header.num_bytes
    assert num_bytes <= MAX_HEADER_BYTES
    assert ref.stored_bytes == round_up(num_bytes + header.payload_bytes)
    assert ref.offset % SECTOR_BYTES == 0
    body = _BODY.pack(
        head.kind,
        _PROVENANCES.index(head.provenance),
        len(namespace),
        head.depth,
        len(head.tokens),
        len(header.part_table),
        len(header.stripe_table),
        header.payload_bytes,
        ref.generation,
        ref.segment,
        ref.offset,
        header.group_offset,
        header.fingerprint,
        header.profile,
        head.parent,
        head.key,
        header.payload_checksum,
    )
    packed = b"".join(
        (
            _pack_prefix(num_bytes, ref.stored_bytes),
            body,
            namespace,
            head.tokens,
            header.part_table,
            header.stripe_table,
        )
    )
    return packed + checksum(packed)


def parse_header(data: memoryview) -> Header:
    """The header at the beginning of `data`, which must hold all of it (see `read_prefix`).

    Raises:
        RecordFlaw: there is none, it is damaged, or of another version.
    """
    num_bytes, stored_bytes = read_prefix(data)
    if num_bytes > len(data):
        raise RecordFlaw(Flaw.DAMAGED, "the header is cut", stored_bytes)
    if checksum(data[: num_bytes - CHECKSUM_BYTES]) != bytes(data[num_bytes - CHECKSUM_BYTES : num_bytes]):
        raise RecordFlaw(Flaw.DAMAGED, "header checksum", stored_bytes)
    (
        kind,
        provenance,
        namespace_bytes,
        depth,
        token_bytes,
        part_table_bytes,
        stripe_table_bytes,
        payload_bytes,
        generation,
        segment,
        offset,
        group_offset,
        fingerprint,
        profile,
        parent,
        key,
        payload_checksum,
    ) = _BODY.unpack_from(data, _PREFIX.size)
    at = _PREFIX.size + _BODY.size
    lengths = (namespace_bytes, token_bytes, part_table_bytes, stripe_table_bytes)
    if at + sum(lengths) + CHECKSUM_BYTES != num_bytes or round_up(num_bytes + payload_bytes) != stored_bytes:
        raise RecordFlaw(Flaw.DAMAGED, "lengths do not add up", stored_bytes)
    fields: list[bytes] = []
    for length in lengths:
        fields.append(bytes(data[at : at + length]))
        at += length
    namespace, tokens, part_table, stripe_table = fields
    try:
        how = _PROVENANCES[int(provenance)]
        head = RecordHead(RecordKind(kind), how, namespace.decode(), parent, key, depth, tokens)
    except (ValueError, IndexError):
        raise RecordFlaw(Flaw.DAMAGED, "a field has no meaning", stored_bytes) from None
    ref = RecordRef(segment, offset, stored_bytes, generation)
    return Header(
        head, ref, group_offset, fingerprint, profile, part_table, stripe_table, payload_bytes, payload_checksum
    )


def read_prefix(data: memoryview) -> tuple[int, int]:
    """Header bytes and stored bytes of the record that begins here.

    Raises:
        RecordFlaw: none begins here, or it is of another version; then its stored bytes are in the exception.
    """
    if len(data) < _PREFIX.size:
        raise RecordFlaw(Flaw.MISSING, "nothing is here")
    magic, version, num_bytes, stored_bytes, check = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RecordFlaw(Flaw.ERASED if not any(data[: _PREFIX.size]) else Flaw.DAMAGED, "no record begins here")
    if check != _prefix_checksum(data[: _PREFIX.size - len(check)]):
        raise RecordFlaw(Flaw.DAMAGED, "prefix checksum")
    if version != VERSION:
        raise RecordFlaw(Flaw.OTHER_VERSION, f"version {version}, not {VERSION}", stored_bytes)
    if not _PREFIX.size + _BODY.size + CHECKSUM_BYTES <= num_bytes <= min(MAX_HEADER_BYTES, stored_bytes):
        raise RecordFlaw(Flaw.DAMAGED, "header length")
    return num_bytes, stored_bytes


def check_place(header: Header, segment: int, offset: int) -> None:
    """Raises RecordFlaw where the header was written for another place."""
    if (header.ref.segment, header.ref.offset) != (segment, offset):
        where = f"written for segment {header.ref.segment} at {header.ref.offset}"
        raise RecordFlaw(Flaw.MISPLACED, where, header.ref.stored_bytes)


def check_payload(header: Header, payload: memoryview) -> None:
    """Raises RecordFlaw where the payload is not the one that the header was written for."""
    if len(payload) != header.payload_bytes or checksum(payload) != header.payload_checksum:
        raise RecordFlaw(Flaw.DAMAGED, "payload checksum", header.ref.stored_bytes)


def check_wanted(header: Header, head: RecordHead, ref: RecordRef, identity: Identity) -> None:
    """Raises RecordFlaw unless the header is, in every field, the record that a reader asked for and may use."""
    check_place(header, ref.segment, ref.offset)
    if header.ref.generation != ref.generation:
        raise RecordFlaw(Flaw.MISPLACED, f"generation {header.ref.generation}, not {ref.generation}")
    if header.fingerprint != identity.fingerprint:
        raise RecordFlaw(Flaw.FOREIGN, "another model or layout")
    if not is_readable(header.head.provenance, header.profile, identity):
        raise RecordFlaw(Flaw.FOREIGN, "another numerics profile")
    if header.head != head or header.ref != ref:
        raise RecordFlaw(Flaw.OTHER_RECORD, "the header differs from what was asked for")


def is_readable(provenance: Provenance, profile: bytes, identity: Identity) -> bool:
    """With equal fingerprints: what was computed exactly also wants the same numerics; what was not does not."""
    return provenance is Provenance.FAST or profile == identity.profile


def _pack_prefix(num_bytes: int, stored_bytes: int) -> bytes:
    bare = _PREFIX.pack(MAGIC, VERSION, num_bytes, stored_bytes, b"")
    unchecked = bare[: -len(_prefix_checksum(b""))]
    return unchecked + _prefix_checksum(unchecked)


def _prefix_checksum(data: memoryview | bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)
