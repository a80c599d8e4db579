"""Walks the records of a segment by their headers, and checks payloads without decoding them."""

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from tiers.files import SECTOR_BYTES, aligned_buffer, round_up
from tiers.records import MAGIC, Flaw, Header, RecordFlaw, RecordRef, check_place, parse_header, read_prefix
from tiers.segments import Segments

CHUNK_BYTES = 4 << 20
HEAD_BYTES = 8 << 10  # read for a header at first


@dataclass(frozen=True, slots=True)
class Found:
    """Something in a segment: a record with a good header for this place, or a flaw where one should be."""

    segment: int
    offset: int
    stored_bytes: int  # 0 where it is not known
    header: Header | None
    flaw: RecordFlaw | None


class Scanner:
    """Reads segments in order through one buffer. One thread."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._buffer = aligned_buffer(CHUNK_BYTES)

    def records(self, segment: int, start: int, end: int) -> Iterator[Found]:
        """Everything in [start, end), which are sector boundaries. Erased ranges are passed over; OSError ends it."""
        at = start
        while at < end:
            try:
                header = self.header(segment, at)
            except RecordFlaw as flaw:
                if flaw.flaw is not Flaw.ERASED:
                    yield Found(segment, at, flaw.stored_bytes, None, flaw)
                whole = round_up(flaw.stored_bytes)
                at = at + whole if whole else self._next_magic(segment, at + SECTOR_BYTES, end)
                continue
            if header.ref.end > end:
                cut = RecordFlaw(Flaw.MISSING, "the segment ends before the record")
                yield Found(segment, at, 0, None, cut)
                at = self._next_magic(segment, at + SECTOR_BYTES, end)
                continue
            yield Found(segment, at, header.ref.stored_bytes, header, None)
            at = header.ref.end

    def header(self, segment: int, offset: int) -> Header:
        """The header at this place, written for this place.

        Raises:
            RecordFlaw: there is none.
            OSError: the disk fails; a missing file is a flaw.
        """
        try:
            got = self._segments.read(segment, offset, self._buffer[:HEAD_BYTES])
            num_bytes, _ = read_prefix(self._buffer[:got])
            if num_bytes > got:
                got = self._segments.read(segment, offset, self._buffer[: round_up(num_bytes)])
        except FileNotFoundError:
            raise RecordFlaw(Flaw.MISSING, "the segment is gone") from None
        header = parse_header(self._buffer[:got])
        check_place(header, segment, offset)
        return header

    def check_payload(self, header: Header) -> None:
        """Raises RecordFlaw where the payload is not the one of the header; OSError where the disk fails."""
        digest = xxhash.xxh3_128()
        ref = header.ref
        begin, end = header.num_bytes, header.num_bytes + header.payload_bytes  # within the record
        for at in range(0, ref.stored_bytes, CHUNK_BYTES):
            wanted = min(CHUNK_BYTES, ref.stored_bytes - at)
            if self._segments.read(ref.segment, ref.offset + at, self._buffer[:wanted]) < wanted:
                raise RecordFlaw(Flaw.MISSING, "the segment ends before the record", ref.stored_bytes)
            digest.update(self._buffer[max(0, begin - at) : max(0, min(wanted, end - at))])
        if digest.digest() != header.payload_checksum:
            raise RecordFlaw(Flaw.DAMAGED, "payload checksum", ref.stored_bytes)

    def check_record(self, ref: RecordRef) -> Header:
        """Header and payload of a record that should be there. Raises as `header` and `check_payload`."""
        header = self.header(ref.segment, ref.offset)
        if header.ref != ref:
            raise RecordFlaw(Flaw.MISPLACED, f"generation {header.ref.generation}, not {ref.generation}")
        self.check_payload(header)
        return header

    def _next_magic(self, segment: int, start: int, end: int) -> int:
        """The next sector that looks like a record, or the end."""
        at = start
        while at < end:
            got = self._segments.read(segment, at, self._buffer[: min(CHUNK_BYTES, end - at)])
            if not got:
                return end
            for sector in range(0, got, SECTOR_BYTES):
                if bytes(self._buffer[sector : sector + len(MAGIC)]) == MAGIC:
                    return at + sector
            at += round_up(got)
        return end
