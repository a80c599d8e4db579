"""The disk tier's store: records of blocks and checkpoints in one directory, durable, checked, under a quota.

`write`, `read` and `delete` may be called from any thread and wait at most for their deadlines. All changes are made by
one thread (keeper.py), reads by a few others (reading.py). A disk that fails closes a gate: writes, or reads as well,
are refused until a probe succeeds. Nothing here knows models or sequences; FORMAT.md says what is on disk.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tiers.changes import Changes
from tiers.crew import Crew
from tiers.errors import StoreLocked, StoreUnusable
from tiers.files import LOCK, OsFiles, Step
from tiers.health import Gate, StoreHealth, StoreState
from tiers.index import Index, IndexDamaged, Pin, Quota, TimeToLive, file_names
from tiers.keeper import DELETE_BATCH, Keeper
from tiers.reading import RUN_BYTES, Reader, Request
from tiers.records import Flaw, Identity, RecordFlaw, RecordHead, RecordKind, RecordRef, StoredRecord
from tiers.recovery import Recovery, open_index, recover
from tiers.scan import Scanner
from tiers.segments import FOLDER, Segments
from tiers.writing import PIECE_BYTES, Encoder

FAILING = (Flaw.LATE, Flaw.UNREADABLE)  # the disk's flaws rather than the record's


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How long to wait, and how much to do at a time."""

    write_deadline_s: float = 30.0  # for one piece of a write, its commit or a batch of deletes
    read_stall_s: float = 5.0  # a disk that finishes no read for so long is late
    num_read_threads: int = min(8, max(4, os.cpu_count() or 4))  # some wait for the disk while others decode
    segment_bytes: int | None = None  # None: by what the file system can do


@dataclass(slots=True)
class StoreStats:
    """Counters since the directory was opened."""

    records_written: int = 0
    bytes_written: int = 0
    records_read: int = 0
    bytes_read: int = 0
    records_deleted: int = 0
    read_flaws: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Records in the directory that this identity can not use, by reason."""

    reason: str
    num_records: int
    stored_bytes: int


class DiskStore:
    """An open directory. Make it with `open`."""

    def __init__(self, identity: Identity, keeper: Keeper, recovery: Recovery, limits: StoreLimits) -> None:
        self.identity = identity
        self.recovery = recovery
        encoder = Encoder(identity, max(recovery.last_generation, time.time_ns()))
        self._own_id = _find_identity(keeper.index, identity, encoder)
        keeper.refresh()
        self.stats = StoreStats()
        self._limits = limits
        self._keeper = keeper
        self._on_close = ExitStack()
        self._reader = Reader(
            keeper.segments, identity, keeper.fence, Crew("store-read", limits.num_read_threads), limits.read_stall_s
        )
        self._read_gate = Gate(num_failures=3)
        self._quarantine: set[RecordRef] = set()
        self._stats_lock = threading.Lock()
        self._changes = Changes(keeper, encoder, limits.write_deadline_s)

    @classmethod
    def open(
        cls,
        directory: Path,
        identity: Identity,
        *,
        quota_bytes: int,
        files: OsFiles | None = None,
        limits: StoreLimits | None = None,
    ) -> "DiskStore":
        """Takes the directory, makes it if need be, and makes its index and segments agree.

        Raises:
            StoreLocked: another process has it.
            StoreUnusable: it is something else, or the disk fails.
        """
        files, limits = files or OsFiles(), limits or StoreLimits()
        try:
            _make(directory, files)
            lock_fd = files.lock(directory / LOCK)
        except BlockingIOError:
            raise StoreLocked(f"{directory} is used by another process") from None
        except OSError as error:
            raise StoreUnusable(f"{directory}: {error.strerror or error}") from error
        with ExitStack() as undo:
            undo.callback(files.close, lock_fd)
            try:
                segments = Segments(directory, files, files.abilities(directory), limits.segment_bytes)
                undo.callback(segments.close)
                index, rebuilt = open_index(directory, files)
                undo.callback(index.close)
                recovery = recover(index, segments, files)
                recovery.rebuilt = rebuilt
                keeper = Keeper(directory, files, index, segments, quota_bytes)
                store = cls(identity, keeper, recovery, limits)
            except (OSError, IndexDamaged) as error:
                raise StoreUnusable(f"{directory}: {error}") from error
            store._on_close = undo.pop_all()
            return store

    @property
    def usage_bytes(self) -> int:
        """What du says of the directory."""
        return self._keeper.usage_bytes

    @property
    def quota_bytes(self) -> int:
        """What `usage_bytes` never exceeds; settable."""
        return self._keeper.quota_bytes

    @quota_bytes.setter
    def quota_bytes(self, num_bytes: int) -> None:
        self._keeper.quota_bytes = num_bytes

    @property
    def num_records(self) -> int:
        """Committed records in the directory, of others too."""
        return sum(list(self._keeper.segments.live.values()))

    @property
    def num_quarantined(self) -> int:
        """Records that no read touches any more, and that are not deleted yet."""
        return len(self._quarantine)

    def reserve_bytes(self, num_records: int) -> int:
        """What a write of so many records needs of the quota beside their bytes: index and log."""
        return self._keeper.reserve_bytes(num_records)

    @property
    def buffer_bytes(self) -> int:
        """Memory that reads and writes may take beside the images: for the ledger."""
        largest = max(self.identity.image_bytes(kind) for kind in RecordKind)
        return self._limits.num_read_threads * RUN_BYTES + max(PIECE_BYTES, largest) + largest

    @property
    def health(self) -> StoreHealth:
        """State, reason and the next try."""
        now = time.monotonic()
        reads, writes = self._read_gate.view(now), self._changes.gate.view(now)
        state = StoreState.DEGRADED if not reads.is_open else StoreState.OK if writes.is_open else StoreState.READ_ONLY
        worst = writes if reads.is_open else reads
        return StoreHealth(state, worst.reason, worst.retry_in_s)

    @property
    def takes_writes(self) -> bool:
        """Whether a write would be tried now."""
        view = self._changes.gate.view(time.monotonic())
        return view.is_open or view.retry_in_s == 0

    def entries(self) -> Iterator[StoredRecord]:
        """Every committed record that this identity may use, parents before children. To be read to its end at once.

        Raises:
            StoreUnusable: the index fails.
        """
        try:
            yield from self._keeper.index.entries(self._own_id, self.identity.fingerprint)
        except (OSError, IndexDamaged) as error:
            raise StoreUnusable(str(error)) from error

    def unreadable(self) -> list[Unreadable]:
        """What else is in the directory: other fingerprint, other numerics profile, other version."""
        return self._changes.ask(self._count_unreadable)

    def other_profile_keys(self) -> frozenset[bytes]:
        """Keys of blocks that could be read here, but that this machine would not have computed to the byte."""
        fingerprint = self.identity.fingerprint
        return frozenset(self._changes.ask(lambda: self._keeper.index.other_profile_keys(self._own_id, fingerprint)))

    @property
    def unreadable_bytes(self) -> int:
        """Of all records that `unreadable` tells of."""
        return sum(other.stored_bytes for other in self.unreadable())

    def reclaim_unreadable(self, num_bytes: int) -> list[RecordRef]:
        """Deletes records that this identity can not use, least recently used first, until so many bytes are gone.

        Returns: those records.
        """

        def choose() -> list[RecordRef]:
            chosen: list[RecordRef] = []
            missing_bytes = num_bytes
            for ref, _ in self._keeper.index.unreadable(self._own_id, self.identity.fingerprint):
                if missing_bytes <= 0:
                    break
                chosen.append(ref)
                missing_bytes -= ref.stored_bytes
            return chosen

        chosen = self._changes.ask(choose)
        self.delete(chosen)
        return chosen

    def write(self, records: Sequence[tuple[RecordHead, memoryview]], *, last_use: int = 0) -> list[RecordRef]:
        """Makes images durable, all of them or none, in one commit. A record of the same key is replaced.

        Raises:
            StoreFull: the quota has no room.
            StoreDegraded: the disk fails, is too slow, or failed lately.
        """
        if not records:
            return []
        for head, image in records:
            assert image.nbytes == self.identity.image_bytes(head.kind), "an image of another layout"
            assert len(head.tokens) == (4 * self.identity.layout.block_size if head.kind is RecordKind.BLOCK else 0)
        refs = self._changes.write(records, last_use)
        with self._stats_lock:
            self.stats.records_written += len(refs)
            self.stats.bytes_written += sum(ref.stored_bytes for ref in refs)
        return refs

    def read(self, requests: Sequence[Request], *, timeout_s: float | None = None) -> list[RecordFlaw | None]:
        """Reads, checks and decodes records into writable buffers of their images' sizes; of each, why not.

        A target whose answer is not None may have been written to, but is not written to any more. A record whose
        bytes are at fault is quarantined: no later read touches it, and it is deleted.
        """
        answers: list[RecordFlaw | None] = [None] * len(requests)
        wanted: list[int] = []
        for number, (_, ref, _) in enumerate(requests):
            if ref in self._quarantine:
                answers[number] = RecordFlaw(Flaw.QUARANTINED, "an earlier read found it flawed")
            else:
                wanted.append(number)
        if wanted and not self._read_gate.admits(time.monotonic()):
            for number in wanted:
                answers[number] = RecordFlaw(Flaw.REFUSED, "the disk failed lately")
            wanted = []
        chosen = [requests[number] for number in wanted]
        outcome = self._reader.read(chosen, timeout_s, self._erase_soon)
        for number, answer in zip(wanted, outcome, strict=True):
            answers[number] = answer
        self._judge(chosen, outcome)
        return answers

    def delete(self, refs: Sequence[RecordRef]) -> None:
        """Forgets records durably. Their bytes come back at once, or when their last reader has gone.

        Records that are not there (any more) are no failure; neither is a file that cannot be changed.

        Raises:
            StoreDegraded: the index could not be changed; some may have been deleted.
        """
        for start in range(0, len(refs), DELETE_BATCH):
            batch = refs[start : start + DELETE_BATCH]
            num_gone = self._changes.ask(lambda batch=batch: self._keeper.delete(batch))
            self._quarantine.difference_update(batch)
            with self._stats_lock:
                self.stats.records_deleted += num_gone

    def touch(self, refs: Sequence[RecordRef], last_use: int) -> None:
        """Records were used. Kept with the next change, or when there are many: a crash may lose the latest."""
        self._changes.touch(refs, last_use)

    def pins(self) -> list[Pin]:
        """Every pin that was set, expired ones included."""
        return self._changes.ask(self._keeper.index.pins)

    def set_pin(self, pin: Pin) -> None:
        """Adds a pin or changes when it expires; a time to live of the prefix goes with the same commit."""
        self._changes.set(lambda index: index.set_pin(pin))

    def remove_pin(self, namespace: str, key: bytes) -> bool:
        """Whether there was one."""
        return self._changes.set(lambda index: index.remove_pin(namespace, key))

    def times_to_live(self) -> list[TimeToLive]:
        """When prefixes are to be forgotten."""
        return self._changes.ask(self._keeper.index.times_to_live)

    def set_times_to_live(self, times: Sequence[TimeToLive]) -> None:
        """Adds, changes or removes them in one commit."""
        self._changes.set(lambda index: index.set_times_to_live(times))

    def quotas(self) -> list[Quota]:
        """Bytes by namespace."""
        return self._changes.ask(self._keeper.index.quotas)

    def set_quota(self, quota: Quota) -> None:
        """Adds or changes a namespace's quota."""
        self._changes.set(lambda index: index.set_quota(quota))

    def remove_quota(self, namespace: str) -> bool:
        """Whether there was one."""
        return self._changes.set(lambda index: index.remove_quota(namespace))

    def verify(self, progress: Callable[[int, int], None]) -> list[tuple[RecordRef, RecordFlaw]]:
        """Reads everything that is committed and checks it; quarantines and returns what is not right.

        `progress` is called with bytes done and bytes in all.

        Raises:
            StoreDegraded: the disk fails.
        """
        refs = self._changes.ask(self._keeper.index.refs)
        total, done = sum(ref.stored_bytes for ref in refs), 0
        bad: list[tuple[RecordRef, RecordFlaw]] = []
        scanner = Scanner(self._keeper.segments)
        for ref in refs:
            self._keeper.fence.enter([ref])
            try:
                scanner.check_record(ref)
            except RecordFlaw as flaw:
                bad.append((ref, flaw))
            except OSError as error:
                bad.append((ref, RecordFlaw(Flaw.UNREADABLE, str(error))))
            finally:
                self._erase_soon(self._keeper.fence.leave([ref]))
            done += ref.stored_bytes
            progress(done, total)
        still = set(self._changes.ask(self._keeper.index.refs))  # what was deleted meanwhile was right to be gone
        bad = [(ref, flaw) for ref, flaw in bad if ref in still and flaw.flaw is not Flaw.OTHER_VERSION]
        self._condemn([ref for ref, _ in bad])
        return bad

    def check(self) -> None:
        """Raises AssertionError where the books do not agree. Waits for what is under way."""
        self._changes.ask(self._keeper.flush)
        self._changes.ask(self._keeper.check)

    def close(self) -> None:
        """Ends the threads and gives the directory back. A thread that the disk holds keeps its files open."""
        are_closed = self._reader.crew.close(self._limits.read_stall_s), self._changes.close()
        if all(are_closed):
            with suppress(OSError, IndexDamaged):  # what was committed is safe in the log
                self._on_close.close()

    def _judge(self, requests: Sequence[Request], outcome: Sequence[RecordFlaw | None]) -> None:
        """Counts, quarantines, and tells the gate."""
        refs = [ref for _, ref, _ in requests]
        good = [ref for ref, flaw in zip(refs, outcome, strict=True) if flaw is None]
        with self._stats_lock:
            self.stats.records_read += len(good)
            self.stats.bytes_read += sum(ref.stored_bytes for ref in good)
            self.stats.read_flaws += len(refs) - len(good)
        if good:
            self._read_gate.succeeded()
        elif failing := [flaw for flaw in outcome if flaw is not None and flaw.flaw in FAILING]:
            self._read_gate.failed(time.monotonic(), str(failing[0]))
        at_fault = [(ref, flaw.flaw) for ref, flaw in zip(refs, outcome, strict=True) if flaw is not None]
        # A disk that cannot read now may read tomorrow: such a record is only left alone until then.
        self._quarantine.update(ref for ref, flaw in at_fault if flaw is Flaw.UNREADABLE)
        self._condemn([ref for ref, flaw in at_fault if flaw not in FAILING])

    def _condemn(self, refs: list[RecordRef]) -> None:
        """Quarantines records at once and deletes them soon."""
        if refs:
            self._quarantine.update(refs)
            with self._stats_lock:
                self.stats.quarantined += len(refs)
            self._changes.later(lambda: self._bury(refs))

    def _bury(self, refs: list[RecordRef]) -> None:
        with suppress(OSError, IndexDamaged):  # they stay in quarantine, and charged
            self._keeper.delete(refs)
            self._quarantine.difference_update(refs)

    def _erase_soon(self, refs: list[RecordRef]) -> None:
        if refs:
            self._changes.later(lambda: self._keeper.erase(refs))

    def _count_unreadable(self) -> list[Unreadable]:
        found: dict[str, list[int]] = {}
        for ref, reason in self._keeper.index.unreadable(self._own_id, self.identity.fingerprint):
            found.setdefault(reason, []).append(ref.stored_bytes)
        return [Unreadable(reason, len(sizes), sum(sizes)) for reason, sizes in sorted(found.items())]


def _find_identity(index: Index, identity: Identity, encoder: Encoder) -> int:
    """Its row in the index; what earlier trials found goes to the encoder. Before any thread runs."""
    with index.transaction(Step.SETTING_COMMITTING):
        own_id = index.identity_id(identity.fingerprint, identity.profile)
    for kind in RecordKind:
        codings = index.codings(own_id, kind)
        if codings is not None and len(codings) == len(identity.parts(kind)):
            encoder.codings[kind] = codings
    return own_id


def _make(directory: Path, files: OsFiles) -> None:
    """The directory and its folder of segments. OSError where it holds something else."""
    files.make_directory(directory)
    names = set(files.names(directory))
    if FOLDER not in names:
        strange = sorted(names - {LOCK, *file_names()})
        if strange:
            raise OSError(f"it holds something else ({strange[0]})")
        files.make_directory(directory / FOLDER)
        files.sync_directory(directory)
        files.sync_directory(directory.parent)
