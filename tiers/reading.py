"""Reads of many records by many threads: neighbours in one request to the disk, decoding beside the next request.

Nothing is decoded before header, place, generation, identity and payload checksum are right, and once `read` has
returned nothing is written to any target any more.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from tiers.codec import CodecError, ImageCodec
from tiers.crew import Crew, Job
from tiers.files import SECTOR_BYTES, aligned_buffer
from tiers.records import (
    Flaw,
    Header,
    Identity,
    RecordFlaw,
    RecordHead,
    RecordKind,
    RecordRef,
    check_payload,
    check_wanted,
    parse_header,
)
from tiers.segments import Segments

RUN_BYTES = 4 << 20  # neighbours are read together up to this; more gains nothing (FORMAT.md)
GAP_BYTES = 64 << 10  # read and thrown away rather than ending a run

Request: TypeAlias = tuple[RecordHead, RecordRef, memoryview]
OnFree: TypeAlias = Callable[[list[RecordRef]], None]  # must not wait
_ReadJob: TypeAlias = Job[list[RecordFlaw | None]]


@dataclass(frozen=True, slots=True)
class _Run:
    """Requests whose records lie side by side: bytes [start, end) of a segment."""

    segment: int
    start: int
    end: int
    numbers: tuple[int, ...]  # of the requests


class ReadFence:
    """Which records are being read. A doomed record is erased only after its last reader."""

    def __init__(self) -> None:
        self._readers: Counter[RecordRef] = Counter()
        self._doomed: set[RecordRef] = set()
        self._lock = threading.Lock()

    def enter(self, refs: Iterable[RecordRef]) -> None:
        """Readers come."""
        with self._lock:
            self._readers.update(refs)

    def leave(self, refs: Iterable[RecordRef]) -> list[RecordRef]:
        """Readers go; the doomed records that nobody reads any more."""
        with self._lock:
            free: list[RecordRef] = []
            for ref in refs:
                self._readers[ref] -= 1
                if not self._readers[ref]:
                    del self._readers[ref]
                    if ref in self._doomed:
                        self._doomed.remove(ref)
                        free.append(ref)
            return free

    def doom(self, refs: Iterable[RecordRef]) -> list[RecordRef]:
        """Records are deleted; those that nobody reads."""
        with self._lock:
            wanted = list(refs)
            self._doomed.update(ref for ref in wanted if ref in self._readers)
            return [ref for ref in wanted if ref not in self._readers]

    @property
    def num_readers(self) -> int:
        """Reads in progress."""
        with self._lock:
            return self._readers.total()


class Reader:
    """The read path. `stall_s`: a disk that finishes nothing for so long is late."""

    def __init__(self, segments: Segments, identity: Identity, fence: ReadFence, crew: Crew, stall_s: float) -> None:
        self.crew = crew
        self.fence = fence
        self._segments = segments
        self._identity = identity
        self._codecs = {kind: ImageCodec(identity.parts(kind), identity.image_bytes(kind)) for kind in RecordKind}
        self._stall_s = stall_s
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()  # one for each thread
        for _ in range(crew.num_threads):
            self._buffers.put(aligned_buffer(RUN_BYTES))
        self._large_lock = threading.Lock()
        self._large: memoryview | None = None  # one for records longer than a run

    def read(self, requests: Sequence[Request], timeout_s: float | None, on_free: OnFree) -> list[RecordFlaw | None]:
        """One answer a request, in order. `on_free` gets doomed records whose last reader has gone."""
        answers: list[RecordFlaw | None] = [None] * len(requests)
        jobs: list[tuple[_Run, _ReadJob]] = []
        for run in plan_runs([ref for _, ref, _ in requests]):
            chosen = [requests[number] for number in run.numbers]
            self.fence.enter(ref for _, ref, _ in chosen)
            jobs.append((run, self.crew.submit(lambda job, r=run, c=chosen: self._read_run(job, r, c, on_free))))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for run, job in jobs:
            if self._wait(job, deadline):
                outcome = job.result()
            else:
                outcome = [RecordFlaw(Flaw.LATE, "the disk did not answer in time") for _ in run.numbers]
            for number, answer in zip(run.numbers, outcome, strict=True):
                answers[number] = answer
        return answers

    def _wait(self, job: _ReadJob, deadline: float | None) -> bool:
        """True when the job is done. One that is queued may wait while anything moves; one that runs, for `stall_s`."""
        while True:
            finished, was_started, now = self.crew.finished, job.is_started, time.monotonic()
            left_s = self._stall_s if deadline is None else min(self._stall_s, deadline - now)
            if job.wait(max(0.0, left_s)):
                return True
            is_over = deadline is not None and time.monotonic() >= deadline
            if not is_over and not was_started and self.crew.finished != finished:
                continue
            if job.leave():
                return False
            job.wait(None)  # it is decoding, which takes no time that a disk could stretch
            return True

    def _read_run(self, job: _ReadJob, run: _Run, requests: list[Request], on_free: OnFree) -> list[RecordFlaw | None]:
        try:
            if job.is_left:
                return []
            num_bytes = run.end - run.start
            if num_bytes <= RUN_BYTES:
                buffer = self._buffers.get()
                try:
                    return self._fill(job, run, requests, buffer[:num_bytes])
                finally:
                    self._buffers.put(buffer)
            with self._large_lock:
                if self._large is None or len(self._large) < num_bytes:
                    self._large = aligned_buffer(num_bytes)
                return self._fill(job, run, requests, self._large[:num_bytes])
        finally:
            free = self.fence.leave(ref for _, ref, _ in requests)
            if free:
                on_free(free)

    def _fill(self, job: _ReadJob, run: _Run, requests: list[Request], buffer: memoryview) -> list[RecordFlaw | None]:
        try:
            got = self._segments.read(run.segment, run.start, buffer)
        except FileNotFoundError:
            return [RecordFlaw(Flaw.MISSING, "the segment is gone") for _ in requests]
        except OSError as error:
            return [RecordFlaw(Flaw.UNREADABLE, error.strerror or str(error)) for _ in requests]
        checked = [self._check(head, ref, buffer[:got], ref.offset - run.start) for head, ref, _ in requests]
        if not job.commit():
            return []
        return [self._decode(item, target) for item, (_, _, target) in zip(checked, requests, strict=True)]

    def _check(
        self, head: RecordHead, ref: RecordRef, data: memoryview, at: int
    ) -> tuple[Header, memoryview] | RecordFlaw:
        """Header and payload of one record, or why it must not be used."""
        try:
            if at + ref.stored_bytes > len(data):
                raise RecordFlaw(Flaw.MISSING, "the segment ends before the record")
            record = data[at : at + ref.stored_bytes]
            header = parse_header(record)
            check_wanted(header, head, ref, self._identity)
            payload = record[header.num_bytes : header.num_bytes + header.payload_bytes]
            check_payload(header, payload)
        except RecordFlaw as flaw:
            return flaw
        return header, payload

    def _decode(self, checked: tuple[Header, memoryview] | RecordFlaw, target: memoryview) -> RecordFlaw | None:
        if isinstance(checked, RecordFlaw):
            return checked
        header, payload = checked
        try:
            self._codecs[header.head.kind].decode(header.part_table, header.stripe_table, payload, target)
        except CodecError as error:
            return RecordFlaw(Flaw.DAMAGED, f"payload: {error}")
        return None


def plan_runs(refs: Sequence[RecordRef]) -> list[_Run]:
    """Groups records that lie side by side, in order of place."""
    runs: list[_Run] = []
    order = sorted(range(len(refs)), key=lambda number: (refs[number].segment, refs[number].offset))
    for number in order:
        ref = refs[number]
        assert ref.offset % SECTOR_BYTES == 0
        assert ref.stored_bytes % SECTOR_BYTES == 0
        last = runs[-1] if runs else None
        joins = (
            last is not None
            and last.segment == ref.segment
            and ref.offset - last.end <= GAP_BYTES
            and max(last.end, ref.end) - last.start <= RUN_BYTES
        )
        if last is not None and joins:
            runs[-1] = _Run(last.segment, last.start, max(last.end, ref.end), (*last.numbers, number))
        else:
            runs.append(_Run(ref.segment, ref.offset, ref.end, (number,)))
    return runs
