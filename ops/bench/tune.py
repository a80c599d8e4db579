"""Finds the fastest launch choices of every tunable kernel on the card here, and writes the table that kernels read.

`python -m ops.bench.tune` goes over the cases of ops/bench/tune_rows.py and tune_wide.py. Each candidate is compared
with torch's form, and where the choice is said to reach no byte, its bytes with the default's; then it is timed beside
the default. It is taken where it gains over all numbers of rows that it was measured at and loses at none, twice over.
The table is written after each case, and a second run goes on where the first one ended (`--again` measures what is
there, too).
"""

# Triton has no types.
# pyright: reportMissingTypeStubs=false

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.launch_table import Entry, arch_of, table_path
from ops.bench.kernels_timing import DEVICE, MOST_SETS, ROTATED_BYTES, relative_error, time_us
from ops.bench.tune_case import Case, Rows
from ops.bench.tune_record import WORST_RATIO, Record, Trial, as_text, line
from ops.bench.tune_rows import row_cases
from ops.bench.tune_wide import wide_cases

MOST_ERROR = 1e-2  # of bfloat16 results, relative, by norm
MOST_PROCESSES = 14
BUDGET_S = 500.0  # no case is begun after it


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
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    path = arguments.table or table_path(arch)
    record = Record(path, torch.cuda.get_device_name(), versions, again=arguments.again)
    todo = [case for case in cases if record.lacks(case.tunable.kernel, case.shape)]
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
    """The table's entries for a case, and what was wrong; no entries where a default itself is."""
    entries: list[Entry] = []
    flaws: list[str] = []
    for rows in case.buckets:
        try:
            entries.append(_tune_bucket(case, rows, flaws))
        except Exception as failure:
            return [], [*flaws, f"the default: {_told(failure)}"]
        torch.cuda.empty_cache()
    return entries, flaws


def _tune_bucket(case: Case, rows: Rows, flaws: list[str]) -> Entry:
    """The best for a bucket. Raises where the default is not right; adds to `flaws` those of candidates."""
    choice = case.default(rows.measured[0])
    check = _Check(case, rows)
    check(choice)
    if case.tunable.neutral:  # buckets' defaults have the same bytes too, or the number of rows would reach them
        check(case.tunable.default(*case.shape.values())[0].choice)
    sets = {n: _make_sets(case, n) for n in rows.measured}
    default = _try(case, sets, choice, None)
    best = default
    for candidate in rows.candidates:
        try:
            check(candidate)
            trial = _try(case, sets, candidate, default)
        except Exception as failure:
            flaws.append(f"{as_text(asdict(candidate))}: {_told(failure)}")
            continue
        if trial.ratio(default) < best.ratio(default):
            best = trial
    if not (best.gains(default) and _try(case, sets, best.choice, None).gains(_try(case, sets, choice, None))):
        best = default
    return best.entry(case.tunable.kernel, case.shape, rows.most, default)


class _Check:
    """Holds choices to torch's form at few rows, not all tiles whole; neutral ones to the default's bytes as well."""

    def __init__(self, case: Case, rows: Rows) -> None:
        self._case = case
        self._few = case.few_rows + 16  # a number that is not compiled for anew
        self._many = rows.measured[0]
        self._wanted = case.reference(case.make(self._few, 1))
        self._bytes = case.run(case.make(self._many, 0), case.default(self._many)) if case.tunable.neutral else ()

    def __call__(self, choice: Any) -> None:
        """Raises AssertionError where it computes something else."""
        made = self._case.run(self._case.make(self._few, 1), choice)
        for number, (ours, wanted) in enumerate(zip(made, self._wanted, strict=True)):
            error = relative_error(ours.flatten(), wanted.flatten())
            assert error < MOST_ERROR, f"result {number} is {error:.1e} off"
        if self._case.tunable.neutral:
            made = self._case.run(self._case.make(self._many, 0), choice)
            is_same = all(torch.equal(ours, wanted) for ours, wanted in zip(made, self._bytes, strict=True))
            assert is_same, "other bytes than the default"


def _try(case: Case, sets: dict[int, list[Any]], choice: Any, default: Trial | None) -> Trial:
    """Times a choice; it is given up where it is slower than the default at one of the numbers of rows."""
    us: dict[int, float] = {}
    for n, of_rows in sets.items():
        us[n] = _time(case, of_rows, choice)
        if default is not None and us[n] > WORST_RATIO * default.us[n]:
            break
    return Trial(choice, us)


def _make_sets(case: Case, num_rows: int) -> list[Any]:
    """Inputs that exceed the cache together."""
    count = min(MOST_SETS, max(1, -int(-ROTATED_BYTES // case.input_bytes(num_rows))))
    return [case.make(num_rows, seed) for seed in range(count)]


def _time(case: Case, sets: list[Any], choice: Any) -> float:
    runs: list[Callable[[], object]] = [lambda x=x: case.run(x, choice) for x in sets]
    us, captured = time_us(runs, capture=case.capture)
    assert captured or not case.capture, "it could not be captured"
    return us


def _told(failure: Exception) -> str:
    """In one line. An error of the device that stays shows here, and ends the run."""
    torch.cuda.synchronize()
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:120]


if __name__ == "__main__":
    sys.exit(main())
