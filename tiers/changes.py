"""Every change to a store, made by one thread, with callers that wait at most for a deadline.

A failed or late write closes the gate: writes are refused until a probe succeeds. Deletes and settings are always
tried, since it is deleting that helps when all is full.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tiers.codec import Coding
from tiers.crew import Crew, Job
from tiers.errors import StoreDegraded, StoreFull
from tiers.files import Step
from tiers.health import Gate
from tiers.index import Index, IndexDamaged
from tiers.keeper import Group, Keeper
from tiers.records import Header, RecordHead, RecordKind, RecordRef
from tiers.segments import Place
from tiers.writing import Encoder, Piece

T = TypeVar("T")

MAX_TOUCHES = 4096  # uses that wait for a transaction


class Changes:
    """The writer thread of a store, and what is handed to it. From any thread."""

    def __init__(self, keeper: Keeper, encoder: Encoder, deadline_s: float) -> None:
        self.gate = Gate(num_failures=1)
        self.num_failures = 0
        self._keeper = keeper
        self._encoder = encoder
        self._deadline_s = deadline_s
        self._crew = Crew("store-write", 1)
        self._write_lock = threading.Lock()  # one write at a time codes into the one buffer
        self._stuck: Job[None] | None = None  # its deadline passed; it may still read from that buffer
        self._new_codings: dict[RecordKind, tuple[Coding, ...]] = {}  # tried, but not yet in the index
        self._touch_lock = threading.Lock()
        self._touched: dict[RecordRef, int] = {}

    def write(self, records: Sequence[tuple[RecordHead, memoryview]], last_use: int) -> list[RecordRef]:
        """See `DiskStore.write`."""
        with self._write_lock:
            if self._stuck is not None and not self._stuck.wait(0):
                raise StoreDegraded("an earlier write has not come back from the disk")
            if not self.gate.admits(time.monotonic()):
                raise StoreDegraded(self.gate.view(time.monotonic()).reason)
            self._new_codings |= self._encoder.try_codings(records)
            place = self._keeper.segments.next_place(self._encoder.most_bytes(records))
            headers: list[Header] = []
            num_bytes = 0
            for piece in self._encoder.pieces(place, records):
                headers += piece.headers
                num_bytes = piece.at + len(piece.data)
                self._append(place, piece, len(headers))
            group = Group(place, num_bytes, tuple(headers), dict(self._new_codings), last_use)
            self._write_part(lambda job: self._keeper.commit(job, group))
            self._new_codings.clear()
            self.gate.succeeded()
            return [header.ref for header in headers]

    def ask(self, work: Callable[[], T]) -> T:
        """Has the writer do something and waits. Where it is late it may still happen.

        Raises:
            StoreDegraded: the index fails or is late.
        """

        def handed(_: Job[T]) -> T:
            self._hand_over()
            return work()

        job = self._crew.submit(handed)
        if not job.wait(self._deadline_s):
            raise self._failed(f"the index took longer than {self._deadline_s:g} s")
        try:
            return job.result()
        except (OSError, IndexDamaged) as error:
            raise self._failed(str(error)) from error

    def set(self, work: Callable[[Index], T]) -> T:
        """Changes the index in a transaction; otherwise as `ask`."""

        def change() -> T:
            with self._keeper.index.transaction(Step.SETTING_COMMITTING):
                result = work(self._keeper.index)
            self._keeper.refresh()
            return result

        return self.ask(change)

    def later(self, work: Callable[[], object]) -> None:
        """Has the writer do something that nobody waits for."""
        self._crew.submit(lambda _: work())

    def touch(self, refs: Sequence[RecordRef], last_use: int) -> None:
        """Uses to be kept with the next change, or when there are many."""
        with self._touch_lock:
            self._touched.update(dict.fromkeys(refs, last_use))
            many = len(self._touched) >= MAX_TOUCHES
        if many:
            self.later(self._flush)

    def close(self) -> bool:
        """Finishes what is queued; False where the disk does not let the thread go."""
        self.later(self._flush)
        return self._crew.close(self._deadline_s)

    def _append(self, place: Place, piece: Piece, num_records: int) -> None:
        def work(job: Job[None]) -> None:
            try:
                self._keeper.append(place, piece.at, piece.data, num_records)
            except StoreFull:
                if piece.at:
                    self._keeper.abandon()
                raise
            if not job.commit():
                self._keeper.abandon()

        self._write_part(work)

    def _write_part(self, work: Callable[[Job[None]], None]) -> None:
        """Has the writer do a part of a write; whatever goes wrong abandons the group and closes the gate."""

        def guarded(job: Job[None]) -> None:
            self._hand_over()
            try:
                work(job)
            except StoreFull:
                raise  # not a failure: the segment is sound
            except BaseException:
                self._keeper.abandon()
                raise

        job = self._crew.submit(guarded)
        # Past its point of no return a job is committing: it gets as long again. If even that is not enough, the
        # records may turn out to be there when the directory is next opened.
        if not job.wait(self._deadline_s) and (job.leave() or not job.wait(self._deadline_s)):
            self._stuck = job
            raise self._failed(f"a write took longer than {self._deadline_s:g} s")
        try:
            job.result()
        except (OSError, IndexDamaged) as error:
            raise self._failed(str(error)) from error

    def _failed(self, reason: str) -> StoreDegraded:
        self.gate.failed(time.monotonic(), reason)
        self.num_failures += 1
        return StoreDegraded(reason)

    def _flush(self) -> None:
        self._hand_over()
        self._keeper.flush()

    def _hand_over(self) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._keeper.touch(touched)
