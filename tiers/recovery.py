"""Makes index and segments agree when a directory is opened, whatever happened to either.

Segments are appended only and the index says how far each is committed. So what lies before that end and is not in the
index was deleted, and what lies behind it is newer than the index: records that are whole are adopted, the rest is cut.
A lost index is the case where every end is 0.
"""

import contextlib
import sqlite3
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from tiers.files import SECTOR_BYTES, OsFiles, Step
from tiers.index import Index, IndexDamaged, Pin, Quota, TimeToLive, file_names
from tiers.records import Flaw, Header, RecordFlaw, RecordRef
from tiers.scan import Scanner
from tiers.segments import Segments


@dataclass(slots=True)
class Recovery:
    """What opening a directory found and did."""

    rebuilt: str = ""  # why the index was made anew; empty where it was not
    adopted_records: int = 0  # behind the index, whole
    torn_records: int = 0  # behind the index, not whole: cut
    lost_records: int = 0  # in the index, but their bytes are gone
    erased_records: int = 0  # deleted earlier, given back now
    last_generation: int = 0


@dataclass(slots=True)
class _Said:
    """What operators and callers said, which no segment has."""

    pins: list[Pin] = field(default_factory=list[Pin])
    times_to_live: list[TimeToLive] = field(default_factory=list[TimeToLive])
    quotas: list[Quota] = field(default_factory=list[Quota])


@dataclass(slots=True)
class _Tail:
    """What was found behind a segment's committed end."""

    headers: list[Header] = field(default_factory=list[Header])
    other_versions: list[RecordRef] = field(default_factory=list[RecordRef])
    torn: list[RecordRef] = field(default_factory=list[RecordRef])  # good headers of payloads that are not whole
    num_strange: int = 0  # places where a header should be, and is not
    end: int = 0  # of the last record that counts


def open_index(directory: Path, files: OsFiles) -> tuple[Index, str]:
    """The index, made anew where it is damaged, and why.

    Raises:
        OSError: the disk fails.
    """
    try:
        return Index(directory, files), ""
    except IndexDamaged as damage:
        said = _salvage(directory / file_names()[0])
        for name in reversed(file_names()):
            with contextlib.suppress(FileNotFoundError):
                files.unlink(directory / name)
        files.reached(Step.INDEX_REMOVED)
        index = Index(directory, files)
        with index.transaction(Step.SETTING_COMMITTING):
            for pin in said.pins:
                index.set_pin(pin)
            index.set_times_to_live(said.times_to_live)
            for quota in said.quotas:
                index.set_quota(quota)
        return index, str(damage)


def recover(index: Index, segments: Segments, files: OsFiles) -> Recovery:
    """Makes both agree and returns what it took. Time: a header for each record behind the index, a group a segment.

    Raises:
        OSError: the disk fails.
    """
    done = Recovery(last_generation=index.last_generation())
    scanner = Scanner(segments)
    ends = index.ends()
    present = segments.on_disk()
    segments.never_reuse(ends)
    gone = sorted(set(ends) - set(present))
    if gone:
        done.lost_records += sum(len(index.refs(number)) for number in gone)
        _drop_segments(index, gone)
    for number in present:
        _recover_segment(number, ends.get(number, 0), index, segments, scanner, done)
    files.reached(Step.RECOVERY_COMMITTED)
    segments.live = index.num_live()
    done.erased_records = finish_deletes(index, segments)
    with index.transaction(Step.RECOVERY_COMMITTING):
        index.drop_times_to_live()
    if present and present[-1] in segments.on_disk():
        segments.resume(present[-1], index.ends().get(present[-1], 0))
    return done


def finish_deletes(index: Index, segments: Segments) -> int:
    """Gives back what was deleted but not erased, and segments without records; how many records."""
    erased: list[RecordRef] = []
    doomed = index.doomed()
    for number in sorted({ref.segment for ref in doomed if segments.live.get(ref.segment)}):
        refs = [ref for ref in doomed if ref.segment == number]
        with contextlib.suppress(OSError):  # they stay doomed, and charged
            segments.erase(number, refs)
            erased += refs
    gone = [number for number in segments.on_disk() if segments.remove_if_dead(number)]
    if erased:
        with index.transaction(Step.RECOVERY_COMMITTING):
            index.forget(erased)
    if gone:
        _drop_segments(index, gone)
    return len(erased)


def _drop_segments(index: Index, numbers: list[int]) -> None:
    with index.transaction(Step.RECOVERY_COMMITTING):
        for number in numbers:
            index.drop_segment(number)


def _recover_segment(number: int, end: int, index: Index, segments: Segments, scanner: Scanner, done: Recovery) -> None:
    size = segments.size(number)
    if size == end:
        return
    whole = size // SECTOR_BYTES * SECTOR_BYTES
    tail = _read_tail(number, end, whole, scanner) if whole > end else _Tail(end=min(end, whole))
    lost = [ref for ref in index.refs(number) if ref.end > whole]
    inside = [ref for ref in tail.torn if ref.end <= tail.end]
    if inside:  # behind a sound record of the same group: else a later loss of the index would take them for committed
        with contextlib.suppress(OSError):
            segments.erase(number, inside)
    with index.transaction(Step.RECOVERY_COMMITTING):
        index.forget(index.delete(lost))
        index.add(tail.headers, last_use=0)
        for ref in tail.other_versions:
            index.add_unreadable(ref, version=0)
        index.set_end(number, tail.end)
    done.lost_records += len(lost)
    done.adopted_records += len(tail.headers) + len(tail.other_versions)
    done.torn_records += len(tail.torn) + tail.num_strange
    done.last_generation = max([done.last_generation, *(header.ref.generation for header in tail.headers)])
    if size > tail.end:
        with contextlib.suppress(OSError):  # a file that cannot be cut is not appended to either
            segments.cut(number, tail.end)


def _read_tail(number: int, start: int, end: int, scanner: Scanner) -> _Tail:
    """Only the last group can be torn: every earlier one was synced before the next began."""
    tail = _Tail(end=start)
    for found in scanner.records(number, start, end):
        if found.header is not None:
            tail.headers.append(found.header)
        elif found.flaw is not None and found.flaw.flaw is Flaw.OTHER_VERSION and found.stored_bytes:
            tail.other_versions.append(RecordRef(number, found.offset, found.stored_bytes, 0))
        else:
            tail.num_strange += 1
    if tail.headers:
        last_group = tail.headers[-1].group_offset
        sound = [header for header in tail.headers if header.ref.offset < last_group or _is_whole(header, scanner)]
        whole = {header.ref for header in sound}
        tail.torn = [header.ref for header in tail.headers if header.ref not in whole]
        tail.headers = sound
    tail.end = max([start, *(header.ref.end for header in tail.headers), *(ref.end for ref in tail.other_versions)])
    return tail


def _is_whole(header: Header, scanner: Scanner) -> bool:
    try:
        scanner.check_payload(header)
    except RecordFlaw:
        return False
    return True


def _salvage(path: Path) -> _Said:
    """Of a damaged index, as far as it can be read."""
    said = _Said()
    with _readable(path) as db:
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                said.pins += [Pin(*row) for row in db.execute("SELECT namespace, key, expires_at FROM pin")]
            with contextlib.suppress(sqlite3.Error):
                rows = db.execute("SELECT namespace, key, expires_at FROM time_to_live").fetchall()
                said.times_to_live += [TimeToLive(*row) for row in rows]
            with contextlib.suppress(sqlite3.Error):
                rows = db.execute("SELECT namespace, cached_bytes, pinned_bytes FROM quota").fetchall()
                said.quotas += [Quota(*row) for row in rows]
    return said


@contextlib.contextmanager
def _readable(path: Path) -> Generator[sqlite3.Connection | None]:
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        yield None
        return
    try:
        yield db
    finally:
        db.close()
