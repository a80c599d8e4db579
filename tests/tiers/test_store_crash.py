"""A crash at every persistence step, with every kind of loss of what was not synced: what was committed is there."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.campaigns.budget import first_seed, is_full
from tests.sim.files import Crash, SimFiles, fail_with
from tests.sim.history import LIMITS, QUOTA_BYTES, History, check_survivor, work
from tests.tiers.stores import open_store
from tiers.errors import StoreError
from tiers.files import Abilities, Step

LOSSES = 4 if is_full() else 1  # different ones after each crash
NUM_TURNS = 30 if is_full() else 16
DEEPEST = 4 if is_full() else 0  # each step is crashed so often from its first time on, and once at random


def prepare(directory: Path, start: str, seed: int) -> History:
    """A directory to begin with: none, a used one, or a used one whose index or last segment is damaged."""
    history = History()
    if start == "empty":
        return history
    store = open_store(directory, quota_bytes=QUOTA_BYTES, limits=LIMITS)
    work(store, history, history.tell, random.Random(seed), NUM_TURNS)
    store.close()
    if start == "damaged index":
        (directory / "index.sqlite").write_bytes(b"not a database" * 1000)
    if start == "torn tail":
        last = max((directory / "segments").iterdir())
        with last.open("ab") as file:
            file.write(random.Random(seed).randbytes(10_000))
    return history


@pytest.mark.parametrize(
    ("start", "has_holes"),
    [("empty", True), ("used", True), ("damaged index", False), ("torn tail", True)]
    + [("empty", False), ("used", False), ("damaged index", True), ("torn tail", False)] * is_full(),
)
def test_after_a_crash_at_any_step_what_was_committed_is_there(tmp_path: Path, start: str, has_holes: bool) -> None:
    seed = first_seed()
    before = tmp_path / "before"
    history = prepare(before, start, seed)
    steps = run(before, tmp_path, start, has_holes, seed, None, history)
    expected = {Step.DATA_WRITTEN, Step.DATA_SYNCED, Step.WRITE_COMMITTING, Step.WRITE_COMMITTED}
    expected |= {Step.DELETE_COMMITTING, Step.DELETE_COMMITTED, Step.RECORD_ERASED, Step.SEGMENT_UNLINKED}
    expected |= {
        "empty": {Step.INDEX_CREATED, Step.SEGMENT_CREATED, Step.DIRECTORY_SYNCED},
        "used": set[Step](),
        "damaged index": {Step.INDEX_REMOVED, Step.INDEX_CREATED, Step.RECOVERY_COMMITTING},
        "torn tail": {Step.TAIL_CUT, Step.RECOVERY_COMMITTED},
    }[start]
    assert expected <= set(steps), f"never reached: {expected - set(steps)}"
    rng = random.Random(seed)
    for step, count in steps.items():
        for nth in {*range(1, min(count, DEEPEST) + 1), rng.randint(1, count)}:
            run(before, tmp_path, start, has_holes, seed, (step, nth), history)


def run(
    before: Path,
    tmp_path: Path,
    start: str,
    has_holes: bool,
    seed: int,
    crash_at: tuple[Step, int] | None,
    history: History,
) -> Counter[Step]:
    """Works on a copy until the crash, then opens what each loss leaves. The steps that were reached."""
    name = "whole" if crash_at is None else f"{crash_at[0].value.replace(' ', '-')}-{crash_at[1]}"
    folder = tmp_path / name
    directory = folder / "disk"
    if before.exists():
        shutil.copytree(before, directory)
    else:
        folder.mkdir()
    told = History(set(history.there), set(history.unsure), set(history.gone))
    at_crash: list[History] = []
    files = SimFiles(directory, abilities=Abilities(direct=True, punch=has_holes))
    rng = random.Random(f"{seed} {name}")

    def dead(op: str, number: int) -> None:
        raise fail_with(5)

    def on_step(step: Step, number: int) -> None:
        if (step, number) == crash_at:
            for loss in range(LOSSES):
                files.copy_after_crash(folder / f"loss-{loss}", rng)
            at_crash.append(History(set(told.there), set(told.unsure), set(told.gone)))
            files.on_op = dead
            raise Crash

    files.on_step = on_step
    store = None
    try:
        store = open_store(directory, quota_bytes=QUOTA_BYTES, files=files, limits=LIMITS)
        work(store, told, told.tell, random.Random(seed + 1), NUM_TURNS)
        store.check()
    except (Crash, StoreError):
        assert at_crash
    finally:
        if store is not None:
            store.close()
    if crash_at is None:
        check_survivor(directory, told)
    else:
        assert at_crash, f"{crash_at} was not reached again"
        for loss in range(LOSSES):
            seen = at_crash[0]
            check_survivor(folder / f"loss-{loss}", History(set(seen.there), set(seen.unsure), set(seen.gone)))
    shutil.rmtree(folder)
    return files.steps


def test_the_crash_that_is_tested_does_lose_something(tmp_path: Path) -> None:
    """The control: without a sync of the data before the commit, the same test fails."""
    directory = tmp_path / "disk"
    files = SimFiles(directory)
    store = open_store(directory, files=files, limits=LIMITS)
    files.sync = lambda fd: None  # type: ignore[method-assign]
    history = History()
    work(store, history, history.tell, random.Random(3), 10)
    for number in range(20):
        files.copy_after_crash(tmp_path / f"lost-{number}", random.Random(number))
    store.close()
    num_failed = 0
    for number in range(20):
        try:
            check_survivor(tmp_path / f"lost-{number}", history)
        except AssertionError:
            num_failed += 1
    assert num_failed > 5
