"""Structures that nobody would write: sound and hostile ones, cut, spliced and doubled, against a whole daemon.

`make campaign structures` sends 20,000 and writes its figures to results/structures.json; the test run does a fraction.
What must hold: each is followed, or refused with an error of the catalogue that names its field; neither process is
ever another; the engine's memory stays within its bound; when all is over nobody holds anything.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from downcore.v1 import generation_pb2 as pb

from tests.campaigns.budget import first_seed
from tests.e2e.daemon import TINY_FLAGS, Daemon, tiny_model
from tests.engine.schemas import random_schema
from tests.front.harness import details_of
from tests.front.hostile import hostile_structures

FULL = 20_000
RESULT = Path("tests/campaigns/results/structures.json")
FLAGS = (*TINY_FLAGS, "--pool-bytes", str(16 << 20), "--grammar-timeout-s", "1")
FORMS = ("json_schema", "regex", "grammar")
SLOW = {"intersections", "terminals doubled to the limit", "large terminals far from the start"}  # a second each
REASONS = {"INVALID_ARGUMENT", "TOO_LARGE"}
MAX_GROWTH_BYTES = 512 << 20  # of the engine: as many grammars as are kept, each the worst that was found
PIECES = (
    "(", ")", "[", "]", "{", "}", "{0,9}", "{1000}", "*", "+", "?", "|", "&", "~", "\\", "/", '"', ":", ",", "\n", "^",
    "$", ".", "\\p{L}", "(?i)", "start: ", "%ignore ", "%import common.", "%json {}", "<[0-9]>", "a", "é", "\ud7ff",
    "0", '{"$ref":"#"}', '"anyOf":[', '"pattern":"', '"minimum":', '"items":', "null", "1e999", "-", '"enum":[',
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """What came of them."""

    sent: int = 0
    followed: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    slowest_s: float = 0.0
    growth_bytes: int = 0


class Fuzz:
    """Makes structures from a seed, and sends them."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.daemon = daemon
        self.rng = random.Random(seed)
        self.sources: dict[str, list[str]] = {form: [] for form in FORMS}
        for name, hostile in hostile_structures().items():
            if name in SLOW:
                continue
            form = hostile.structure.WhichOneof("structure") or ""
            text = getattr(hostile.structure, form)
            if len(text) < 4_000:
                self.sources[form].append(text)
        self.sources["json_schema"] += [json.dumps(random_schema(self.rng)) for _ in range(20)]
        self.sources["regex"] += [r"[0-9]{4}-[0-9]{2}", r"(\w+ ){3}", r"[^a-z]{2,5}x?", r"(?i)yes|no"]
        self.sources["grammar"] += ['start: a+\na: /[a-z]+/ "," | b\nb: "(" a ")"', 'start: %json {"type":"integer"}']

    def run(self, count: int) -> Tally:
        """Sends so many, one after the other."""
        tally = Tally()
        engine = psutil.Process(self.daemon.info().engine_pid)
        before = engine.memory_info().rss
        for _ in range(count):
            form = self.rng.choice(FORMS)
            self._send(form, self._mutated(form), tally)
        self.daemon.wait_idle()
        ledger = self.daemon.ledger()
        assert ledger.balanced, list(ledger.findings)
        assert self.daemon.info().engine_pid == engine.pid
        assert self.daemon.process.poll() is None
        tally.growth_bytes = engine.memory_info().rss - before
        assert tally.growth_bytes < MAX_GROWTH_BYTES, tally
        return tally

    def _send(self, form: str, text: str, tally: Tally) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7]),
            structured_output=_structure(form, text),
            sampling=pb.SamplingParams(seed=tally.sent),
            stopping=pb.StoppingParams(max_tokens=self.rng.choice([4, 40])),
        )
        began_s = time.monotonic()
        tally.sent += 1
        try:
            for _ in self.daemon.generation.Generate(request, timeout=30):
                pass
            tally.followed += 1
        except grpc.RpcError as error:
            reason = details_of(error)["ErrorInfo"].reason
            tally.refused[reason] += 1
            if reason not in REASONS:
                raise AssertionError(f"{form} {text!r}") from error
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began_s)

    def _mutated(self, form: str) -> str:
        text = self.rng.choice(self.sources[form])
        for _ in range(self.rng.choice([0, 1, 1, 2, 4, 8])):
            start = self.rng.randrange(len(text) + 1)
            end = min(len(text), start + self.rng.choice([0, 1, 3, 20]))
            other = self.rng.choice(self.sources[form])
            part = text[start:end] * self.rng.choice([0, 2, 50])
            part = self.rng.choice([part, self.rng.choice(PIECES), other[: self.rng.randrange(len(other) + 1)]])
            text = (text[:start] + part + text[end:])[:8_000]
        return text


def _structure(form: str, text: str) -> pb.StructuredOutput:
    structure = pb.StructuredOutput()
    setattr(structure, form, text)
    return structure


def main() -> int:
    """The whole campaign, or so many structures of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--structures", type=int, default=FULL)
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    seed = first_seed()
    with tempfile.TemporaryDirectory(prefix="dc-", dir="/tmp") as name:
        folder = Path(name)
        daemon = Daemon(folder, tiny_model(folder / "model"), *FLAGS)
        try:
            began_s = time.monotonic()
            tally = Fuzz(daemon, seed).run(arguments.structures)
        finally:
            status = daemon.stop()
        assert status == 0
    result = {
        "campaign": "structures",
        "seed": seed,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "sent": tally.sent,
        "followed": tally.followed,
        "refused": dict(tally.refused),
        "slowest_s": round(tally.slowest_s, 3),
        "engine_growth_bytes": tally.growth_bytes,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
