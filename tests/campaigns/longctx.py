"""Truth of sequences larger than the device: every family, both dtypes, both tiers, budgets from little more than the
tail to half of the rest, lengths around a grid position. Ends at the first byte that differs.

`make campaign longctx` writes how many draws it compared to results/longctx.json; the test run does a fraction
(tests/exact/test_longctx.py).
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.campaigns.budget import first_seed
from tests.exact.families import DTYPES, FAMILIES, GRID
from tests.exact.longctx import TIERS, Case, compare_with_resident

NUM_CHUNKS = 26
SHARES = (0.0, 0.2, 0.5)
RESULT = Path("tests/campaigns/results/longctx.json")


def main() -> int:
    """The whole campaign."""
    began = time.monotonic()
    cases: dict[str, dict[str, int]] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            seen: Counter[str] = Counter()
            with tempfile.TemporaryDirectory(prefix="dc-longctx-") as folder:
                for number, share in enumerate(SHARES):
                    case = Case(family, dtype, NUM_CHUNKS * GRID - 1 + number, share)
                    seen += compare_with_resident(case, TIERS, Path(folder) / str(share))
            cases[f"{family} {dtype}"] = dict(seen)
            print(f"{time.monotonic() - began:6.0f} s {family} {dtype}: {dict(seen)}", flush=True)
    by_tier = sum((Counter(counts) for counts in cases.values()), Counter[str]())
    result = {
        "campaign": "longctx",
        "seed": first_seed(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "seconds": round(time.monotonic() - began, 1),
        "draws_compared": by_tier.total(),
        "by_tier": by_tier,
        "cases": cases,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{by_tier.total()} draws equal to resident ones in logits, planes and slots: {dict(by_tier)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
