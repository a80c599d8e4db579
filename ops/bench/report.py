"""What the bench leaves behind: a JSON file, tables, a picture."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.bench.measure import ContextFigures, Settings, SideFigures, StallFigures, StreamFigures
from ops.cli.output import make_table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("downcore", "torch", "transformers", "grpcio", "numpy", "tokenizers", "msgspec", "uvloop")


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the bench."""

    name: str
    model: str
    dtype: str
    device: str
    threads: int
    settings: Settings
    ours: SideFigures
    reference: SideFigures | None
    contexts: tuple[ContextFigures, ...]
    streams: tuple[StreamFigures, ...]
    stall: StallFigures | None


def machine_name() -> str:
    """Processor and number of usable cores, as a part of a file name."""
    info = Path("/proc/cpuinfo").read_text(errors="replace")
    found = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    processor = found.group(1) if found else platform.machine()
    words = re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|@.*", " ", processor)
    return f"{slug(words)}-{len(os.sched_getaffinity(0))}-cores"


def slug(text: str) -> str:
    """Letters, digits, dots and single dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def write_json(report: Report, folder: Path) -> Path:
    """Writes NAME-MACHINE-DATE.json; returns its path."""
    return write_record(
        slug(report.name), {"machine": machine_name(), "versions": versions(), **asdict(report)}, folder
    )


def write_record(name: str, figures: Mapping[str, Any], folder: Path) -> Path:
    """Writes the figures of one bench, after their date, as NAME-MACHINE-DATE.json; returns its path."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{machine_name()}-{now:%Y%m%d-%H%M%S}.json"
    value = {"date": now.isoformat(timespec="seconds"), **figures}
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return path


def draw(script: str, record: Path) -> None:
    """A record as a PNG beside it, drawn by a script of this folder in a process of its own."""
    command = [sys.executable, str(Path(__file__).parent / script), str(record), str(record.with_suffix(".png"))]
    subprocess.run(command, check=True)


def versions() -> dict[str, str | None]:
    """Of this project, of what the figures depend on, and of the kernel."""
    found: dict[str, str | None] = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    folder = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    found["commit"] = git.stdout.strip() if git.returncode == 0 else None
    return found


def print_report(report: Report, console: Console) -> None:
    """All tables."""
    console.print(f"[bold]{report.model}[/], {report.dtype} on {report.device}, {report.threads} threads\n")
    _print_comparison(report, console)
    numeric = ("context", "prefill tok/s", "decode tok/s", "first token cold", "on a hit", "cached", "faster")
    table = make_table(numeric, numeric=numeric)
    for row in report.contexts:
        hit = row.hit_first_token_s
        table.add_row(
            f"{row.context_tokens:,}",
            f"{row.prefill_tokens_per_s:,.0f}",
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.cold_first_token_s * 1000:,.0f} ms",
            f"{hit * 1000:,.0f} ms" if hit is not None else "-",
            f"{row.hit_cached_tokens:,}",
            f"{row.cold_first_token_s / hit:.1f}x" if hit is not None else "-",
        )
    console.print(table)
    console.print()
    numeric = ("streams", "tok/s", "to one", "front us/message")
    table = make_table(numeric, numeric=numeric)
    for stream in report.streams:
        ratio = stream.tokens_per_s / report.streams[0].tokens_per_s
        cost = f"{stream.front_cpu_us_per_message:,.0f}"
        table.add_row(str(stream.streams), f"{stream.tokens_per_s:.1f}", f"{ratio:.2f}x", cost)
    console.print(table)
    if report.stall is not None:
        stall = report.stall
        console.print(
            f"\na running stream's median time between tokens: {stall.solo_token_s * 1000:.1f} ms alone, "
            f"{stall.loading_token_s * 1000:.1f} ms while {stall.long_prompt_tokens:,} tokens load "
            f"({stall.loading_token_s / stall.solo_token_s:.2f}x)"
        )


def _print_comparison(report: Report, console: Console) -> None:
    table = make_table(
        ("512 tokens", "downcore", "transformers", "ratio"), numeric=("downcore", "transformers", "ratio")
    )
    theirs = report.reference
    rows: Sequence[tuple[str, float, float | None]] = (
        ("prefill tok/s", report.ours.prefill_tokens_per_s, theirs.prefill_tokens_per_s if theirs else None),
        ("decode tok/s", report.ours.decode_tokens_per_s, theirs.decode_tokens_per_s if theirs else None),
    )
    for name, ours, other in rows:
        beside = (f"{other:,.1f}", f"{ours / other:.2f}x") if other is not None else ("-", "-")
        table.add_row(name, f"{ours:,.1f}", *beside)
    console.print(table)
    console.print()


def as_plain(report: Report) -> dict[str, Any]:
    """For -o json."""
    return {"machine": machine_name(), "versions": versions(), **asdict(report)}
