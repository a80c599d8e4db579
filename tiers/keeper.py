"""Index and segments together: the order of a write, the order of a delete, and what both cost of the quota.

Everything here runs on one thread, the store's writer, but for `usage_bytes`, `fence` and `erase_soon`.

Write: data, data sync, directory sync for a new segment, index commit. Delete: index commit, readers gone, erase.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiers.codec import Coding
from tiers.crew import Job
from tiers.errors import StoreFull
from tiers.files import LOCK, OsFiles, Step
from tiers.index import Index, file_names, most_growth_bytes
from tiers.reading import ReadFence
from tiers.records import Header, RecordKind, RecordRef
from tiers.segments import FOLDER, Place, Segments

DELETE_BATCH = 64  # records a transaction


@dataclass(frozen=True, slots=True)
class Group:
    """Records that are committed together: their bytes from `place` on are written."""

    place: Place
    num_bytes: int
    headers: tuple[Header, ...]
    new_codings: dict[RecordKind, tuple[Coding, ...]]  # of trials that this group made
    last_use: int


class Keeper:
    """The writer's side of a store."""

    def __init__(self, directory: Path, files: OsFiles, index: Index, segments: Segments, quota_bytes: int) -> None:
        self.index = index
        self.segments = segments
        self.fence = ReadFence()
        self.quota_bytes = quota_bytes
        self.num_erase_failures = 0
        self.usage_bytes = 0
        self._others = tuple(directory / name for name in ("", LOCK, FOLDER, *file_names()))
        self._log = directory / file_names()[1]
        self._files = files
        self._touched: dict[RecordRef, int] = {}
        self._erased: list[RecordRef] = []  # to be forgotten by the next transaction
        self._unlinked: list[int] = []
        self.refresh()

    def reserve_bytes(self, num_records: int) -> int:
        """What the quota must have left beside the records: index and WAL after this write and a batch of deletes."""
        wal_bytes, index_bytes = most_growth_bytes(max(num_records, DELETE_BATCH))
        return max(0, wal_bytes - self._files.allocated_bytes(self._log)) + index_bytes

    def append(self, place: Place, at: int, piece: memoryview, num_records: int) -> None:
        """Writes a piece of a group, after which the group has so many records.

        Raises:
            StoreFull: the quota has no room for it. A group without a piece has left nothing behind; any other, and
                any after an OSError, is to be abandoned.
        """
        missing = self.usage_bytes + len(piece) + self.reserve_bytes(num_records) - self.quota_bytes
        if missing > 0:
            raise StoreFull(missing)
        try:
            self.segments.append(place, at, piece)
        finally:
            self.refresh()

    def commit(self, job: Job[None], group: Group) -> None:
        """Makes a group durable, then known. Where the caller has left before that, it is abandoned."""
        self.segments.sync(group.num_bytes)
        if not job.commit():
            self.abandon()
            return
        with self.index.transaction(Step.WRITE_COMMITTING):
            self._catch_up()
            replaced = self.index.add(group.headers, group.last_use)
            self.index.set_end(group.place.segment, group.place.offset + group.num_bytes)
            for kind, codings in group.new_codings.items():
                header = group.headers[0]
                self.index.remember_codings(self.index.identity_id(header.fingerprint, header.profile), kind, codings)
        self._caught_up()
        self.segments.committed(group.num_bytes, len(group.headers))
        self._files.reached(Step.WRITE_COMMITTED)
        self._retire(replaced)
        self.refresh()

    def abandon(self) -> None:
        """Gives up the group that is being written."""
        self.segments.abandon()
        self.refresh()

    def delete(self, refs: Sequence[RecordRef]) -> int:
        """Deletes records, and erases those that nobody reads; how many there were."""
        num_gone = 0
        for start in range(0, len(refs), DELETE_BATCH):
            with self.index.transaction(Step.DELETE_COMMITTING):
                self._catch_up()
                gone = self.index.delete(refs[start : start + DELETE_BATCH])
            self._caught_up()
            self._files.reached(Step.DELETE_COMMITTED)
            self._retire(gone)
            self.refresh()
            num_gone += len(gone)
        return num_gone

    def erase(self, refs: Iterable[RecordRef]) -> None:
        """Gives back the bytes of deleted records without readers. What the disk refuses stays doomed, and charged."""
        by_segment: dict[int, list[RecordRef]] = {}
        for ref in refs:
            by_segment.setdefault(ref.segment, []).append(ref)
        for number, doomed in by_segment.items():
            if self.segments.remove_if_dead(number):
                self._unlinked.append(number)
                continue
            try:
                self.segments.erase(number, doomed)
                self._erased += doomed
            except OSError:
                self.num_erase_failures += 1
        self.refresh()

    def touch(self, uses: dict[RecordRef, int]) -> None:
        """Uses to be kept by the next transaction."""
        self._touched.update(uses)

    def flush(self) -> None:
        """Keeps what waited for a transaction."""
        if self._touched or self._erased or self._unlinked:
            with self.index.transaction(Step.SETTING_COMMITTING):
                self._catch_up()
            self._caught_up()
            self.refresh()

    def refresh(self) -> None:
        """Asks again what du says: of every file that is not a segment, and of the directories."""
        self.usage_bytes = self.segments.usage_bytes + sum(map(self._files.allocated_bytes, self._others))

    def check(self) -> None:
        """Raises AssertionError where index, segments and figures disagree."""
        self.segments.check()
        live = {number: count for number, count in self.segments.live.items() if count}
        assert live == self.index.num_live(), f"live {live}, in the index {self.index.num_live()}"
        ends = self.index.ends()
        assert all(ref.end <= ends[ref.segment] for ref in self.index.refs()), "a record behind its segment's end"
        usage_bytes = self.usage_bytes
        self.refresh()
        assert usage_bytes == self.usage_bytes, f"usage {usage_bytes}, by du {self.usage_bytes}"

    def _retire(self, gone: Sequence[RecordRef]) -> None:
        for ref in gone:
            self.segments.live[ref.segment] -= 1
        self.erase(self.fence.doom(gone))

    def _catch_up(self) -> None:
        self.index.touch(self._touched.items())
        self.index.forget(self._erased)
        for number in self._unlinked:
            self.index.drop_segment(number)

    def _caught_up(self) -> None:
        self._touched, self._erased, self._unlinked = {}, [], []
