"""The disk tier's store when nothing goes wrong: what it promises on every day."""

import os
import random
import sqlite3
import subprocess
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from tests.sim.files import SimFiles, no_holes
from tests.tiers.stores import (
    IDENTITY,
    LAYOUT,
    QUOTA_BYTES,
    Item,
    chain,
    check_contents,
    du,
    image_of,
    open_store,
    read_back,
    same_parts,
)
from tiers.codec import Coding
from tiers.errors import StoreFull, StoreLocked, StoreUnusable
from tiers.files import Abilities, Step
from tiers.health import StoreState
from tiers.index import Pin, Quota, TimeToLive
from tiers.keys import Provenance
from tiers.layout import Plane, StateLayout
from tiers.reading import plan_runs
from tiers.records import MAGIC, Flaw, Identity, RecordFlaw, RecordKind, RecordRef
from tiers.store import StoreLimits

EVERY_FILE_SYSTEM = [
    Abilities(direct=True, punch=True),
    Abilities(direct=True, punch=False),
    Abilities(direct=False, punch=True),
    Abilities(direct=False, punch=False),
]


@pytest.mark.parametrize("abilities", EVERY_FILE_SYSTEM, ids=str)
def test_what_is_written_is_read_again_after_a_restart(tmp_path: Path, abilities: Abilities) -> None:
    items = chain(20)
    store = open_store(tmp_path / "disk", files=SimFiles(tmp_path / "disk", abilities=abilities))
    refs = store.write([item.pair for item in items], last_use=7)
    assert check_contents(store, items) == {item.head.key for item in items}
    store.check()
    store.close()
    store = open_store(tmp_path / "disk", files=SimFiles(tmp_path / "disk", abilities=abilities))
    entries = list(store.entries())
    assert {entry.ref for entry in entries} == set(refs)
    assert {entry.last_use for entry in entries} == {7}
    assert store.recovery.rebuilt == ""
    assert store.recovery.adopted_records == 0
    check_contents(store, items)
    assert store.stats.records_read == len(items)
    store.close()


def test_parents_come_before_children_and_blocks_before_their_checkpoints(tmp_path: Path) -> None:
    items = [*chain(12), *chain(12, seed=1)]
    random.Random(1).shuffle(items)
    store = open_store(tmp_path)
    store.write([item.pair for item in items])
    seen: set[bytes] = set()
    for entry in store.entries():
        head = entry.head
        if head.kind is RecordKind.CHECKPOINT:
            assert head.key in seen
        else:
            assert head.depth == 1 or head.parent in seen
            seen.add(head.key)
    assert len(seen) == 24
    store.close()


def test_a_write_is_one_commit_whatever_its_length(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files)
    before = files.steps.copy()
    store.write([item.pair for item in chain(200)])
    counts = files.steps - before
    assert counts[Step.DATA_SYNCED] == 1
    assert counts[Step.WRITE_COMMITTED] == 1
    assert len({entry.ref.segment for entry in store.entries()}) == 1, "a group lies in one segment"
    store.close()


@pytest.mark.parametrize("abilities", EVERY_FILE_SYSTEM, ids=str)
def test_usage_is_what_du_says_and_all_comes_back(tmp_path: Path, abilities: Abilities) -> None:
    folder = tmp_path / "disk"
    store = open_store(folder, files=SimFiles(folder, abilities=abilities))
    empty = store.usage_bytes
    rng = random.Random(3)
    kept = [(ref, seed) for seed in range(12) for ref in store.write([item.pair for item in chain(16, seed=seed)])]
    assert store.usage_bytes == du(folder) > empty
    rng.shuffle(kept)
    while kept:
        full = store.usage_bytes
        store.delete([ref for ref, _ in kept[:50]])
        del kept[:50]
        assert store.usage_bytes == du(folder)
        assert store.usage_bytes < full or not abilities.punch
        store.check()
    slack = 2 << 20  # index and log, and without holes the active segment
    assert store.usage_bytes < empty + slack
    assert subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True).stdout.split()[0] == str(
        store.usage_bytes
    )
    store.close()


def test_a_segment_without_records_is_unlinked(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=SimFiles(tmp_path, abilities=Abilities(direct=True, punch=False)))
    groups = [store.write([item.pair for item in chain(16, seed=seed)]) for seed in range(8)]
    assert len({ref.segment for group in groups for ref in group}) > 3
    for group in groups[:-1]:
        store.delete(group)
    store.check()
    names = os.listdir(tmp_path / "segments")
    assert [int(name[:8]) for name in names] == [groups[-1][0].segment], "numbers are not used again"
    check_contents(store, chain(16, seed=7))
    store.close()


def test_the_quota_is_never_exceeded_and_nearly_used(tmp_path: Path) -> None:
    quota_bytes = 3 << 20
    folder = tmp_path / "disk"
    files = SimFiles(folder)
    seen: list[int] = []
    files.on_op = lambda name, number: seen.append(du(folder))
    files.on_step = lambda step, number: seen.append(du(folder))
    store = open_store(folder, files=files, quota_bytes=quota_bytes)
    written: list[list[RecordRef]] = []
    num_full = 0
    for seed in range(60):
        records = [item.pair for item in chain(16, seed=seed)]
        room = quota_bytes - store.usage_bytes - store.reserve_bytes(len(records))
        try:
            written.append(store.write(records))
        except StoreFull as full:
            num_full += 1
            missing_bytes = full.missing_bytes
            assert 0 < missing_bytes <= len(records) * 8192 - room, "refused too early"
            while missing_bytes > 0:
                before = store.usage_bytes
                store.delete(written.pop(0))
                missing_bytes -= before - store.usage_bytes
            written.append(store.write(records))
    store.check()
    assert num_full > 5
    assert max(seen) <= quota_bytes
    assert store.health.state is StoreState.OK, "a full quota is no failure"
    store.close()


def test_a_full_quota_does_not_seal_segments(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota_bytes=2 << 20)
    for seed in range(40):
        with suppress(StoreFull):
            store.write([item.pair for item in chain(8, seed=seed)])
    before = store._keeper.segments.num_files
    for seed in range(40, 60):
        with pytest.raises(StoreFull):
            store.write([item.pair for item in chain(8, seed=seed)])
    assert store._keeper.segments.num_files == before
    store.check()
    store.close()


def test_a_read_joins_neighbours_and_keeps_the_order_of_its_answers(tmp_path: Path) -> None:
    items = chain(64)
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files)
    refs = store.write([item.pair for item in items])
    order = list(range(len(items)))
    random.Random(5).shuffle(order)
    reads = []
    files.on_op = lambda name, number: reads.append(name)
    images = read_back(store, [items[i].head for i in order], [refs[i] for i in order])
    assert reads.count("pread") == 1, "all of them lie side by side"
    for i, image in zip(order, images, strict=True):
        assert isinstance(image, memoryview)
        assert same_parts(image, items[i].image, items[i].head)
    assert [len(run.numbers) for run in plan_runs(refs[::40])] == [1] * len(refs[::40]), "a gap ends a run"
    store.close()


def test_many_threads_read_while_records_come_and_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    steady = chain(24)
    refs = store.write([item.pair for item in steady])
    stop = threading.Event()
    problems: list[str] = []
    num_read = [0] * 4

    def read_on(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            chosen = rng.sample(range(len(steady)), 9)
            images = read_back(store, [steady[i].head for i in chosen], [refs[i] for i in chosen])
            for i, image in zip(chosen, images, strict=True):
                if not isinstance(image, memoryview) or not same_parts(image, steady[i].image, steady[i].head):
                    problems.append(str(image))
            num_read[number] += 1

    threads = [threading.Thread(target=read_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for seed in range(1, 25):
        store.delete(store.write([item.pair for item in chain(12, seed=seed)]))
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems[:3]
    assert min(num_read) > 0
    store.check()
    store.close()


def test_a_deleted_record_is_a_miss_and_deleting_again_is_nothing(tmp_path: Path) -> None:
    items = chain(8)
    store = open_store(tmp_path)
    refs = store.write([item.pair for item in items])
    store.delete(refs[:3])
    store.delete(refs[:3])
    assert store.stats.records_deleted == 3
    answers = read_back(store, [item.head for item in items], refs)
    assert [isinstance(answer, RecordFlaw) for answer in answers] == [True] * 3 + [False] * 7
    assert check_contents(store, items[3:]).isdisjoint({item.head.key for item in items[:3]})
    store.check()
    store.close()


def test_the_bytes_of_a_deleted_record_stay_until_its_reader_has_gone(tmp_path: Path) -> None:
    items = chain(1)
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files)
    refs = store.write([item.pair for item in items])
    reading, go_on = threading.Event(), threading.Event()

    def hold(name: str, number: int) -> None:
        if name == "pread":
            reading.set()
            assert go_on.wait(10)

    files.on_op = hold
    answers: list[memoryview | RecordFlaw] = []
    thread = threading.Thread(target=lambda: answers.extend(read_back(store, [items[0].head], refs)))
    thread.start()
    assert reading.wait(10)
    store.delete(refs)
    assert files.steps[Step.DELETE_COMMITTED] == 1
    assert files.steps[Step.RECORD_ERASED] == 0
    go_on.set()
    thread.join()
    assert isinstance(answers[0], memoryview)
    assert same_parts(answers[0], items[0].image, items[0].head)
    store.check()
    assert files.steps[Step.RECORD_ERASED] == 1
    store.close()


def test_a_record_of_the_same_key_replaces_the_older(tmp_path: Path) -> None:
    items = chain(4)
    store = open_store(tmp_path)
    old = store.write([item.pair for item in items])
    new = store.write([item.pair for item in items])
    assert {entry.ref for entry in store.entries()} == set(new)
    answers = read_back(store, [item.head for item in items], old)
    assert all(isinstance(answer, RecordFlaw) for answer in answers)
    store.check()
    check_contents(store, items)
    store.close()


def test_uses_pins_and_quotas_are_kept(tmp_path: Path) -> None:
    items = chain(4)
    store = open_store(tmp_path)
    refs = store.write([item.pair for item in items], last_use=1)
    store.touch(refs[:2], 50)
    store.touch(refs[:1], 60)
    store.set_pin(Pin("tests", b"k" * 32, None))
    store.set_pin(Pin("tests", b"l" * 32, 100))
    store.set_pin(Pin("tests", b"l" * 32, 200))
    store.set_quota(Quota("tests", 5, None))
    store.set_quota(Quota("others", None, 6))
    assert store.remove_quota("others")
    assert not store.remove_quota("others")
    store.close()
    store = open_store(tmp_path)
    assert {entry.ref: entry.last_use for entry in store.entries()} == dict(zip(refs, (60, 50, 1, 1, 1), strict=True))
    assert store.pins() == [Pin("tests", b"k" * 32, None), Pin("tests", b"l" * 32, 200)]
    assert store.quotas() == [Quota("tests", 5, None)]
    assert store.remove_pin("tests", b"k" * 32)
    assert not store.remove_pin("tests", b"k" * 32)
    assert len(store.pins()) == 1
    store.close()


def times_of(items: list[Item], expires_at: int | None) -> list[TimeToLive]:
    """One for each block."""
    keys = sorted({item.head.key for item in items})
    return [TimeToLive("tests", key, expires_at) for key in keys]


def test_times_to_live_are_kept_while_a_record_has_their_key(tmp_path: Path) -> None:
    items = chain(4)
    store = open_store(tmp_path)
    refs = store.write([item.pair for item in items])
    times = times_of(items, 200)
    store.set_times_to_live(times_of(items, 100))
    store.set_times_to_live([*times, TimeToLive("tests", b"k" * 32, 200)])
    store.set_times_to_live([replace(times[0], expires_at=None), replace(times[1], expires_at=None)])
    store.set_times_to_live([replace(times[0], expires_at=None)])  # there is none any more
    assert store.times_to_live() == sorted([*times[2:], TimeToLive("tests", b"k" * 32, 200)], key=lambda time: time.key)
    store.close()
    other = open_store(tmp_path, identity=replace(IDENTITY, fingerprint=b"o" * 32))
    assert other.times_to_live() == times[2:], "that of no record goes, those of other engines stay"
    other.close()
    store = open_store(tmp_path)
    store.delete(refs)
    assert store.times_to_live() == times[2:]
    store.close()
    store = open_store(tmp_path)
    assert store.times_to_live() == []
    store.check()
    store.close()


def test_a_pin_takes_the_place_of_a_time_to_live_and_a_later_one_stays_beside_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    time = TimeToLive("tests", b"k" * 32, 100)
    other = replace(time, namespace="others")
    store.set_times_to_live([time, other])
    store.set_pin(Pin("tests", b"k" * 32, None))
    assert store.times_to_live() == [other]
    store.set_times_to_live([time])
    assert store.times_to_live() == [other, time]
    assert len(store.pins()) == 1
    store.close()


def test_an_index_that_was_made_without_times_to_live_gains_them_and_loses_nothing(tmp_path: Path) -> None:
    items = chain(4)
    store = open_store(tmp_path)
    store.write([item.pair for item in items])
    store.set_pin(Pin("tests", b"k" * 32, None))
    store.close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        db.execute("DROP TABLE time_to_live")
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    store = open_store(tmp_path)
    assert not store.recovery.rebuilt
    assert store.times_to_live() == []
    assert len(store.pins()) == 1
    check_contents(store, items)
    store.set_times_to_live(times_of(items, 100))
    store.close()
    store = open_store(tmp_path)
    assert store.times_to_live() == times_of(items, 100)
    store.close()


def test_what_a_trial_found_is_remembered(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write([chain(1)[0].pair])
    store.close()
    found = store._changes._encoder.codings
    store = open_store(tmp_path)
    assert store._changes._encoder.codings == found
    assert found[RecordKind.BLOCK][0] is Coding.SPLIT
    assert RecordKind.CHECKPOINT not in found, "nothing was tried on it"
    store.close()


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreLocked):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(StoreUnusable):
        open_store(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("reason", ["fingerprint", "numerics profile", "version"])
def test_what_another_wrote_is_counted_never_served_and_can_be_reclaimed(tmp_path: Path, reason: str) -> None:
    other = (
        replace(IDENTITY, fingerprint=b"o" * 32) if reason == "fingerprint" else replace(IDENTITY, profile=b"o" * 32)
    )
    store = open_store(tmp_path, identity=other)
    items = chain(8, identity=other)
    refs = store.write([item.pair for item in items])
    store.close()
    if reason == "version":
        make_older(tmp_path)
    store = open_store(tmp_path)
    mine = chain(4, seed=1)
    store.write([item.pair for item in mine])
    assert check_contents(store, mine) == {item.head.key for item in mine}
    (unreadable,) = store.unreadable()
    assert (unreadable.reason, unreadable.num_records) == (reason, len(items))
    # A caller that asks all the same, by reference, gets nothing.
    assert all(isinstance(answer, RecordFlaw) for answer in read_back(store, [item.head for item in items], refs))
    store.check()
    before = store.usage_bytes
    rest = sum(entry.stored_bytes for entry in store.unreadable())
    assert sum(ref.stored_bytes for ref in store.reclaim_unreadable(rest)) == rest
    assert store.unreadable() == []
    assert store.usage_bytes < before or not rest
    check_contents(store, mine)
    store.check()
    store.close()


def make_older(directory: Path) -> None:
    """All records as an older version would have written them; the index is lost with it."""
    for path in (directory / "segments").iterdir():
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 4096):
            if bytes(data[at : at + 8]) == MAGIC:
                data[at + 8 : at + 10] = (0).to_bytes(2, "little")
                data[at + 24 : at + 32] = xxhash.xxh3_64_digest(bytes(data[at : at + 24]))
        path.write_bytes(data)
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (directory / name).unlink(missing_ok=True)


def test_what_was_computed_fast_serves_another_machine(tmp_path: Path) -> None:
    store = open_store(tmp_path, identity=replace(IDENTITY, profile=b"o" * 32))
    items = chain(4, provenance=Provenance.FAST)
    store.write([item.pair for item in items])
    store.close()
    store = open_store(tmp_path)
    check_contents(store, items)
    assert [other.reason for other in store.unreadable()] == ["provenance"], "an exact engine does not read them"
    store.close()


def test_a_model_without_slots_and_one_without_planes_are_stored(tmp_path: Path) -> None:
    for number, layout in enumerate(
        (StateLayout(LAYOUT.planes, (), 8), StateLayout((Plane("k", "bfloat16", (1,)),), LAYOUT.slots, 8))
    ):
        identity = Identity(bytes([number]) * 32, b"p" * 32, layout)
        store = open_store(tmp_path, identity=identity)
        items = chain(5, identity=identity)
        store.write([item.pair for item in items])
        check_contents(store, items)
        store.close()


def test_a_record_longer_than_a_run_is_read(tmp_path: Path) -> None:
    layout = StateLayout((Plane("k", "bfloat16", (8, 8192)),), (), 64)
    identity = Identity(b"w" * 32, b"p" * 32, layout)
    assert layout.block_bytes > 4 << 20
    store = open_store(tmp_path, identity=identity, quota_bytes=200 << 20)
    items = chain(3, identity=identity)
    refs = store.write([item.pair for item in items])
    for item, image in zip(items, read_back(store, [item.head for item in items], refs), strict=True):
        assert isinstance(image, memoryview)
        assert image == image_of(item.head, identity)
    store.close()


def test_scrubbing_reads_everything_and_reports_progress(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    refs = store.write([item.pair for item in chain(12)])
    steps: list[tuple[int, int]] = []
    assert store.verify(lambda done, total: steps.append((done, total))) == []
    total = sum(ref.stored_bytes for ref in refs)
    assert steps[-1] == (total, total)
    assert len(steps) == len(refs)
    store.close()


def test_thousands_of_small_turns_keep_files_and_index_small(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota_bytes=8 << 20)
    sizes: list[int] = []
    for seed in range(120):
        refs = store.write([item.pair for item in chain(4, seed=seed)])
        store.delete(refs)
        sizes.append(store.usage_bytes)
    assert max(sizes[60:]) <= max(sizes[:60]), "it grows"
    assert store._keeper.segments.num_files <= 2
    store.check()
    store.close()


def test_no_file_handle_and_no_thread_is_left(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    handles, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for seed in range(5):
        store = open_store(tmp_path, limits=StoreLimits(num_read_threads=3))
        store.write([item.pair for item in chain(4, seed=seed)])
        check_contents(store)
        store.close()
    assert len(os.listdir("/proc/self/fd")) == handles
    assert threading.active_count() == threads


def test_a_file_system_without_holes_is_found_out(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)

    def refuse(name: str, number: int) -> None:
        if name == "punch":
            raise no_holes()

    files.on_op = refuse
    store = open_store(tmp_path, files=files, limits=StoreLimits())
    refs = store.write([item.pair for item in chain(4)])
    store.delete(refs[:1])
    assert isinstance(read_back(store, [chain(4)[0].head], refs[:1])[0], RecordFlaw)
    check_contents(store, chain(4)[1:])
    store.check()
    store.close()
    assert os.listdir(tmp_path / "segments"), "the probe's file is gone, the segment is not"
    assert "probe" not in os.listdir(tmp_path)


def test_flaws_name_their_cause(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    items = chain(1)
    refs = store.write([item.pair for item in items])
    for wrong, flaw in (
        (replace(refs[0], generation=1), Flaw.MISPLACED),
        (replace(refs[0], segment=99), Flaw.MISSING),
        (replace(refs[0], offset=1 << 30), Flaw.MISSING),
    ):
        (answer,) = read_back(store, [items[0].head], [wrong])
        assert isinstance(answer, RecordFlaw)
        assert answer.flaw is flaw
    assert store.quota_bytes == QUOTA_BYTES
    store.close()


def test_no_other_user_may_read_a_file_of_it_whatever_its_directory_lets_them(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        store = open_store(directory)
        store.write([item.pair for item in chain(3)])  # the index has the tokens, which are the prompts
        modes = {path.name: path.stat().st_mode & 0o077 for path in directory.rglob("*") if path.is_file()}
        store.close()
    finally:
        os.umask(before)
    assert len(modes) >= 4
    assert set(modes.values()) == {0}, modes
