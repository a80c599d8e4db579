"""Soak: 100,000 small requests through all tiers, then 1,000 cancels; memory, files and index stay flat.

`make campaign soak` runs it in a process of its own (tests/engine/soak.py) and writes all samples to results/soak.json.
It fails where resident memory and page cache leave 1% of weights + ledger + the fixed overhead after the warm-up, where
a handle, a thread or a file is left over, or where the idle proof finds something. A second, shorter run has the own
allocations of Python traced. The test run does a fraction: tests/engine/test_unified.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from tests.campaigns.budget import first_seed
from tests.engine.soak import Job, run_job
from tests.engine.test_unified import assert_all_tiers_worked, assert_flat, assert_within_books

REQUESTS, CANCELS = 100_000, 1_000
NUM_WARMUP = 16_000  # until tree, index and the remembered past have been through every shape that they take
NUM_SAMPLES = 20
TRACED_PART = 20  # of the requests, one in so many again with tracing
TRACED_GROWTH = 0.02  # from the first to the second half of its samples
RESULT = Path("tests/campaigns/results/soak.json")


def main() -> int:
    """The whole campaign, or so many requests of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--warmup", type=int, default=NUM_WARMUP)
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dc-soak-") as folder:
        job = Job(
            folder=f"{folder}/plain",
            pool_bytes=16 << 20,
            host_bytes=16 << 20,
            disk_bytes=64 << 20,
            num_warmup=arguments.warmup,
            num_requests=arguments.requests,
            num_cancels=CANCELS,
            num_samples=NUM_SAMPLES,
            is_traced=False,
            seed=first_seed(),
        )
        samples = run_job(job)
        num_traced = arguments.requests // TRACED_PART
        short = {"num_requests": num_traced, "num_warmup": min(arguments.warmup, num_traced), "num_cancels": 0}
        traced = run_job(replace(job, folder=f"{folder}/traced", is_traced=True, num_samples=8, **short))
    first, last = samples[0], samples[-1]
    growth = _late_over_early([sample.traced_bytes for sample in traced]) - 1
    result = {
        "campaign": "soak",
        "seed": job.seed,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "seconds": round(time.monotonic() - began, 1),
        "requests": last.requests,
        "cancelled": last.cancelled,
        "charged_growth": round(last.charged_bytes / first.charged_bytes - 1, 5),
        "index_growth": round(_late_over_early([sample.index_bytes for sample in samples]) - 1, 4),
        "traced_growth": round(growth, 4),
        "samples": [asdict(sample) for sample in samples],
        "traced": [asdict(sample) for sample in traced],
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key not in ("samples", "traced")}, flush=True)
    assert_all_tiers_worked(samples)
    assert_within_books(samples)
    assert_flat(samples)
    assert growth <= TRACED_GROWTH, f"traced memory grew by {growth:.1%}"
    return 0


def _late_over_early(figures: list[int]) -> float:
    """The mean of the second half over that of the first."""
    half = len(figures) // 2
    return (sum(figures[-half:]) / half) / (sum(figures[:half]) / half)


if __name__ == "__main__":
    sys.exit(main())
