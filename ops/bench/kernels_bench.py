"""Kernels beside their floors and beside what one would call instead, on the card at hand. A program of its own.

`python -m ops.bench.kernels_bench --parts decode,prefill --sweep --out folder` measures the card's ceilings, then each
row of the parts, and writes kernels-GPU-DATE.json with the bars of ops/bench/kernels_bars.py. `--parts all` are all
parts; `--parts checks` runs tests/kernels/gpu on the card instead.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
import triton.language as tl

from ops.bench import kernels_attention, kernels_experts, kernels_indexer, kernels_latent, kernels_recurrent
from ops.bench.kernels_bars import as_record, format_outcomes, outcomes
from ops.bench.kernels_timing import Ceilings, Measured, Row, format_table, measure, time_us

ROOT = Path(__file__).parents[2]
PARTS: dict[str, Callable[[], list[Row]]] = {
    "decode": kernels_attention.decode_rows,
    "prefill": kernels_attention.prefill_rows,
    "latent": kernels_latent.latent_rows,
    "indexer": kernels_indexer.indexer_rows,
    "moves": kernels_indexer.move_rows,
    "recurrent": kernels_recurrent.recurrent_rows,
    "chunks": kernels_recurrent.chunk_rows,
    "experts": kernels_experts.expert_rows,
    "others": kernels_experts.other_rows,
}
READ_BYTES = 4 << 30
READ_CHUNK = 1 << 14
COPY_CHUNK = 1 << 12


@triton.jit
def _read_kernel(data_ptr, sums_ptr, CHUNK: tl.constexpr):
    """Reads CHUNK int32 a program, eight times over, and keeps one."""
    first = tl.program_id(0).to(tl.int64) * (8 * CHUNK)
    total = tl.zeros((CHUNK,), tl.int32)
    for step in range(8):
        total += tl.load(data_ptr + first + step * CHUNK + tl.arange(0, CHUNK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _copy_kernel(data_ptr, copy_ptr, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(copy_ptr + at, tl.load(data_ptr + at))


def measure_ceilings() -> Ceilings:
    """Reading, copying (the faster of torch's way and a kernel's), a matrix product, and the link to pinned memory."""
    words = torch.randint(0, 1 << 30, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    sums = torch.empty(READ_BYTES // 4 // READ_CHUNK, dtype=torch.int32, device="cuda")
    grid = (words.numel() // (8 * READ_CHUNK),)
    read_us, _ = time_us([lambda: _read_kernel[grid](words, sums, CHUNK=READ_CHUNK, num_warps=8)])
    copy = torch.empty_like(words)
    copy_grid = (words.numel() // COPY_CHUNK,)
    copy_us, _ = time_us([lambda: copy.copy_(words)])
    kernel_us, _ = time_us([lambda: _copy_kernel[copy_grid](words, copy, CHUNK=COPY_CHUNK, num_warps=8)])
    copy_us = min(copy_us, kernel_us)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    matmul_us, _ = time_us([lambda: torch.mm(a, b)])
    host = torch.empty(1 << 28, dtype=torch.int32).pin_memory()
    host_us, _ = time_us([lambda: host.copy_(words[: 1 << 28], non_blocking=True)], capture=False)
    return Ceilings(
        read_bytes_per_s=READ_BYTES / read_us * 1e6,
        copy_bytes_per_s=2 * READ_BYTES / copy_us * 1e6,
        flops=2 * 8192**3 / matmul_us * 1e6,
        host_bytes_per_s=host.nbytes / host_us * 1e6,
    )


def run_checks() -> int:
    """The parity suite, on the card; the exit status of pytest."""
    folder = ROOT / "tests" / "kernels" / "gpu"
    # Groups of warps last: a kernel that waits for ever ends the run.
    files = sorted(map(str, folder.glob("check_*.py")), key=lambda name: ("groups" in name, name))
    side_by_side = ("-n", "8", "--dist", "loadfile") if find_spec("xdist") is not None else ()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"),
        *("--confcutdir", str(folder), "-o", "python_files=check_*.py", "-o", "timeout=120", *side_by_side, *files),
    ]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="all", help=f"of {', '.join(PARTS)}; or all; or checks")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="other tiles of ours too")
    parser.add_argument("--budget-s", type=float, default=220.0, help="a part's time; sweeps end with it")
    parser.add_argument("--out", type=Path, help="folder for the record")
    arguments = parser.parse_args()
    wanted = arguments.parts.split(",")
    status = run_checks() if "checks" in wanted else 0
    parts = list(PARTS) if "all" in wanted else [part for part in wanted if part != "checks"]
    if not parts:
        return status
    if not torch.cuda.is_available():
        print("there is no card to measure", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    results: list[Measured] = []
    for part in parts:
        started = time.monotonic()
        rows = [row for row in PARTS[part]() if arguments.rows in row.name]
        for number, row in enumerate(rows, 1):
            # Every row may use its share of the part's time, and what rows before it left over.
            end = started + arguments.budget_s * number / len(rows)
            measured = measure(row, ceilings, sweep=arguments.sweep, time_left_s=partial(_left_s, end))
            results += measured
            print(format_table(measured), flush=True)
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
        if arguments.out is not None:
            _write(arguments.out, ceilings, results)
    print(f"\n{torch.cuda.get_device_name()}: {asdict(ceilings)}\n")
    print(format_table(_best(results)))
    print("\n" + format_outcomes(outcomes(results)))
    return status


def _left_s(end: float) -> float:
    return end - time.monotonic()


def _best(results: list[Measured]) -> list[Measured]:
    """The first way of each row, its peers, and the best of its sweep where that is faster."""
    kept: list[Measured] = []
    for row in dict.fromkeys(one.row for one in results):
        of_row = [one for one in results if one.row == row]
        ours, rest = of_row[0], of_row[1:]
        kept.append(ours)
        swept = [one for one in rest if not one.is_peer and one.failure is None]
        if swept:
            kept.append(min(swept, key=lambda one: one.us))
        kept += [one for one in rest if one.is_peer]
    return kept


def _write(folder: Path, ceilings: Ceilings, results: list[Measured]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    value = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": _versions(),
        "ceilings": asdict(ceilings),
        "bars": as_record(outcomes(results)),
        "results": [{**asdict(one), "percent_of_floor": one.percent_of_floor} for one in results],
    }
    name = f"kernels-{torch.cuda.get_device_name().split()[-1]}-{value['date']}.json"
    (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _versions() -> dict[str, str | int | None]:
    found: dict[str, str | int | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    try:
        found["fla-core"] = version("fla-core")
    except PackageNotFoundError:
        found["fla-core"] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
