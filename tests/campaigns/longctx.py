"""Sequences larger than the device, in parts that are kept as they end: a run that was cut off is gone on with.

- exact: every family and dtype, both tiers, budgets from little more than the tail to half of the rest, compared with
  everything resident in logits, planes and slots at every draw; ends at the first byte that differs.
- questions: a needle and a status question about one text of 32,768 and of 65,536 tokens, on tiny-hybrid with a
  twentieth of it on the device, the rest in the host tier or on disk: answered as with everything on the device.
- fairness: what a small sequence's tokens take beside a giant, and by themselves.

`make campaign longctx` writes results/longctx.json; parts that it has are not run again: delete it to begin anew. Names
of parts, or their beginnings, as arguments run those alone. The test run does a fraction (tests/exact/test_longctx.py).
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.exact.families import DTYPES, FAMILIES, GRID
from tests.exact.longctx import SELECTS, TIERS, Case, compare_with_resident
from tests.semantic.fairness import measure
from tests.semantic.long_questions import Room, ask, questions

NUM_CHUNKS = 32
SHARES = (0.0, 0.2, 0.5)
LENGTHS = (32_768, 65_536)
RESIDENT = 0.05
SEED = 0
PACED_TOKENS = 100  # in each round
RESULT = Path("tests/campaigns/results/longctx.json")

Part = dict[str, Any]


def main(chosen: list[str]) -> int:
    """The parts that the record does not have yet."""
    record: Part = json.loads(RESULT.read_text()) if RESULT.exists() else {"campaign": "longctx", "parts": {}}
    done: dict[str, Part] = record["parts"]
    every = _parts(done)
    for name, run in every.items():
        if name in done or (chosen and not any(name.startswith(beginning) for beginning in chosen)):
            continue
        began = time.monotonic()
        made = run()
        done[name] = {"commit": _commit(), "seconds": round(time.monotonic() - began, 1), **made}
        record |= _summary(every, done)
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{done[name]['seconds']:7.1f} s {name}: {made}", flush=True)
    print(json.dumps({key: value for key, value in record.items() if key != "parts"}, indent=1))
    return 0 if record["passed"] else 1


def _parts(done: dict[str, Part]) -> dict[str, Callable[[], Part]]:
    """All there are, in the order in which they run: answers with all resident are what others are held to."""
    parts: dict[str, Callable[[], Part]] = {}
    for num_tokens in LENGTHS:
        resident = f"questions {num_tokens} resident"
        parts[resident] = partial(_answers, Room("resident", num_tokens, 1.0), None)
        for tier in ("host", "disk"):
            room = Room(tier, num_tokens, RESIDENT)
            parts[f"questions {num_tokens} {tier}"] = partial(_compared_answers, room, done, resident)
    for tier in ("host", "disk"):
        parts[f"fairness {tier}"] = partial(_fairness, tier)
    for number, family in enumerate(FAMILIES):
        for dtype in DTYPES:
            length = NUM_CHUNKS * GRID - 1 + number % 3
            parts[f"exact {family} {dtype}"] = partial(_compared_bytes, family, dtype, length)
    return parts


def _answers(room: Room, _: None) -> Part:
    with tempfile.TemporaryDirectory(prefix="dc-longctx-") as folder:
        replies = ask(room, questions(SEED, room.num_tokens), Path(folder))
    return {"answers": [asdict(reply) for reply in replies], "passed": True}


def _compared_answers(room: Room, done: dict[str, Part], resident: str) -> Part:
    made = _answers(room, None)
    same = [reply["text"] for reply in made["answers"]] == [reply["text"] for reply in done[resident]["answers"]]
    streamed = all(reply["streamed_bytes"] > 0 for reply in made["answers"])
    return {**made, "as_resident": same, "passed": same and streamed}


def _fairness(tier: str) -> Part:
    fairness = measure(tier, PACED_TOKENS)
    flaws = fairness.flaws()
    return {**asdict(fairness), "flaws": flaws, "passed": not flaws}


def _compared_bytes(family: str, dtype: str, length: int) -> Part:
    with tempfile.TemporaryDirectory(prefix="dc-longctx-") as folder:
        seen = compare_with_resident([Case(family, dtype, length, share) for share in SHARES], TIERS, Path(folder))
    return {"length": length, "draws": dict(seen), "selects": family in SELECTS, "passed": True}


def _summary(every: dict[str, Callable[[], Part]], done: dict[str, Part]) -> Part:
    draws = sum((Counter(part.get("draws", {})) for part in done.values()), Counter[str]())
    replies = [reply for part in done.values() for reply in part.get("answers", ())]
    return {
        "num_parts": len(every),
        "parts_done": len([name for name in every if name in done]),
        "parts_not_passed": [name for name, part in done.items() if not part["passed"]],
        "draws_compared": dict(draws),
        "answers_right": sum(reply["is_right"] for reply in replies),
        "answers": len(replies),
        "passed": all(part["passed"] for part in done.values()) and len(done) == len(every),
    }


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
