"""Parity in bf16: our logits against the largest difference between transformers' own whole and cached runs.

`make campaign parity` takes every family over several random weights, texts and lengths, twice: with all choices of
experts and keys taken away, and with choices, where rounding tips some of them in its cached run as in ours. Figures go
to results/parity.json, family by family. The test run holds the bar with fixed seeds: tests/parity/test_bfloat16.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.campaigns.budget import first_seed
from tests.parity.checkpoints import tokens
from tests.parity.matrix import stable_topk
from tests.parity.rounding import MAKERS, SMOOTH_MAKERS, Differences, compare, load_narrow, save_narrow

NUM_SEEDS = 4
NUM_TEXTS = 4
LENGTHS = (160,)
BAR = 2.0
RESULT = Path("tests/campaigns/results/parity.json")


def measure(make: Callable[[], PreTrainedModel], seeds: range, lengths: tuple[int, ...]) -> Differences:
    """Over all weights and texts."""
    found: Differences | None = None
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="dc-parity-") as name:
            theirs = save_narrow(make, Path(name), seed)
            ours = load_narrow(Path(name))
            for length in lengths:
                texts = [tokens(length, 1_000 * seed + i) for i in range(NUM_TEXTS)]
                differences = compare(theirs, ours, texts)
                found = differences if found is None else found | differences
    assert found is not None
    return found


def main() -> int:
    """The whole campaign, or some seeds and lengths of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(first_seed(), first_seed() + arguments.seeds)
    began = time.monotonic()
    cases: dict[str, dict[str, float | None]] = {}
    for family, smooth in SMOOTH_MAKERS.items():
        for name, make in ((family, smooth), (f"{family}, with choices", MAKERS[family])):
            if name != family and make is smooth:
                continue
            with stable_topk():
                found = measure(make, seeds, tuple(arguments.lengths))
            cases[name] = {
                "theirs": round(found.theirs, 4),
                "theirs_in_one_form": round(found.theirs_alike, 4),
                "ours": round(found.ours, 4),
                "ratio": round(found.ours / found.theirs, 2) if found.theirs else None,
                "equal": round(found.equal, 4),
            }
            print(f"{time.monotonic() - began:6.0f} s {name}: {cases[name]}", flush=True)
            result = {
                "campaign": "parity",
                "seeds": list(seeds),
                "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
                "texts": NUM_TEXTS,
                "lengths": list(arguments.lengths),
                "seconds": round(time.monotonic() - began, 1),
                "bar": BAR,
                "cases": cases,
            }
            arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    over = [name for name, case in cases.items() if (case["ours"] or 0) > BAR * (case["theirs"] or 0)]
    print(f"over twice transformers' own difference: {over or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
