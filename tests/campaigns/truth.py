"""Truth: every family in both dtypes, every way back, all lengths around blocks and grid; and real weights.

`make campaign truth` counts the cases that it compared with a cold run, by family and path, in results/truth.json, and
ends at the first byte that differs. The test run does a fraction with rotating seeds: test_families.py and
test_lower_tiers.py of tests/exact.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from ops.model.catalog import SMOLLM2, model_path
from ops.models.shipped import TINY_HYBRID
from tests.campaigns.budget import first_seed
from tests.exact.families import DTYPES, FAMILIES, lengths
from tests.exact.paths import Walk, walk_device_and_host, walk_disk_and_restart, walk_preemption
from tests.exact.test_lower_tiers import LENGTHS, compare_with_cold

NUM_CHUNKS = 4
NUM_PREEMPTED = (
    8  # prompts of a family and dtype, each preempted at every grid position inside it and three times after
)
RESULT = Path("tests/campaigns/results/truth.json")


def main() -> int:
    """The whole campaign."""
    seed, began = first_seed(), time.monotonic()
    cases: dict[str, dict[str, int]] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            cases[f"{family} {dtype}"] = dict(_tiny(family, dtype, seed))
            print(f"{time.monotonic() - began:6.0f} s {family} {dtype}: {cases[f'{family} {dtype}']}", flush=True)
    for name, model in (("tiny-hybrid", TINY_HYBRID), ("SmolLM2", model_path(SMOLLM2))):
        with tempfile.TemporaryDirectory(prefix="dc-truth-") as folder:
            cases[name] = dict(compare_with_cold(model, LENGTHS, Path(folder) / "tier"))
        print(f"{time.monotonic() - began:6.0f} s {name}: {cases[name]}", flush=True)
    by_path = sum((Counter(counts) for counts in cases.values()), Counter[str]())
    result = {
        "campaign": "truth",
        "seed": seed,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "seconds": round(time.monotonic() - began, 1),
        "lengths": {"tiny": lengths(NUM_CHUNKS), "real": LENGTHS},
        "compared": by_path.total(),
        "by_path": by_path,
        "cases": cases,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{by_path.total()} cases equal to cold runs in every byte: {dict(by_path)}")
    return 0


def _tiny(family: str, dtype: str, seed: int) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="dc-truth-") as folder:
        walk = Walk(family, dtype, seed, Path(folder) / "models", lengths(NUM_CHUNKS))
        seen = walk_device_and_host(walk) + walk_disk_and_restart(walk, Path(folder) / "tier")
        seen += walk_preemption(walk, NUM_PREEMPTED)
        assert len({cold.logits for cold in walk.colds.values()}) == len(walk.lengths), "the logits say nothing"
        return seen


if __name__ == "__main__":
    sys.exit(main())
