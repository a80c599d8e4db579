"""Whatever happens to the files: detected, a miss, everything else is served, and fsck names it."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ops.cli.main import run
from tests.campaigns.budget import seeds
from tests.tiers.stores import IDENTITY, Item, chain, check_contents, flip, open_store, read_back
from tiers.audit import DamageKind, examine, repair
from tiers.index import Quota, TimeToLive
from tiers.records import Header, RecordFlaw, RecordRef, pack_header, parse_header

OTHER = replace(IDENTITY, fingerprint=b"o" * 32)
INDEX = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")


class Directory:
    """A closed store with four groups in it, and a backup of how it was before the last of them."""

    def __init__(self, folder: Path, identity=IDENTITY) -> None:
        self.path = folder / "disk"
        self.items: dict[RecordRef, Item] = {}
        self.deleted: list[Item] = []
        self.day_old = folder / "day old"
        for seed in range(4):
            if seed == 3:
                shutil.copytree(self.path, self.day_old)
            store = open_store(self.path, identity=identity)
            items = chain(16, seed=seed, identity=identity)
            refs = store.write([item.pair for item in items])
            store.delete(refs[:4])
            self.items |= dict(zip(refs[4:], items[4:], strict=True))
            self.deleted += items[:4]
            store.close()

    def segment(self, ref: RecordRef) -> Path:
        return self.path / "segments" / f"{ref.segment:08d}.seg"

    def header(self, ref: RecordRef) -> Header:
        data = self.segment(ref).read_bytes()
        return parse_header(memoryview(data)[ref.offset : ref.end])

    def overwrite(self, ref: RecordRef, data: bytes) -> None:
        with self.segment(ref).open("r+b") as file:
            file.seek(ref.offset)
            file.write(data)

    def read(self, ref: RecordRef) -> bytes:
        return self.segment(ref).read_bytes()[ref.offset : ref.end]


def flip_header(directory: Directory, rng: random.Random) -> set[RecordRef]:
    ref = rng.choice(list(directory.items))
    flip(directory.segment(ref), rng, ref.offset, ref.offset + directory.header(ref).num_bytes)
    return {ref}


def flip_payload(directory: Directory, rng: random.Random) -> set[RecordRef]:
    ref = rng.choice(list(directory.items))
    header = directory.header(ref)
    begin = ref.offset + header.num_bytes
    flip(directory.segment(ref), rng, begin, begin + header.payload_bytes)
    return {ref}


def erase_sectors(directory: Directory, rng: random.Random) -> set[RecordRef]:
    ref = rng.choice([ref for ref in directory.items if ref.stored_bytes > 4096])
    sector = rng.randrange(ref.stored_bytes // 4096)
    directory.overwrite(replace(ref, offset=ref.offset + 4096 * sector), bytes(4096))
    return {ref}


def truncate(directory: Directory, rng: random.Random) -> set[RecordRef]:
    ref = rng.choice(list(directory.items))
    header = directory.header(ref)
    with directory.segment(ref).open("r+b") as file:
        file.truncate(ref.offset + rng.randrange(header.num_bytes + header.payload_bytes))
    return {other for other in directory.items if other.segment == ref.segment and other.offset >= ref.offset}


def swap(directory: Directory, rng: random.Random) -> set[RecordRef]:
    one = rng.choice(list(directory.items))
    two = rng.choice([ref for ref in directory.items if ref != one and ref.stored_bytes == one.stored_bytes])
    first, second = directory.read(one), directory.read(two)
    directory.overwrite(one, second)
    directory.overwrite(two, first)
    return {one, two}


def older_generation(directory: Directory, rng: random.Random) -> set[RecordRef]:
    ref = rng.choice(list(directory.items))
    header = directory.header(ref)
    stale = replace(header, ref=replace(ref, generation=ref.generation - 1000))
    directory.overwrite(ref, pack_header(stale))
    return {ref}


def delete_segment(directory: Directory, rng: random.Random) -> set[RecordRef]:
    ref = rng.choice(list(directory.items))
    directory.segment(ref).unlink()
    return {other for other in directory.items if other.segment == ref.segment}


def segment_of_another_model(directory: Directory, rng: random.Random) -> set[RecordRef]:
    other = Directory(directory.path.parent / "other", OTHER)
    for path in (directory.path / "segments").iterdir():
        shutil.copyfile(other.path / "segments" / path.name, path)
    return set(directory.items)


def delete_index(directory: Directory, rng: random.Random) -> set[RecordRef]:
    for name in INDEX:
        (directory.path / name).unlink(missing_ok=True)
    return set()


def truncate_index(directory: Directory, rng: random.Random) -> set[RecordRef]:
    path = directory.path / INDEX[0]
    with path.open("r+b") as file:
        file.truncate(rng.randrange(1, path.stat().st_size - 1))
    return set()


def overwrite_index(directory: Directory, rng: random.Random) -> set[RecordRef]:
    (directory.path / INDEX[0]).write_bytes(rng.randbytes(50_000))
    return set()


def day_old_index(directory: Directory, rng: random.Random) -> set[RecordRef]:
    delete_index(directory, rng)
    for name in INDEX:
        if (directory.day_old / name).exists():
            shutil.copyfile(directory.day_old / name, directory.path / name)
    return set()


KINDS: list[Callable[[Directory, random.Random], set[RecordRef]]] = [
    flip_header,
    flip_payload,
    erase_sectors,
    truncate,
    swap,
    older_generation,
    delete_segment,
    segment_of_another_model,
    delete_index,
    truncate_index,
    overwrite_index,
    day_old_index,
]
CASES = [(kind, seed) for kind in KINDS for seed in seeds(fraction=2, full=50)]


@pytest.mark.parametrize(("kind", "seed"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_damage_is_a_miss_and_nothing_else_is(tmp_path: Path, kind: Callable[..., set[RecordRef]], seed: int) -> None:
    directory = Directory(tmp_path)
    damaged = kind(directory, random.Random(seed))
    sound = [item for ref, item in directory.items.items() if ref not in damaged]

    report = examine(directory.path, lambda done, total: None)
    assert report.damages, "fsck found nothing"
    if damaged and kind not in (delete_segment, segment_of_another_model):
        assert damaged <= {damage.ref for damage in report.damages}
    copy = tmp_path / "repaired" / "disk"
    shutil.copytree(directory.path, copy)
    repair(copy, report)
    assert examine(copy, lambda done, total: None).damages == ()

    for path in (directory.path, copy):
        store = open_store(path)
        items = list(directory.items.values())
        answers = read_back(store, [item.head for item in items], list(directory.items))
        wrong = {ref for ref, answer in zip(directory.items, answers, strict=True) if isinstance(answer, RecordFlaw)}
        assert wrong == damaged
        store.check()  # and with it, that the writer has buried them
        keys = check_contents(store, sound)
        assert keys.isdisjoint({item.head.key for item in directory.deleted}), "a deleted record came back"
        assert len(list(store.entries())) == len(sound), "a damaged record is still listed"
        store.check()
        more = chain(6, seed=99)
        store.write([item.pair for item in more])
        check_contents(store, [*sound, *more])
        store.close()
        store = open_store(path)
        check_contents(store, [*sound, *more])
        store.check()
        store.close()


def test_the_index_of_another_time_serves_no_deleted_record(tmp_path: Path) -> None:
    """The old index still lists what was deleted since; its bytes are gone, and its place may hold something else."""
    store = open_store(tmp_path / "disk")
    items = chain(24)
    refs = store.write([item.pair for item in items])
    store.close()
    old = {name: (tmp_path / "disk" / name).read_bytes() for name in INDEX[:1]}
    store = open_store(tmp_path / "disk")
    store.delete(refs[:20])
    more = chain(16, seed=1)
    store.write([item.pair for item in more])
    store.close()
    for name, data in old.items():
        (tmp_path / "disk" / name).write_bytes(data)
    store = open_store(tmp_path / "disk")
    assert store.recovery.adopted_records == len(more)
    answers = read_back(store, [item.head for item in items], refs)
    assert [isinstance(answer, RecordFlaw) for answer in answers] == [True] * 20 + [False] * (len(items) - 20)
    store.check()
    check_contents(store, [*items[20:], *more])
    store.close()


def test_quotas_and_times_to_live_survive_an_index_whose_records_do_not(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    store = open_store(directory.path)
    store.set_quota(Quota("tests", 77, 7))
    time = TimeToLive("tests", next(iter(directory.items.values())).head.key, 100)
    store.set_times_to_live([time])
    store.close()
    data = bytearray((directory.path / INDEX[0]).read_bytes())
    for at in range(4096 * 3, len(data) - 4096, 4096):
        if b"tests" not in data[at : at + 4096] or data[at : at + 4096].count(b"tests") > 1:
            data[at : at + 100] = b"\xff" * 100
    (directory.path / INDEX[0]).write_bytes(data)
    store = open_store(directory.path)
    assert store.recovery.rebuilt
    assert store.quotas() == [Quota("tests", 77, 7)]
    assert store.times_to_live() == [time]
    check_contents(store, list(directory.items.values()))
    store.close()


def test_a_file_that_goes_while_the_store_is_open_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    groups = [(items, store.write([item.pair for item in items])) for items in (chain(16, seed=s) for s in range(4))]
    items, refs = groups[0]
    assert refs[0].segment != groups[3][1][0].segment
    (tmp_path / "segments" / f"{refs[0].segment:08d}.seg").unlink()
    answers = read_back(store, [item.head for item in items], refs)
    assert all(isinstance(answer, RecordFlaw) for answer in answers)
    store.delete([entry.ref for entry in store.entries() if entry.ref.segment == refs[0].segment])
    check_contents(store, groups[3][0])
    store.check()
    assert store.stats.quarantined == len(refs)
    store.close()


def test_a_damaged_record_is_read_once_and_then_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    items = chain(4)
    refs = store.write([item.pair for item in items])
    flip(tmp_path / "segments" / "00000001.seg", random.Random(1), refs[0].offset + 1000, refs[0].offset + 3000)
    (first,) = read_back(store, [items[0].head], refs[:1])
    assert isinstance(first, RecordFlaw)
    store.check()
    assert refs[0] not in {entry.ref for entry in store.entries()}
    again = store.write([items[0].pair])  # recomputed, and written again
    assert isinstance(read_back(store, [items[0].head], again)[0], memoryview)
    store.check()
    store.close()


def test_scrubbing_finds_damage_that_no_read_has_met(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    refs = store.write([item.pair for item in chain(12)])
    flip(tmp_path / "segments" / "00000001.seg", random.Random(1), refs[5].offset + 1000, refs[5].offset + 3000)
    bad = store.verify(lambda done, total: None)
    assert [ref for ref, _ in bad] == [refs[5]]
    store.check()
    assert len(list(store.entries())) == len(refs) - 1
    store.close()


def test_fsck_and_dump_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Directory(tmp_path)
    before = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    assert run(["store", "fsck", str(directory.path)]) == 0
    assert "no damage" in capsys.readouterr().out
    (ref,) = flip_payload(directory, random.Random(1))
    before[directory.segment(ref)] = directory.segment(ref).read_bytes()
    assert run(["store", "fsck", str(directory.path), "-o", "json"]) == 5
    (damage,) = json.loads(capsys.readouterr().out)["damages"]
    assert damage == {
        "kind": "record",
        "where": f"segment {ref.segment} at {ref.offset}",
        "detail": "damaged: payload checksum",
    }
    assert run(["store", "dump", str(directory.path), "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["key"] for row in rows} == {item.head.key.hex() for item in directory.items.values()}
    assert {row["state"] for row in rows} == {"committed"}
    assert run(["store", "dump", str(directory.path), "--limit", "3"]) == 0
    assert "3 records" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()} == before, "read-only"
    assert run(["store", "fsck", str(directory.path), "--repair", "--yes"]) == 5
    assert "repaired" in capsys.readouterr().out
    assert run(["store", "fsck", str(directory.path)]) == 0
    capsys.readouterr()
    store = open_store(directory.path)
    assert run(["store", "fsck", str(directory.path)]) == 1
    assert "used by another process" in capsys.readouterr().err
    store.close()
    assert run(["store", "fsck", str(tmp_path)]) == 1
    assert "not a store" in capsys.readouterr().err


def test_strange_files_are_named_and_left(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    (directory.path / "notes.txt").write_text("mine")
    (directory.path / "segments" / "copy of 1.seg").write_text("mine")
    report = examine(directory.path, lambda done, total: None)
    assert [damage.kind for damage in report.damages] == [DamageKind.STRANGE_FILE] * 2
    repair(directory.path, report)
    store = open_store(directory.path)
    check_contents(store, list(directory.items.values()))
    store.close()
    assert (directory.path / "notes.txt").exists()
