"""The front's threads keep to one processor, and only they do."""

import os
from pathlib import Path

import psutil
import pytest

from daemon.front.processor import FEW
from tests.front.harness import Front, running_front

GIVEN = os.sched_getaffinity(0)
several = pytest.mark.skipif(not 1 < len(GIVEN) <= FEW, reason=f"wants 2 to {FEW} processors, has {len(GIVEN)}")


def processors_of_threads(pid: int) -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path(f"/proc/{pid}/task").iterdir()}


def policies_of_threads(pid: int) -> dict[int, int]:
    tasks = (int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    return {task: os.sched_getscheduler(task) for task in tasks}


def ask(front: Front) -> None:
    """So that all its threads are there."""
    assert front.sequences() == []


@several
def test_all_threads_of_the_front_share_a_processor_and_its_children_have_them_all(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        ask(front)
        (kept,) = processors_of_threads(front.process.pid)
        assert len(kept) == 1
        children = psutil.Process(front.process.pid).children(recursive=True)
        assert len(children) >= 2, "the engine and the tokenizers"
        assert {of for child in children for of in processors_of_threads(child.pid)} == {frozenset(GIVEN)}
        assert {of for child in children for of in policies_of_threads(child.pid).values()} == {os.SCHED_OTHER}


@several
def test_the_event_loop_goes_first_and_the_other_threads_of_the_front_take_turns(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        ask(front)
        policies = policies_of_threads(front.process.pid)
        assert policies.pop(front.process.pid) == os.SCHED_OTHER
        assert len(policies) >= 2, "gRPC's threads"
        assert set(policies.values()) == {os.SCHED_BATCH}


@several
def test_the_front_has_every_processor_where_it_is_told_so(tmp_path: Path) -> None:
    with running_front(tmp_path, flags=("--one-processor", "false")) as front:
        ask(front)
        assert processors_of_threads(front.process.pid) == {frozenset(GIVEN)}
