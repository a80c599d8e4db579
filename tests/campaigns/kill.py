"""Kills: the real store on real files, in a process that is killed at every step and at any instant.

`make campaign kill` kills 2,000 times and writes its figures to results/kill.json; the test run does a fraction. After
each kill the directory opens in bounded time, every record that was acknowledged is there to the byte, none that was
deleted is, and the books agree. The kills:

- at every named step of persistence, first and later times, losing any part of what was not synced;
- at a random operation, and at a random instant, with the same loss;
- from outside, by SIGKILL at a random instant, which loses nothing but the process.

Work goes on in the same directory; now and then its index or the end of its last segment is damaged in between.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from tests.campaigns.budget import first_seed
from tests.sim.files import BACKUPS, SimFiles
from tests.sim.history import LIMITS, QUOTA_BYTES, History, Id, check_survivor, line_of, work
from tests.tiers.stores import open_store
from tiers.files import Step

KILLS = 2000
RESULT = Path("tests/campaigns/results/kill.json")
KILLS_A_DIRECTORY = 40
LATEST_S = 0.12  # an instant is up to so long after the store has opened
LATEST_OP = 150
WAYS = ("operation", "instant", "outside")


@dataclass(frozen=True, slots=True)
class Plan:
    """When to die."""

    way: str  # "step" or one of WAYS
    step: Step | None = None
    nth: int = 0  # of the step, or number of the operation
    after_s: float = 0.0


@dataclass(slots=True)
class Figures:
    """What the campaign did."""

    kills: Counter[str] = field(default_factory=Counter[str])  # by way
    steps: Counter[str] = field(default_factory=Counter[str])  # kills by step
    damaged_before: Counter[str] = field(default_factory=Counter[str])
    records_compared: int = 0
    unsure_records: int = 0  # in flight when the process died: there or not, both are right
    slowest_open_s: float = 0.0  # by the clock, beside whatever else the machine does


class Campaign:
    """One directory after the other, worked on by child processes that die."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.figures = Figures()
        self._folder = folder
        self._rng = random.Random(seed)
        self._num_directories = 0
        self._begin_directory()

    def run(self, num_kills: int) -> Figures:
        """Every step first, twice; then any instant."""
        for nth in (1, 2):
            for step in Step:
                damage = {Step.INDEX_CREATED: "index", Step.INDEX_REMOVED: "index", Step.TAIL_CUT: "tail"}.get(step)
                damage = "tail" if step in (Step.RECOVERY_COMMITTING, Step.RECOVERY_COMMITTED) else damage
                if damage is None or nth == 1:
                    self.kill(Plan("step", step, nth), damage)
        while self.figures.kills.total() < num_kills:
            way = self._rng.choice(WAYS)
            damage = self._rng.choice(("index", "tail")) if self._rng.random() < 0.05 else None
            after_s = self._rng.random() * LATEST_S
            self.kill(Plan(way, None, self._rng.randint(1, LATEST_OP), after_s), damage)
        return self.figures

    def kill(self, plan: Plan, damage: str | None) -> None:
        """One child's life and death, and what it left."""
        if self.figures.kills.total() % KILLS_A_DIRECTORY == KILLS_A_DIRECTORY - 1:
            self._begin_directory()
        if damage is not None:
            self._damage(damage)
        self._live_and_die(plan)
        self.figures.kills[plan.way] += 1
        if plan.step is not None:
            self.figures.steps[plan.step.value] += 1
        self.figures.records_compared += len(self._history.there)
        self.figures.unsure_records += len(self._history.unsure)
        open_s = check_survivor(self._directory, self._history)
        self.figures.slowest_open_s = max(self.figures.slowest_open_s, round(open_s, 3))
        shutil.rmtree(self._folder / BACKUPS, ignore_errors=True)

    def _begin_directory(self) -> None:
        if self._num_directories:
            shutil.rmtree(self._directory)
        self._num_directories += 1
        self._directory = self._folder / f"disk-{self._num_directories}"
        self._history = History()
        store = open_store(self._directory, quota_bytes=QUOTA_BYTES, limits=LIMITS)
        work(store, self._history, self._history.tell, random.Random(self._rng.random()), 3)
        store.close()

    def _damage(self, what: str) -> None:
        self.figures.damaged_before[what] += 1
        if what == "index":
            (self._directory / "index.sqlite").write_bytes(self._rng.randbytes(20_000))
        else:
            with max((self._directory / "segments").iterdir()).open("ab") as file:
                file.write(self._rng.randbytes(9_000))

    def _live_and_die(self, plan: Plan) -> None:
        reader, writer = os.pipe()
        seed = self._rng.random()
        child = os.fork()
        if not child:
            os.close(reader)
            _die_by_plan(self._directory, self._history, seed, plan, writer)
        os.close(writer)
        try:
            data = _read_all(reader, kill=child if plan.way == "outside" else None, after_s=plan.after_s)
        finally:
            os.close(reader)
            _, status = os.waitpid(child, 0)
        lines = data.decode().splitlines(keepends=True)
        assert os.WIFSIGNALED(status), f"{plan}: the child ended by itself: {lines[-1:]}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        for line in lines:
            if line.endswith("\n"):  # the last one may be cut, and then was not said
                self._history.tell_line(line)


def _read_all(reader: int, *, kill: int | None, after_s: float) -> bytes:
    """What the child says until it is dead; kills it so long after its first word if asked to."""
    data, deadline = b"", None
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if select.select([reader], [], [], left_s)[0]:
            piece = os.read(reader, 1 << 16)
            if not piece:
                return data
            data += piece
        if kill is not None and deadline is None and data:
            deadline = time.monotonic() + after_s
        if kill is not None and deadline is not None and time.monotonic() >= deadline:
            os.kill(kill, signal.SIGKILL)
            kill, deadline = None, None


def _die_by_plan(directory: Path, history: History, seed: float, plan: Plan, writer: int) -> None:
    """The child: works until the plan kills it."""
    files = SimFiles(directory)
    rng = random.Random(seed)

    def die() -> None:
        with files.mutex:
            files.lose(rng)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(step: Step, number: int) -> None:
        if plan.way == "step" and step is plan.step and number == plan.nth:
            die()

    def on_op(name: str, number: int) -> None:
        if plan.way == "operation" and number == plan.nth:
            die()

    def tell(event: str, ids: list[Id]) -> None:
        history.tell(event, ids)
        os.write(writer, line_of(event, ids).encode())

    try:
        files.on_step, files.on_op = on_step, on_op
        store = open_store(directory, quota_bytes=QUOTA_BYTES, files=files, limits=LIMITS)
        if plan.way == "instant":
            threading.Timer(plan.after_s, die).start()
        work(store, history, tell, random.Random(seed), 1_000_000)
    except BaseException as error:
        os.write(writer, f"{error!r}\n".encode())
    finally:
        os._exit(1)


def main() -> int:
    """The whole campaign, or so many kills of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    seed, began = first_seed(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dc-kill-") as folder:
        figures = Campaign(Path(folder), seed).run(arguments.kills)
    result = {
        "campaign": "kill",
        "seed": seed,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "seconds": round(time.monotonic() - began, 1),
        "total_kills": figures.kills.total(),
        **{part.name: getattr(figures, part.name) for part in fields(figures)},
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['total_kills']} kills, {figures.records_compared} records compared, none wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
