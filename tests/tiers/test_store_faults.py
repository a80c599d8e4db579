"""A disk that fails, fills up, stalls or turns read-only, at every operation: bounded, visible, never wrong, and over
when the disk is well again."""

import errno
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.files import SimFiles, fail_with
from tests.tiers.stores import Item, chain, check_contents, du, open_store, read_back, same_parts
from tiers.errors import StoreDegraded, StoreError, StoreUnusable
from tiers.files import Abilities, Step
from tiers.health import Gate, StoreState
from tiers.index import Pin
from tiers.records import Flaw, RecordFlaw, RecordRef
from tiers.store import DiskStore, StoreLimits

QUOTA_BYTES = 4 << 20
CHANGES = ("create", "open_write", "pwrite", "sync", "sync_directory", "punch", "truncate", "unlink")
QUICK = StoreLimits(write_deadline_s=0.15, read_stall_s=0.1, num_read_threads=2, segment_bytes=64 << 10)
PATIENT = StoreLimits(write_deadline_s=20, read_stall_s=20, num_read_threads=2, segment_bytes=64 << 10)


@pytest.fixture(autouse=True)
def _short_probation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.health.FIRST_PROBATION_S", 0.0)


class Scenario:
    """A short life of a store: what it acknowledged, whatever failed meanwhile."""

    def __init__(self) -> None:
        self.there: dict[RecordRef, Item] = {}
        self.unsure: list[Item] = []
        self.num_failures = 0

    def play(self, store: DiskStore) -> None:
        """Three paths written, one deleted, one replaced, all read, and settings."""
        for seed in range(3):
            self.attempt(lambda seed=seed: self.write(store, chain(10, seed=seed)))
        self.attempt(lambda: self.delete(store, list(self.there)[:8]))
        self.attempt(lambda: self.write(store, chain(10, seed=2)[:4]))
        self.attempt(lambda: store.set_pin(Pin("tests", b"k" * 32, None)))
        store.touch(list(self.there), 9)
        self.read(store)
        self.attempt(lambda: self.delete(store, list(self.there)[-4:]))

    def attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except StoreError:
            self.num_failures += 1

    def write(self, store: DiskStore, items: list[Item]) -> None:
        keys = {(item.head.kind, item.head.key) for item in items}
        replaced = [ref for ref, item in self.there.items() if (item.head.kind, item.head.key) in keys]
        refs = store.write([item.pair for item in items])
        for ref in replaced:
            del self.there[ref]
        self.there |= dict(zip(refs, items, strict=True))

    def delete(self, store: DiskStore, refs: list[RecordRef]) -> None:
        self.unsure += [self.there.pop(ref) for ref in refs]
        store.delete(refs)

    def read(self, store: DiskStore) -> None:
        """Either the very bytes or a flaw; a record with a flaw may have been given up for good."""
        refs, items = list(self.there), list(self.there.values())
        for ref, item, answer in zip(refs, items, read_back(store, [i.head for i in items], refs), strict=True):
            if isinstance(answer, RecordFlaw):
                self.num_failures += 1
                del self.there[ref]
            else:
                assert same_parts(answer, item.image, item.head)


def one_time(at: int, code: int) -> Callable[[str, int], None]:
    """Operation number `at` fails."""

    def on_op(name: str, number: int) -> None:
        if number == at:
            raise fail_with(code)

    return on_op


def from_then_on(at: int, code: int) -> Callable[[str, int], None]:
    """Every change from operation `at` on fails, reads do not."""

    def on_op(name: str, number: int) -> None:
        if number >= at and name in CHANGES:
            raise fail_with(code)

    return on_op


FAULTS = {
    "one EIO": lambda at: one_time(at, errno.EIO),
    "one ENOSPC": lambda at: one_time(at, errno.ENOSPC),
    "no space from then on": lambda at: from_then_on(at, errno.ENOSPC),
    "read-only from then on": lambda at: from_then_on(at, errno.EROFS),
    "immutable from then on": lambda at: from_then_on(at, errno.EPERM),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_at_any_operation_is_survived(tmp_path: Path, fault: str) -> None:
    counting = SimFiles(tmp_path / "count")
    store = open_store(tmp_path / "count", files=counting, quota_bytes=QUOTA_BYTES, limits=PATIENT)
    Scenario().play(store)
    store.close()
    assert counting.num_ops > 40
    num_failures = 0
    for at in range(1, counting.num_ops + 1):
        num_failures += survive(tmp_path / f"at-{at}", FAULTS[fault](at))
    assert num_failures > counting.num_ops // 3, "the faults were felt"


def survive(directory: Path, on_op: Callable[[str, int], None]) -> int:
    """Plays with the fault and once more without it; then opens again. How many calls failed."""
    files = SimFiles(directory)
    files.on_op = on_op
    scenario = Scenario()
    most = 0

    def watch(step: Step, number: int) -> None:
        nonlocal most
        most = max(most, du(directory))

    files.on_step = watch
    try:
        store = open_store(directory, files=files, quota_bytes=QUOTA_BYTES, limits=PATIENT)
    except StoreUnusable:
        return 1  # the tier stays off, visibly
    scenario.play(store)
    failures = scenario.num_failures
    files.on_op = lambda name, number: None  # the disk is well again
    more = chain(5, seed=7)
    scenario.write(store, more)  # the probe, after which all is as before
    assert store.health.state is StoreState.OK
    scenario.read(store)
    assert scenario.num_failures == failures, "what was acknowledged is still there"
    store.check()
    assert most <= QUOTA_BYTES
    store.close()
    store = open_store(directory, quota_bytes=QUOTA_BYTES, limits=PATIENT)
    check_contents(store, list(scenario.there.values()))
    store.check()
    assert store.usage_bytes == du(directory)
    store.close()
    return failures


@pytest.mark.parametrize(
    "step", [Step.WRITE_COMMITTING, Step.DELETE_COMMITTING, Step.SETTING_COMMITTING, Step.RECOVERY_COMMITTING]
)
def test_a_failing_index_undoes_the_whole_change(tmp_path: Path, step: Step) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=PATIENT)
    kept = Scenario()
    kept.write(store, chain(8))

    def fail(reached: Step, number: int) -> None:
        if reached is step:
            raise fail_with(errno.ENOSPC)

    files.on_step = fail
    failed = 0
    for act in (
        lambda: store.write([item.pair for item in chain(8, seed=1)]),
        lambda: store.delete(list(kept.there)[:3]),
        lambda: store.set_pin(Pin("tests", b"k" * 32, None)),
    ):
        try:
            act()
        except StoreDegraded:
            failed += 1
    assert failed == (0 if step is Step.RECOVERY_COMMITTING else 1)
    files.on_step = lambda step, number: None
    store.check()
    if step is Step.WRITE_COMMITTING:
        assert {entry.ref for entry in store.entries()} == set(list(kept.there)[3:])
    if step is Step.DELETE_COMMITTING:
        kept.read(store)
        assert kept.num_failures == 0
    store.close()


def test_short_writes_are_finished(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    files.most_written = 4096
    store = open_store(tmp_path, files=files, limits=PATIENT)
    items = chain(10)
    store.write([item.pair for item in items])
    check_contents(store, items)
    assert files.num_ops > 15
    store.close()


def test_a_failed_sync_abandons_the_segment(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=StoreLimits())
    first = store.write([item.pair for item in chain(4)])

    def fail(name: str, number: int) -> None:
        if name == "sync":
            raise fail_with(errno.EIO)

    files.on_op = fail
    with pytest.raises(StoreDegraded):
        store.write([item.pair for item in chain(4, seed=1)])
    assert store.health.state is StoreState.READ_ONLY
    assert "Input/output" in store.health.reason
    files.on_op = lambda name, number: None
    second = store.write([item.pair for item in chain(4, seed=1)])
    assert second[0].segment > first[0].segment, "the file is not tried again"
    assert store.health.state is StoreState.OK
    check_contents(store, [*chain(4), *chain(4, seed=1)])
    store.check()
    store.close()
    for number in range(10):
        files.copy_after_crash(tmp_path.parent / f"lost-{number}", random.Random(number))
        again = open_store(tmp_path.parent / f"lost-{number}")
        check_contents(again, [*chain(4), *chain(4, seed=1)])
        again.close()


def test_a_stalled_write_has_a_deadline_and_no_late_effect(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=QUICK)
    store.write([item.pair for item in chain(2)])
    release = threading.Event()

    def stall(name: str, number: int) -> None:
        if name == "pwrite":
            assert release.wait(20)

    files.on_op = stall
    began = time.monotonic()
    with pytest.raises(StoreDegraded, match="longer"):
        store.write([item.pair for item in chain(2, seed=1)])
    assert store.health.state is StoreState.READ_ONLY
    for _ in range(20):
        with pytest.raises(StoreDegraded):
            store.write([item.pair for item in chain(2, seed=1)])
    assert time.monotonic() - began < 5, "only the first one waits"
    check_contents(store, chain(2))  # reads go on
    release.set()
    files.on_op = lambda name, number: None
    deadline = time.monotonic() + 10
    while True:
        try:
            store.write([item.pair for item in chain(2, seed=2)])
            break
        except StoreDegraded:
            assert time.monotonic() < deadline
    store.check()
    assert check_contents(store, [*chain(2), *chain(2, seed=2)]) == {
        item.head.key for item in (*chain(2), *chain(2, seed=2))
    }, "the late write came in after all"
    store.close()


def test_a_stalled_read_has_a_deadline_and_writes_nothing_late(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=QUICK)
    items = chain(3)
    refs = store.write([item.pair for item in items])
    release = threading.Event()

    def stall(name: str, number: int) -> None:
        if name == "pread":
            assert release.wait(20)

    files.on_op = stall
    targets = [memoryview(bytearray(b"\x5a" * len(item.image))) for item in items]
    requests = [(item.head, ref, target) for item, ref, target in zip(items, refs, targets, strict=True)]
    began = time.monotonic()
    for _ in range(3):
        answers = store.read(requests)
        assert {answer.flaw for answer in answers if answer is not None} == {Flaw.LATE}
    assert store.health.state is StoreState.DEGRADED
    assert time.monotonic() - began < 5
    reader = store._reader
    assert reader.fence.num_readers > 0, "the kernel has its buffers still"
    release.set()
    files.on_op = lambda name, number: None
    deadline = time.monotonic() + 10
    while reader.fence.num_readers:
        assert time.monotonic() < deadline
    assert all(target == b"\x5a" * len(target) for target in targets), "written to after its read had ended"
    assert store.read(requests) == [None] * 3, "late records are not quarantined"
    assert store.health.state is StoreState.OK
    store.check()
    store.close()


def test_one_stuck_read_is_late_although_others_go_on(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=QUICK)
    items = chain(3)
    refs = store.write([item.pair for item in items])
    release = threading.Event()
    num_reads = 0

    def stall(name: str, number: int) -> None:
        nonlocal num_reads
        if name == "pread":
            num_reads += 1
            assert num_reads > 1 or release.wait(20)

    files.on_op = stall
    late: list[memoryview | RecordFlaw] = []
    first = threading.Thread(target=lambda: late.extend(read_back(store, [items[0].head], refs[:1])))
    first.start()
    while not num_reads:
        assert first.is_alive()
    good = 0
    began = time.monotonic()
    while first.is_alive() and time.monotonic() - began < 10:
        good += isinstance(read_back(store, [items[1].head], refs[1:2])[0], memoryview)
    first.join(1)
    assert good > 3
    assert isinstance(late[0], RecordFlaw)
    assert late[0].flaw is Flaw.LATE
    release.set()
    store.close()


def test_a_read_with_a_deadline_of_its_own_keeps_it(tmp_path: Path) -> None:
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=PATIENT)
    items = chain(3)
    refs = store.write([item.pair for item in items])
    release = threading.Event()

    def stall(name: str, number: int) -> None:
        if name == "pread":
            assert release.wait(20)

    files.on_op = stall
    began = time.monotonic()
    target = memoryview(bytearray(len(items[0].image)))
    (answer,) = store.read([(items[0].head, refs[0], target)], timeout_s=0.05)
    assert time.monotonic() - began < 5
    assert isinstance(answer, RecordFlaw)
    assert answer.flaw is Flaw.LATE
    release.set()
    store.close()


def test_a_disk_that_cannot_read_is_left_alone_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.health.FIRST_PROBATION_S", 1e6)
    files = SimFiles(tmp_path)
    store = open_store(tmp_path, files=files, limits=PATIENT)
    items = chain(6)
    refs = store.write([item.pair for item in items])
    num_reads = 0

    def fail(name: str, number: int) -> None:
        nonlocal num_reads
        if name == "pread":
            num_reads += 1
            raise fail_with(errno.EIO)

    files.on_op = fail
    flaws = [read_back(store, [items[i].head], [refs[i]])[0] for i in range(6)]
    assert [flaw.flaw for flaw in flaws if isinstance(flaw, RecordFlaw)] == [Flaw.UNREADABLE] * 3 + [Flaw.REFUSED] * 3
    assert num_reads == 3
    health_now = store.health
    assert health_now.state is StoreState.DEGRADED
    assert health_now.retry_in_s > 1e5
    files.on_op = lambda name, number: None
    store._read_gate._retry_at = time.monotonic()  # probation is over
    assert isinstance(read_back(store, [items[5].head], [refs[5]])[0], memoryview)
    assert store.health.state is StoreState.OK
    assert len(list(store.entries())) == len(items), "a disk that could not read has lost nothing"
    store.close()


def test_probation_doubles_and_lets_one_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.health.FIRST_PROBATION_S", 1.0)
    gate = Gate(num_failures=1)
    now, waits = 100.0, []
    for _ in range(12):
        assert gate.admits(now)
        gate.failed(now, "EIO")
        assert not gate.admits(now)
        waits.append(gate.view(now).retry_in_s)
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert gate.admits(now)
    assert not gate.admits(now), "one at a time"
    gate.succeeded()
    assert gate.admits(now)
    assert gate.view(now).is_open


def test_a_record_that_cannot_be_erased_stops_nothing_and_is_erased_later(tmp_path: Path) -> None:
    files = SimFiles(tmp_path, abilities=Abilities(direct=True, punch=True))
    store = open_store(tmp_path, files=files, limits=PATIENT)
    groups = [store.write([item.pair for item in chain(12, seed=seed)]) for seed in range(4)]

    def fail(name: str, number: int) -> None:
        if name in ("punch", "unlink"):
            raise fail_with(errno.EPERM)

    files.on_op = fail
    before = store.usage_bytes
    for group in groups[:3]:
        store.delete(group)
    assert store.usage_bytes >= before, "what is not given back stays charged"
    check_contents(store, chain(12, seed=3))
    store.check()
    files.on_op = lambda name, number: None
    store.close()
    store = open_store(tmp_path, limits=PATIENT)
    assert store.usage_bytes < before
    assert len(list(store.entries())) == len(groups[3])
    store.check()
    store.close()
