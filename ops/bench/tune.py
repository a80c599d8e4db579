"""Finds the fastest launch choices of every tunable kernel on the card here, and writes the table that kernels read.

`python -m ops.bench.tune` goes over the cases of ops/bench/tune_rows.py and tune_wide.py. Each candidate is compared
with torch's form, and where the choice is said to reach no byte, its bytes with the default's; then it is timed beside
the default. A candidate is taken where it is faster everywhere that it was measured, twice over. The table is written
after each case, and a second run goes on where the first one ended (`--again` measures what is there, too).
"""

# Triton has no types.
# pyright: reportMissingTypeStubs=false

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton

from kernels.launch_table import Entry, Table, Timing, arch_of, read_table, table_path
from ops.bench.kernels_timing import DEVICE, MOST_SETS, ROTATED_BYTES, relative_error, time_us
from ops.bench.tune_case import Case, Rows, Tensors
from ops.bench.tune_rows import row_cases
from ops.bench.tune_wide import wide_cases

MOST_ERROR = 1e-2  # of bfloat16 results, relative, by norm
LEAST_GAIN = 0.02  # less is what two runs of the same differ by
WORST_RATIO = 1.03  # of a choice that gains elsewhere
MOST_PROCESSES = 14
BUDGET_S = 500.0  # no case is begun after it


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice, measured: microseconds by numbers of rows; or why it is not taken."""

    choice: Any
    us: dict[int, float]
    flaw: str | None = None

    def ratio(self, default: "Trial") -> float:
        """Geometric mean of the times, of the default's."""
        ratios = [self.us[rows] / default.us[rows] for rows in default.us]
        return prod(ratios) ** (1 / len(ratios)) if max(ratios) < WORST_RATIO else max(ratios)


def main() -> int:
    """Exit status 1 where a default failed or a case is left, 2 where there is no card."""
    parser = argparse.ArgumentParser(prog="ops.bench.tune", description=__doc__)
    parser.add_argument("--kernels", default="", help="only those whose name contains one of these, by commas")
    parser.add_argument("--again", action="store_true", help="measure what is in the table already, too")
    parser.add_argument("--table", type=Path, help="the table's file; default: the one that kernels read")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no case is begun after it")
    parser.add_argument("--compile", help="I/N: compile every N-th candidate and end; what a run does with its helpers")
    arguments = parser.parse_args()
    arch = arch_of(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
    if arch is None:
        print("there is no card to tune for", file=sys.stderr)
        return 2
    wanted = arguments.kernels.split(",")
    cases = [case for case in all_cases() if any(part in case.name for part in wanted)]
    if arguments.compile:
        index, count = map(int, arguments.compile.split("/"))
        compile_some(cases, index, count)
        return 0
    end = time.monotonic() + arguments.budget_s
    record = Record(arguments.table or table_path(arch), again=arguments.again)
    todo = [case for case in cases if record.lacks(case)]
    if todo:
        _compile_all([case.name for case in todo])
    failed = left = 0
    for case in todo:
        if time.monotonic() > end:
            left += 1
            continue
        entries, flaws = tune(case)
        failed += not entries
        print("\n".join([*(f"{case.name}: {flaw}" for flaw in flaws), *map(line, entries)]), flush=True)
        record.add(entries)
    print(f"\n{record.path}:\n" + "\n".join(map(line, record.table.entries)))
    if left:
        print(f"{left} cases are left: run it again to go on")
    return 1 if failed or left else 0


def all_cases() -> list[Case]:
    """What there is to tune."""
    return [*row_cases(), *wide_cases()]


class Record:
    """The table while it is made: read where it is there and of this card and these versions."""

    def __init__(self, path: Path, *, again: bool) -> None:
        self.path = path
        versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
        self.table = Table(torch.cuda.get_device_name(), time.strftime("%Y-%m-%d", time.gmtime()), versions)
        old = read_table(path)
        is_same = old is not None and (old.device, old.versions) == (self.table.device, versions)
        if old is not None and is_same:
            self.table = msgspec.structs.replace(self.table, entries=old.entries)
        self._known = {_key(entry) for entry in self.table.entries if not again}

    def lacks(self, case: Case) -> bool:
        """Whether a case is still to be measured."""
        return (case.tunable.kernel, *case.shape.values()) not in self._known

    def add(self, entries: list[Entry]) -> None:
        """Takes what was found of one case in the place of what was there, and writes the file."""
        new = {_key(entry) for entry in entries}
        kept = [entry for entry in self.table.entries if _key(entry) not in new]
        in_order = sorted([*kept, *entries], key=_key)  # a stable sort: buckets of a shape stay in their order
        self.table = msgspec.structs.replace(self.table, entries=tuple(in_order))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(msgspec.json.format(msgspec.json.encode(self.table), indent=1) + b"\n")


def _key(entry: Entry) -> tuple[str | int, ...]:
    return (entry.kernel, *entry.shape.values())


def line(entry: Entry) -> str:
    """One row of the table as text."""
    name = f"{entry.kernel} {'x'.join(map(str, entry.shape.values()))}"
    rows = "any rows" if entry.most_rows is None else f"to {entry.most_rows}"
    times = ", ".join(
        f"{one.num_rows}: {one.us:.1f} us of {one.default_us:.1f} ({one.us / one.default_us - 1:+.1%})"
        for one in entry.timings
    )
    return f"{name:<31} {rows:<9} {as_text(entry.choice):<52} {times}"


def as_text(choice: dict[str, Any]) -> str:
    """Fields of a choice, side by side."""
    parts: list[str] = []
    for name, value in choice.items():
        parts.append(f"{name} {value}" if isinstance(value, int) else f"{name} ({as_text(value)})")
    return " ".join(parts)


def compile_some(cases: list[Case], index: int, count: int) -> None:
    """Runs every `count`-th candidate once, so that Triton's cache on disk has it; failures show later."""
    everything = [
        (case, choice)
        for case in cases
        for rows in case.buckets
        for choice in dict.fromkeys((case.default(rows.measured[0]), *rows.candidates))
    ]
    inputs: dict[str, Any] = {}
    for case, choice in everything[index::count]:
        try:
            if case.name not in inputs:
                inputs = {case.name: case.make(case.few_rows, 0)}
            case.run(inputs[case.name], choice)
        except Exception:  # it is told of when the candidate is tried
            continue


def _compile_all(names: list[str]) -> None:
    started = time.monotonic()
    count = min(MOST_PROCESSES, os.cpu_count() or 1)
    command = [sys.executable, "-m", "ops.bench.tune", "--kernels", ",".join(names), "--compile"]
    helpers = [subprocess.Popen([*command, f"{index}/{count}"]) for index in range(count)]
    for helper in helpers:
        helper.wait()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)


def tune(case: Case) -> tuple[list[Entry], list[str]]:
    """The table's entries for a case, and what was wrong; no entries where the defaults themselves fail."""
    entries: list[Entry] = []
    flaws: list[str] = []
    for rows in case.buckets:
        try:
            default, best, wrong = _tune_bucket(case, rows)
        except Exception as failure:
            torch.cuda.synchronize()  # an error of the device that stays ends the run
            return [], [*flaws, f"the default: {_told(failure)}"]
        flaws += wrong
        timings = tuple(Timing(n, round(best.us[n], 2), round(default.us[n], 2)) for n in default.us)
        entries.append(Entry(case.tunable.kernel, case.shape, rows.most, asdict(best.choice), timings))
        torch.cuda.empty_cache()
    return entries, flaws


def _tune_bucket(case: Case, rows: Rows) -> tuple[Trial, Trial, list[str]]:
    """The default, the best, and flaws of candidates. Raises AssertionError where the default is not right."""
    choice = case.default(rows.measured[0])
    few = case.few_rows + 13
    wanted = case.reference(case.make(few, 1))
    expected = case.run(case.make(rows.measured[0], 0), choice)
    _check(case.run(case.make(few, 1), choice), wanted)
    if case.tunable.neutral:
        # Buckets' defaults have the same bytes too, or the number of rows would reach them.
        first = case.tunable.default(*case.shape.values())[0].choice
        assert _equal(case.run(case.make(rows.measured[0], 0), first), expected), "other bytes than for fewer rows"
    sets = {n: _make_sets(case, n) for n in rows.measured}
    default = Trial(choice, {n: _time(case, sets[n], choice) for n in rows.measured})
    trials = [default]
    for candidate in rows.candidates:
        if candidate == choice:
            continue
        try:
            _check(case.run(case.make(few, 1), candidate), wanted)
            if case.tunable.neutral:
                made = case.run(case.make(rows.measured[0], 0), candidate)
                assert _equal(made, expected), "other bytes than the default"
            trials.append(_try(case, sets, candidate, default))
        except Exception as failure:
            torch.cuda.synchronize()
            trials.append(Trial(candidate, {}, _told(failure)))
    flaws = [f"{as_text(asdict(trial.choice))}: {trial.flaw}" for trial in trials if trial.flaw is not None]
    best = _confirmed(case, sets, default, [trial for trial in trials if trial.us.keys() == default.us.keys()])
    return default, best, flaws


def _try(case: Case, sets: dict[int, list[Any]], candidate: Any, default: Trial) -> Trial:
    """Times a candidate; it is given up where it is slower at one of the numbers of rows."""
    us: dict[int, float] = {}
    for n, of_rows in sets.items():
        us[n] = _time(case, of_rows, candidate)
        if us[n] > WORST_RATIO * default.us[n]:
            break
    return Trial(candidate, us)


def _confirmed(case: Case, sets: dict[int, list[Any]], default: Trial, trials: list[Trial]) -> Trial:
    """The fastest, measured again beside the default: it must gain both times."""
    best = min(trials, key=lambda trial: trial.ratio(default))
    if best.ratio(default) > 1 - LEAST_GAIN:
        return default
    again = Trial(best.choice, {n: _time(case, of_rows, best.choice) for n, of_rows in sets.items()})
    beside = Trial(default.choice, {n: _time(case, of_rows, default.choice) for n, of_rows in sets.items()})
    return best if again.ratio(beside) <= 1 - LEAST_GAIN else default


def _make_sets(case: Case, num_rows: int) -> list[Any]:
    """Inputs that exceed the cache together."""
    count = min(MOST_SETS, max(1, -int(-ROTATED_BYTES // case.input_bytes(num_rows))))
    return [case.make(num_rows, seed) for seed in range(count)]


def _time(case: Case, sets: list[Any], choice: Any) -> float:
    runs: list[Callable[[], object]] = [lambda x=x: case.run(x, choice) for x in sets]
    us, captured = time_us(runs, capture=case.capture)
    assert captured or not case.capture, "it could not be captured"
    return us


def _check(made: Tensors, wanted: Tensors) -> None:
    for number, (ours, theirs) in enumerate(zip(made, wanted, strict=True)):
        error = relative_error(ours.flatten(), theirs.flatten().to(ours.device))
        assert error < MOST_ERROR, f"result {number} is {error:.1e} off"


def _equal(made: Tensors, wanted: Tensors) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(made, wanted, strict=True))


def _told(failure: Exception) -> str:
    return next(chain(f"{type(failure).__name__}: {failure}".splitlines(), [""]))[:120]


if __name__ == "__main__":
    sys.exit(main())
