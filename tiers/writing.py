"""Images to groups of records: coded on the caller's thread into one buffer, handed on piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiers.codec import Coding, ImageCodec
from tiers.files import aligned_buffer, round_up
from tiers.records import (
    Header,
    Identity,
    RecordHead,
    RecordKind,
    RecordRef,
    checksum,
    header_bytes,
    pack_header,
)
from tiers.segments import Place

PIECE_BYTES = 16 << 20  # written at a time, or one record where that is longer


@dataclass(frozen=True, slots=True)
class Piece:
    """Some records of a group, coded: bytes of the group from `at` on, in a buffer that the next piece will reuse."""

    at: int
    data: memoryview
    headers: tuple[Header, ...]


class Encoder:
    """Turns images into records. One thread at a time. `codings` are those that trials have found so far."""

    def __init__(self, identity: Identity, generation: int) -> None:
        self.codings: dict[RecordKind, tuple[Coding, ...]] = {}
        self._identity = identity
        self._codecs = {kind: ImageCodec(identity.parts(kind), identity.image_bytes(kind)) for kind in RecordKind}
        self._generation = generation
        self._buffer: memoryview | None = None

    def most_bytes(self, records: Sequence[tuple[RecordHead, memoryview]]) -> int:
        """No group of these records is longer."""
        return sum(self._most_record_bytes(head) for head, _ in records)

    def try_codings(self, records: Sequence[tuple[RecordHead, memoryview]]) -> dict[RecordKind, tuple[Coding, ...]]:
        """Tries each kind that has not been tried on its first image; what was found."""
        found: dict[RecordKind, tuple[Coding, ...]] = {}
        for head, image in records:
            if head.kind not in self.codings:
                self.codings[head.kind] = found[head.kind] = self._codecs[head.kind].trial(image)
        return found

    def pieces(self, place: Place, records: Sequence[tuple[RecordHead, memoryview]]) -> Iterator[Piece]:
        """The group's bytes, to be written before the next piece is asked for."""
        at = filled = 0
        headers: list[Header] = []
        buffer = self._room_for(max((self._most_record_bytes(head) for head, _ in records), default=0))
        for head, image in records:
            if filled + self._most_record_bytes(head) > len(buffer):
                yield Piece(at, buffer[:filled], tuple(headers))
                at, filled, headers = at + filled, 0, []
            header = self._encode(head, image, place, at + filled, buffer[filled:])
            headers.append(header)
            filled += header.ref.stored_bytes
        yield Piece(at, buffer[:filled], tuple(headers))

    def _encode(self, head: RecordHead, image: memoryview, place: Place, at: int, out: memoryview) -> Header:
        codec, codings = self._codecs[head.kind], self.codings[head.kind]
        tables = codec.table_bytes(codings)
        begin = header_bytes(head, *tables)
        coded = codec.encode(image, codings, out[begin:])
        assert (len(coded.part_table), len(coded.stripe_table)) == tables
        end = begin + coded.payload_bytes
        stored_bytes = round_up(end)
        self._generation += 1
        header = Header(
            head=head,
            ref=RecordRef(place.segment, place.offset + at, stored_bytes, self._generation),
            group_offset=place.offset,
            fingerprint=self._identity.fingerprint,
            profile=self._identity.profile,
            part_table=coded.part_table,
            stripe_table=coded.stripe_table,
            payload_bytes=coded.payload_bytes,
            payload_checksum=checksum(out[begin:end]),
        )
        out[:begin] = pack_header(header)
        out[end:stored_bytes] = bytes(stored_bytes - end)
        return header

    def _most_record_bytes(self, head: RecordHead) -> int:
        codec = self._codecs[head.kind]
        return round_up(header_bytes(head, *codec.table_bytes()) + codec.most_payload_bytes())

    def _room_for(self, record_bytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < record_bytes:
            self._buffer = aligned_buffer(max(record_bytes, PIECE_BYTES))
        return self._buffer
