"""The index: which records are committed, what was deleted but not yet given back, and what was said of prefixes.

SQLite, WAL. The segments can do without it: a lost index is rebuilt from their headers; pins, times to live and quotas
it alone has. It is durable when a transaction returns (synchronous=FULL). One thread at a time uses an `Index`;
`entries` reads a snapshot through a connection of its own. Errors of SQLite leave as OSError or IndexDamaged.
"""

import errno
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.codec import Coding
from tiers.files import OsFiles, Step
from tiers.keys import Provenance
from tiers.records import VERSION, Header, RecordHead, RecordKind, RecordRef, StoredRecord

NAME = "index.sqlite"
SCHEMA_VERSION = 1
PAGE_BYTES = 4096
WAL_PAGES = 64  # SQLite moves the WAL into the index, and begins it anew, at this size

_SCHEMA = """
CREATE TABLE identity (
  id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, profile BLOB NOT NULL,
  block_codings BLOB, checkpoint_codings BLOB, UNIQUE (fingerprint, profile));
CREATE TABLE segment (number INTEGER PRIMARY KEY, end INTEGER NOT NULL);
CREATE TABLE record (
  segment INTEGER NOT NULL, offset INTEGER NOT NULL, stored_bytes INTEGER NOT NULL, generation INTEGER NOT NULL,
  version INTEGER NOT NULL, identity INTEGER, kind INTEGER, provenance TEXT, namespace TEXT, parent BLOB, key BLOB,
  depth INTEGER, tokens BLOB, last_use INTEGER NOT NULL, PRIMARY KEY (segment, offset)) WITHOUT ROWID;
CREATE UNIQUE INDEX record_key ON record (key, kind, identity);
CREATE TABLE doomed (
  segment INTEGER NOT NULL, offset INTEGER NOT NULL, stored_bytes INTEGER NOT NULL, generation INTEGER NOT NULL,
  PRIMARY KEY (segment, offset)) WITHOUT ROWID;
CREATE TABLE pin (
  namespace TEXT NOT NULL, key BLOB NOT NULL, expires_at INTEGER, PRIMARY KEY (namespace, key)) WITHOUT ROWID;
CREATE TABLE quota (namespace TEXT PRIMARY KEY, cached_bytes INTEGER, pinned_bytes INTEGER) WITHOUT ROWID;
"""
_TIME_TO_LIVE = """CREATE TABLE IF NOT EXISTS time_to_live (
  namespace TEXT NOT NULL, key BLOB NOT NULL, expires_at INTEGER NOT NULL, PRIMARY KEY (namespace, key)) WITHOUT ROWID;
"""  # an index that is older gains it, and who does not know it leaves it alone: the schema's version stays
_HEAD = "kind, provenance, namespace, parent, key, depth, tokens"
_REF = "segment, offset, stored_bytes, generation"


class IndexDamaged(Exception):
    """The file is not an index of this version, or SQLite finds it malformed."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is to stay: the key of its deepest block. `expires_at`: seconds since the epoch, None for ever."""

    namespace: str
    key: bytes
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """When a prefix is to be forgotten: named and timed as a pin is. None: by no time."""

    namespace: str
    key: bytes
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that a namespace's prefixes may take over all tiers, and its pinned ones. None: no limit."""

    namespace: str
    cached_bytes: int | None
    pinned_bytes: int | None


class Index:
    """One connection to the index of a directory."""

    def __init__(self, directory: Path, files: OsFiles) -> None:
        """Opens the index, or makes an empty one.

        Raises:
            IndexDamaged: what is there cannot be used.
            OSError: the disk fails.
        """
        self.path = directory / NAME
        self._files = files
        is_new = not self.path.exists()
        self.path.touch(mode=0o600)
        self.path.chmod(0o600)  # its tokens are the prompts: for its owner alone, also where an older one was not
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, cached_statements=64)
        try:
            with _plain_errors():
                self._prepare(directory, is_new=is_new)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Moves the WAL into the index and closes it."""
        with _plain_errors():
            self._db.close()

    @contextmanager
    def transaction(self, step: Step) -> Generator[None]:
        """Everything in it is durable afterwards, or nothing happened. `step` is announced before the commit."""
        with _plain_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._files.reached(step)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    # Records

    def identity_id(self, fingerprint: bytes, profile: bytes) -> int:
        """The row of an identity, made where there is none."""
        found = self._one("SELECT id FROM identity WHERE fingerprint = ? AND profile = ?", fingerprint, profile)
        if found is not None:
            return int(found[0])
        self._db.execute("INSERT INTO identity (fingerprint, profile) VALUES (?, ?)", (fingerprint, profile))
        return self.identity_id(fingerprint, profile)

    def codings(self, identity: int, kind: RecordKind) -> tuple[Coding, ...] | None:
        """What the trial of this kind found, if there was one."""
        found = self._one(f"SELECT {_CODINGS[kind]} FROM identity WHERE id = ?", identity)
        return None if found is None or found[0] is None else tuple(Coding(code) for code in found[0])

    def remember_codings(self, identity: int, kind: RecordKind, codings: tuple[Coding, ...]) -> None:
        """Keeps a trial's result."""
        self._db.execute(f"UPDATE identity SET {_CODINGS[kind]} = ? WHERE id = ?", (bytes(codings), identity))

    def add(self, headers: Iterable[Header], last_use: int) -> list[RecordRef]:
        """Adds records; those of the same key, kind and identity that they replace are deleted and returned."""
        replaced: list[RecordRef] = []
        for header in headers:
            head, ref = header.head, header.ref
            identity = self.identity_id(header.fingerprint, header.profile)
            query = f"SELECT {_REF} FROM record WHERE key = ? AND kind = ? AND identity = ?"
            older = [RecordRef(*row) for row in self._db.execute(query, (head.key, head.kind, identity))]
            if any(other.generation > ref.generation for other in older):
                self._doom([ref])
                replaced.append(ref)
                continue
            replaced += self.delete(older)
            self._db.execute(
                "INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(ref.segment, ref.offset, ref.stored_bytes, ref.generation, VERSION, identity),
                    *(head.kind, head.provenance.value, head.namespace, head.parent, head.key, head.depth),
                    *(head.tokens, last_use),
                ),
            )
        return replaced

    def add_unreadable(self, ref: RecordRef, version: int) -> None:
        """Adds a record of another format version, which can only be counted and deleted."""
        self._db.execute(
            f"INSERT OR REPLACE INTO record ({_REF}, version, last_use) VALUES (?, ?, ?, ?, ?, 0)",
            (ref.segment, ref.offset, ref.stored_bytes, ref.generation, version),
        )

    def delete(self, refs: Iterable[RecordRef]) -> list[RecordRef]:
        """Deletes records and dooms their bytes; those that were there. Unknown ones are no failure."""
        query = "DELETE FROM record WHERE segment = ? AND offset = ? AND generation = ?"
        gone = [ref for ref in refs if self._db.execute(query, (ref.segment, ref.offset, ref.generation)).rowcount]
        self._doom(gone)
        return gone

    def doomed(self) -> list[RecordRef]:
        """Deleted records whose bytes may not have been given back."""
        return [RecordRef(*row) for row in self._db.execute(f"SELECT {_REF} FROM doomed")]

    def forget(self, refs: Iterable[RecordRef]) -> None:
        """Their bytes have been given back."""
        self._db.executemany(
            "DELETE FROM doomed WHERE segment = ? AND offset = ?", [(ref.segment, ref.offset) for ref in refs]
        )

    def touch(self, uses: Iterable[tuple[RecordRef, int]]) -> None:
        """Keeps when records were last used."""
        self._db.executemany(
            "UPDATE record SET last_use = ? WHERE segment = ? AND offset = ? AND generation = ?",
            [(last_use, ref.segment, ref.offset, ref.generation) for ref, last_use in uses],
        )

    def refs(self, segment: int | None = None) -> list[RecordRef]:
        """All records, or those of one segment, in order of place."""
        where = "" if segment is None else f" WHERE segment = {segment:d}"
        return [RecordRef(*row) for row in self._db.execute(f"SELECT {_REF} FROM record{where} ORDER BY 1, 2")]

    def unreadable(self, identity: int, fingerprint: bytes) -> Iterator[tuple[RecordRef, str]]:
        """Records that an exact engine of this identity can not use, oldest use first, each with the reason."""
        rows = self._db.execute(
            f"SELECT {_REF}, version, fingerprint, provenance FROM record LEFT JOIN identity ON id = identity "
            "WHERE version != ? OR fingerprint != ? OR identity != ? OR provenance != ? ORDER BY last_use",
            (VERSION, fingerprint, identity, Provenance.EXACT.value),
        )
        for *place, version, theirs, provenance in rows:
            reason = "fingerprint" if theirs != fingerprint else "numerics profile"
            if reason != "fingerprint" and provenance != Provenance.EXACT.value:
                reason = "provenance"
            yield RecordRef(*place), reason if version == VERSION else "version"

    def other_profile_keys(self, identity: int, fingerprint: bytes) -> list[bytes]:
        """Keys of exact blocks that could be read here, but that another numerics profile computed."""
        rows = self._db.execute(
            "SELECT key FROM record JOIN identity ON id = identity "
            "WHERE version = ? AND fingerprint = ? AND identity != ? AND kind = ? AND provenance = ?",
            (VERSION, fingerprint, identity, RecordKind.BLOCK, Provenance.EXACT.value),
        )
        return [key for (key,) in rows]

    def entries(self, identity: int, fingerprint: bytes) -> Iterator[StoredRecord]:
        """What this identity can use, parents before children and a block before its checkpoint."""
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db, _plain_errors():
            rows = db.execute(
                f"SELECT {_HEAD}, {_REF}, last_use FROM record JOIN identity ON id = identity "
                "WHERE version = ? AND fingerprint = ? AND (identity = ? OR provenance = ?) ORDER BY depth, kind",
                (VERSION, fingerprint, identity, Provenance.FAST.value),
            )
            for row in rows:
                yield StoredRecord(_head(row[:7]), RecordRef(*row[7:11]), row[11])

    def head(self, ref: RecordRef) -> RecordHead | None:
        """What the index says of a record; None where it has none, or one of another version."""
        found = self._one(
            f"SELECT {_HEAD} FROM record WHERE segment = ? AND offset = ? AND generation = ? AND version = ?",
            *(ref.segment, ref.offset, ref.generation, VERSION),
        )
        return None if found is None else _head(found)

    def last_generation(self) -> int:
        """The highest that a record or a doomed one has."""
        query = "SELECT max(generation) FROM (SELECT generation FROM record UNION ALL SELECT generation FROM doomed)"
        found = self._one(query)
        return int(found[0] or 0) if found else 0

    # Segments

    def ends(self) -> dict[int, int]:
        """How far each segment is committed, bytes; by number."""
        return dict(self._db.execute("SELECT number, end FROM segment"))

    def set_end(self, segment: int, end: int) -> None:
        """A segment is committed up to here."""
        self._db.execute("INSERT OR REPLACE INTO segment VALUES (?, ?)", (segment, end))

    def drop_segment(self, segment: int) -> None:
        """A segment is gone, with whatever was in it."""
        for table, column in (("segment", "number"), ("record", "segment"), ("doomed", "segment")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (segment,))

    def num_live(self) -> dict[int, int]:
        """Committed records of each segment."""
        return dict(self._db.execute("SELECT segment, count(*) FROM record GROUP BY segment"))

    # Pins, times to live and quotas

    def pins(self) -> list[Pin]:
        """All of them, expired ones included."""
        return [Pin(*row) for row in self._db.execute("SELECT namespace, key, expires_at FROM pin ORDER BY 1, 2")]

    def set_pin(self, pin: Pin) -> None:
        """Adds a pin or changes when it expires. It takes the place of a time to live."""
        self._db.execute("INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (pin.namespace, pin.key, pin.expires_at))
        self.set_times_to_live([TimeToLive(pin.namespace, pin.key, None)])

    def remove_pin(self, namespace: str, key: bytes) -> bool:
        """Whether there was one."""
        return self._db.execute("DELETE FROM pin WHERE namespace = ? AND key = ?", (namespace, key)).rowcount > 0

    def times_to_live(self) -> list[TimeToLive]:
        """All of them, those that are over included."""
        rows = self._db.execute("SELECT namespace, key, expires_at FROM time_to_live ORDER BY 1, 2")
        return [TimeToLive(*row) for row in rows]

    def set_times_to_live(self, times: Iterable[TimeToLive]) -> None:
        """Adds, changes or removes them."""
        for time in times:
            if time.expires_at is None:
                query = "DELETE FROM time_to_live WHERE namespace = ? AND key = ?"
                self._db.execute(query, (time.namespace, time.key))
            else:
                query = "INSERT OR REPLACE INTO time_to_live VALUES (?, ?, ?)"
                self._db.execute(query, (time.namespace, time.key, time.expires_at))

    def drop_times_to_live(self) -> None:
        """Removes those of prefixes that end at no record, of whatever engine: nothing is left to be forgotten."""
        query = "DELETE FROM time_to_live WHERE NOT EXISTS (SELECT 1 FROM record WHERE record.key = time_to_live.key)"
        self._db.execute(query)

    def quotas(self) -> list[Quota]:
        """All of them, by namespace."""
        rows = self._db.execute("SELECT namespace, cached_bytes, pinned_bytes FROM quota ORDER BY 1")
        return [Quota(*row) for row in rows]

    def set_quota(self, quota: Quota) -> None:
        """Adds or changes one."""
        values = (quota.namespace, quota.cached_bytes, quota.pinned_bytes)
        self._db.execute("INSERT OR REPLACE INTO quota VALUES (?, ?, ?)", values)

    def remove_quota(self, namespace: str) -> bool:
        """Whether there was one."""
        return self._db.execute("DELETE FROM quota WHERE namespace = ?", (namespace,)).rowcount > 0

    def _prepare(self, directory: Path, *, is_new: bool) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_PAGES * PAGE_BYTES}")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if version == 0 and tables == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise IndexDamaged(f"schema version {version}, not {SCHEMA_VERSION}")
        elif (verdict := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise IndexDamaged(str(verdict))
        self._db.execute(_TIME_TO_LIVE)
        if is_new:
            self._files.sync_directory(directory)
            self._files.reached(Step.INDEX_CREATED)

    def _doom(self, refs: Sequence[RecordRef]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO doomed VALUES (?, ?, ?, ?)",
            [(ref.segment, ref.offset, ref.stored_bytes, ref.generation) for ref in refs],
        )

    def _one(self, query: str, *values: object) -> Sequence[Any] | None:
        return self._db.execute(query, values).fetchone()


_CODINGS = {RecordKind.BLOCK: "block_codings", RecordKind.CHECKPOINT: "checkpoint_codings"}


def most_growth_bytes(num_records: int) -> tuple[int, int]:
    """What a transaction on so many records can make of it: the WAL's length, and the bytes the index grows by.

    A row of 0.5 KiB lies in order of place, its key anywhere: at most two pages of the WAL a record. A split leaves
    pages half full: at most a quarter of a page of the index.
    """
    return (WAL_PAGES + 2 * num_records + 16) * PAGE_BYTES, (num_records // 4 + 16) * PAGE_BYTES


def file_names() -> tuple[str, ...]:
    """The index and what SQLite keeps beside it."""
    return NAME, f"{NAME}-wal", f"{NAME}-shm"


def _head(row: Sequence[Any]) -> RecordHead:
    kind, provenance, *rest = row
    try:
        return RecordHead(RecordKind(kind), Provenance(provenance), *rest)
    except ValueError as error:
        raise IndexDamaged(str(error)) from None


@contextmanager
def _plain_errors() -> Generator[None]:
    """SQLite's errors as what they mean to the store."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = {"SQLITE_FULL": errno.ENOSPC, "SQLITE_READONLY": errno.EROFS}.get(error.sqlite_errorname, errno.EIO)
        raise OSError(code, f"index: {error}") from error
    except sqlite3.DatabaseError as error:
        raise IndexDamaged(str(error)) from error
