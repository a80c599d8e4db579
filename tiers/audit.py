"""Examines a directory that no process has open: names every damage, changes nothing unless told to repair.

The index is read from a copy, since SQLite writes beside a log that it reads.
"""

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiers.errors import StoreLocked, StoreUnusable
from tiers.files import LOCK, PROBE, SECTOR_BYTES, Abilities, OsFiles
from tiers.index import Index, IndexDamaged, file_names
from tiers.keeper import Keeper
from tiers.records import Flaw, Header, RecordFlaw, RecordRef
from tiers.recovery import open_index, recover
from tiers.scan import Found, Scanner
from tiers.segments import FOLDER, Segments


class DamageKind(StrEnum):
    """What can be wrong with a directory."""

    INDEX_MISSING = "index missing"
    INDEX_DAMAGED = "index damaged"
    SEGMENT_MISSING = "segment missing"
    RECORD = "record"  # in the index, and not right on disk; the detail says how
    NOT_IN_INDEX = "record not in the index"  # behind its end: the index is older than the segments
    TORN_TAIL = "torn tail"  # behind the committed end and not a record
    STRANGE_FILE = "strange file"


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding. `ref` is the record's, if it is one that the index has."""

    kind: DamageKind
    where: str
    detail: str
    ref: RecordRef | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What an examination found."""

    num_segments: int
    num_records: int
    stored_bytes: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A record found in a segment, and whether the index has it."""

    found: Found
    is_indexed: bool


def examine(directory: Path, progress: Callable[[int, int], None]) -> Report:
    """Checks every committed record and what lies behind them. `progress`: bytes done, bytes in all.

    Raises:
        StoreLocked: a process has the directory.
        StoreUnusable: it is not a store, or cannot be read.
    """
    files = OsFiles()
    with _taken(directory, files), _index_copy(directory, files) as index:
        segments = Segments(directory, files, Abilities(direct=True, punch=False))
        damages = _index_damages(directory, index)
        damages += [Damage(DamageKind.STRANGE_FILE, name, "not the store's") for name in _strange(directory, files)]
        readable = index if isinstance(index, Index) else None
        refs = readable.refs() if readable else []
        ends = readable.ends() if readable else {}
        sizes = {number: segments.size(number) for number in segments.on_disk()}
        damages += [
            Damage(DamageKind.SEGMENT_MISSING, segments.path(number).name, "it held committed records")
            for number in sorted({ref.segment for ref in refs} - set(sizes))
        ]
        scanner = Scanner(segments)
        total = sum(sizes.values())
        done = 0
        for number, size in sizes.items():
            inside = [ref for ref in refs if ref.segment == number]
            for ref in inside:
                damages += _check_record(ref, readable, scanner)
                progress(done + ref.end, total)
            damages += _check_tail(number, ends.get(number, 0), size, scanner)
            done += size
            progress(done, total)
        return Report(len(sizes), len(refs), sum(ref.stored_bytes for ref in refs), tuple(damages))


def repair(directory: Path, report: Report) -> None:
    """Makes index and segments agree and deletes the damaged records of the report. Strange files stay.

    Raises:
        StoreLocked, StoreUnusable: as `examine`.
    """
    files = OsFiles()
    with _taken(directory, files):
        try:
            segments = Segments(directory, files, files.abilities(directory))
            index, _ = open_index(directory, files)
            with closing(index), closing(segments):
                recover(index, segments, files)
                keeper = Keeper(directory, files, index, segments, quota_bytes=0)
                keeper.delete([damage.ref for damage in report.damages if damage.ref is not None])
                keeper.flush()
        except (OSError, IndexDamaged) as error:
            raise StoreUnusable(f"{directory}: {error}") from error


def listing(directory: Path) -> Generator[Listed]:
    """Everything in the segments, by their own headers.

    Raises:
        StoreLocked, StoreUnusable: as `examine`.
    """
    files = OsFiles()
    with _taken(directory, files), _index_copy(directory, files) as index:
        segments = Segments(directory, files, Abilities(direct=True, punch=False))
        known = set(index.refs()) if isinstance(index, Index) else set[RecordRef]()
        scanner = Scanner(segments)
        for number in segments.on_disk():
            for found in scanner.records(number, 0, segments.size(number) // SECTOR_BYTES * SECTOR_BYTES):
                yield Listed(found, found.header is not None and found.header.ref in known)


@contextmanager
def _taken(directory: Path, files: OsFiles) -> Generator[None]:
    """Nobody else has it meanwhile."""
    if not (directory / FOLDER).is_dir():
        raise StoreUnusable(f"{directory} is not a store: it has no folder {FOLDER}")
    lock: int | None = None
    try:
        if (directory / LOCK).exists():
            lock = files.lock(directory / LOCK)
        yield
    except BlockingIOError:
        raise StoreLocked(f"{directory} is used by another process") from None
    except OSError as error:
        raise StoreUnusable(f"{directory}: {error.strerror or error}") from error
    finally:
        if lock is not None:
            files.close(lock)


@contextmanager
def _index_copy(directory: Path, files: OsFiles) -> Generator[Index | str]:
    """The index, or why there is none."""
    if not (directory / file_names()[0]).exists():
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="downcore-fsck-") as folder:
        for name in file_names()[:2]:
            if (directory / name).exists():
                shutil.copyfile(directory / name, Path(folder) / name)
        try:
            index = Index(Path(folder), files)
        except IndexDamaged as damage:
            yield str(damage)
            return
        with closing(index):
            yield index


def _index_damages(directory: Path, index: Index | str) -> list[Damage]:
    name = file_names()[0]
    if isinstance(index, Index):
        return []
    if index:
        return [Damage(DamageKind.INDEX_DAMAGED, name, index)]
    return [Damage(DamageKind.INDEX_MISSING, name, "it is rebuilt from the segments")]


def _check_record(ref: RecordRef, index: Index | None, scanner: Scanner) -> Iterator[Damage]:
    where = f"segment {ref.segment} at {ref.offset}"
    try:
        header: Header = scanner.check_record(ref)
    except RecordFlaw as flaw:
        if flaw.flaw is not Flaw.OTHER_VERSION:
            yield Damage(DamageKind.RECORD, where, str(flaw), ref)
        return
    except OSError as error:
        yield Damage(DamageKind.RECORD, where, f"{Flaw.UNREADABLE.value}: {error.strerror}", ref)
        return
    if index is not None and index.head(ref) != header.head:
        yield Damage(DamageKind.RECORD, where, "the index describes another record", ref)


def _check_tail(number: int, end: int, size: int, scanner: Scanner) -> Iterator[Damage]:
    """What lies behind a segment's committed end."""
    if size % SECTOR_BYTES:
        yield Damage(DamageKind.TORN_TAIL, f"segment {number}", f"{size} bytes are no whole number of sectors")
    for found in scanner.records(number, end, size // SECTOR_BYTES * SECTOR_BYTES):
        where = f"segment {number} at {found.offset}"
        if found.header is None:
            yield Damage(DamageKind.TORN_TAIL, where, str(found.flaw))
            continue
        try:
            scanner.check_payload(found.header)
        except RecordFlaw as flaw:
            yield Damage(DamageKind.TORN_TAIL, where, str(flaw))
            continue
        yield Damage(DamageKind.NOT_IN_INDEX, where, f"{found.header.head.kind.name.lower()} {_key(found.header)}")


def _key(header: Header) -> str:
    return header.head.key.hex()[:16]


def _strange(directory: Path, files: OsFiles) -> list[str]:
    ours = {LOCK, PROBE, FOLDER, *file_names()}
    strange = [name for name in files.names(directory) if name not in ours]
    return strange + [
        f"{FOLDER}/{name}" for name in files.names(directory / FOLDER) if not name.removesuffix(".seg").isdigit()
    ]
