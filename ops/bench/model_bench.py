"""Whole models at their real shapes on the card here, weights made up: steps and prompts beside what bytes allow.

Models run one after another, each in a process of its own (daemon/engine/model_bench.py); what is measured is written
when its process ends, and a second run goes on where the first one ended. The peer is transformers, with fla's kernels
where they are installed, on the same configuration and the same card (ops/bench/model_peer.py).
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from ops.bench.kernels_bench import measure_ceilings

SHAPES = Path(__file__).parent / "shapes"
ROOT = Path(__file__).parents[2]
PART_LIMIT_S = 530  # of one process
PACKAGES = ("torch", "triton", "transformers", "fla-core")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of one model, in the order of what matters."""

    shape: str  # of SHAPES
    num_layers: int | None  # as many as fit, where not all do
    parts: tuple[str, ...]
    peer: tuple[str, ...]  # of them, those that transformers is measured at


def plans() -> list[Plan]:
    """What shapes/plans.json says."""
    return msgspec.json.decode((SHAPES / "plans.json").read_bytes(), type=list[Plan])


def main() -> int:
    """Exit status 1 where a part failed, 2 where there is no card."""
    parser = argparse.ArgumentParser(prog="ops.bench.model_bench", description=__doc__)
    parser.add_argument("--models", default="", help="only those whose name contains one of these, by commas")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--again", action="store_true", help="measure what is in the record already, too")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no card to measure", file=sys.stderr)
        return 2
    card, date = torch.cuda.get_device_name().split()[-1], time.strftime("%Y-%m-%d", time.gmtime())
    record = Record(arguments.out / f"model-{card}-{date}.json", again=arguments.again)
    wanted = arguments.models.split(",")
    for plan in plans():
        if any(part in plan.shape for part in wanted):
            measure(plan, record, with_peer=not arguments.no_peer)
    print(record.table())
    return 1 if record.failures else 0


class Record:
    """The file of the results: read where it is there, written after every part."""

    def __init__(self, path: Path, *, again: bool) -> None:
        self.path = path
        self.again = again
        self.value: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "versions": _versions(),
            "ceilings": {},
            "results": [],
        }
        if path.is_file():
            self.value = json.loads(path.read_text(encoding="utf-8"))

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [row for row in self.value["results"] if "failure" in row]

    def read_bytes_per_s(self) -> float:
        """The card's, measured once a record."""
        if not self.value["ceilings"]:
            ceilings = measure_ceilings()
            torch.cuda.empty_cache()
            self.value["ceilings"] = {"read_bytes_per_s": ceilings.read_bytes_per_s, "flops": ceilings.flops}
        return float(self.value["ceilings"]["read_bytes_per_s"])

    def lacks(self, shape: str, way: str, part: str) -> bool:
        """Whether a part is still to be measured."""
        if self.again:
            return True
        return not any(
            (row["model"], row["way"], row["part"]) == (shape, way, part) and "failure" not in row
            for row in self.value["results"]
        )

    def add(self, row: dict[str, Any]) -> None:
        """Takes one result, in the place of an older one of the same part, and writes the file."""
        same = ("model", "way", "part")
        rows = [old for old in self.value["results"] if any(old[key] != row[key] for key in same)]
        self.value["results"] = [*rows, row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.value, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """A line a result."""
        head = f"{'model':<22}{'way':<13}{'part':<18}{'ms':>10}{'floor':>9}{'%':>7}{'gap':>8}{'tokens/s':>10}"
        return "\n".join([head, *(_line(row) for row in self.value["results"])])


def measure(plan: Plan, record: Record, *, with_peer: bool) -> None:
    """All parts of a model that the record lacks, ours and then the peer's."""
    read_bytes_per_s = record.read_bytes_per_s()
    config = str(SHAPES / f"{plan.shape}.json")
    parts = [part for part in plan.parts if record.lacks(plan.shape, "downcore", part)]
    layers = [] if plan.num_layers is None else ["--layers", str(plan.num_layers)]
    ways = [("downcore", "daemon.engine.model_bench", [config, *parts, *layers], parts)]
    if with_peer:
        peer = [part for part in plan.peer if record.lacks(plan.shape, "transformers", part)]
        ways.append(("transformers", "ops.bench.model_peer", [config, *peer], peer))
    for way, program, arguments, asked in ways:
        if not asked:
            continue
        missing = set(asked)
        for row in _run(program, arguments):
            record.add(
                {"model": plan.shape, "num_layers": plan.num_layers, "way": way, **with_floor(row, read_bytes_per_s)}
            )
            print(_line(record.value["results"][-1]), flush=True)
            missing.discard(row["part"])
        for part in missing:
            record.add({"model": plan.shape, "way": way, "part": part, "failure": "the program gave no result"})


def with_floor(row: dict[str, Any], read_bytes_per_s: float) -> dict[str, Any]:
    """A decode step's result beside the time in which the card could read what the step must."""
    if "weight_bytes_read" not in row:
        return row
    moved = row["weight_bytes_read"] + row["history_bytes"] + row["state_bytes"]
    floor_ms = 1e3 * moved / read_bytes_per_s
    return {**row, "floor_ms": floor_ms, "percent_of_floor": 100 * floor_ms / row["step_ms"]}


def _run(program: str, arguments: list[str]) -> list[dict[str, Any]]:
    """The objects that a program prints, a line each; what it had printed when its time was over, too."""
    command = [sys.executable, "-m", program, *arguments]
    try:
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=PART_LIMIT_S, check=False)
        printed = run.stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    return [json.loads(line) for line in printed.splitlines() if line.startswith(b"{")]


def _line(row: dict[str, Any]) -> str:
    label = f"{row['model']:<22}{row['way']:<13}{row['part']:<18}"
    if "failure" in row:
        return f"{label}  failed: {row['failure']}"
    ms = row.get("step_ms", 1e3 * row.get("prefill_s", row.get("restored_s", 0.0)))
    floor = f"{row['floor_ms']:9.2f}{row['percent_of_floor']:7.1f}" if "floor_ms" in row else " " * 16
    gap = f"{row['gap_ms']:8.2f}" if "gap_ms" in row else " " * 8
    return f"{label}{ms:10.2f}{floor}{gap}{row['tokens_per_s']:10.0f}"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
