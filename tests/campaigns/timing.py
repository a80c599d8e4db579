"""Whether time tells one caller what another has cached: pairs of prompts, one known to the other and one to nobody.

`make campaign timing` measures NUM_PAIRS pairs and writes results/timing.json; the test run measures a fraction, and
looks at what is not a matter of chance. For each pair a victim sends a prompt of its own. Then a spy in another
namespace sends the victim's prompt and one that nobody has sent, in random order, and the victim sends its prompt again
beside a fresh one. Figures are areas under the curve: how often the prompt that the victim has cached was answered
sooner than the one that nobody had. 0.5 is chance; what the victim sees of its own prompts shows that there was
something to be told.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from downcore.v1 import cache_pb2, cache_pb2_grpc, generation_pb2, generation_pb2_grpc

from tests.campaigns.budget import first_seed
from tests.e2e.daemon import TINY_FLAGS, running, tiny_model
from tests.front.pki import Authority
from tests.front.secured import Who, tls_flags, write_principals

NUM_PAIRS = 1000  # 500 of each kind would leave chance alone outside 0.45 to 0.55 once in 160 runs, 1,000 once in 9,000
PROMPT_BYTES = 64 * 8 + 9  # a byte is a token: eight grid chunks and a little
FLAGS = (*TINY_FLAGS, "--pool-bytes", str(256 << 20), "--slice-ms", "50", "--tcp", "127.0.0.1:0")
NEAR_CHANCE = (0.45, 0.55)
CERTAIN = 0.95
RESULTS = Path(__file__).parent / "results" / "timing.json"


@dataclass(slots=True)
class Seen:
    """What one caller saw of prompts that the victim had cached, and of prompts that nobody had."""

    known_s: list[float] = field(default_factory=list[float])
    fresh_s: list[float] = field(default_factory=list[float])
    known_tokens: set[int] = field(default_factory=set[int])
    fresh_tokens: set[int] = field(default_factory=set[int])

    @property
    def auc(self) -> float:
        """How often a known prompt was sooner than a fresh one, over all pairs of the two; ties count half."""
        return area(self.known_s, self.fresh_s)


def area(low: Sequence[float], high: Sequence[float]) -> float:
    """P(a < b) + P(a = b) / 2 for a of `low` and b of `high`."""
    ordered = sorted(high)
    count = len(ordered)
    above = sum(2 * count - bisect_left(ordered, value) - bisect_right(ordered, value) for value in low)
    return above / (2 * len(low) * count)


class Caller:
    """One principal's connection. Its prompts are text, so that tokenizers are part of what is measured."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(channel)

    def first_s(self, text: str) -> tuple[float, int]:
        """Seconds until the prompt is computed, and how many of its tokens were cached."""
        stopping = generation_pb2.StoppingParams(max_tokens=1, ignore_eos=True)
        request = generation_pb2.GenerateRequest(text=text, stopping=stopping)
        began_s = time.perf_counter()
        stream = self._generation.Generate(request, timeout=60)
        started = next(iter(stream)).started
        taken_s = time.perf_counter() - began_s
        list(stream)
        cached = started.cached_tokens
        return taken_s, cached.device + cached.host + cached.disk

    def lookup_s(self, text: str) -> tuple[float, int]:
        """The same of a look-up, and what it found."""
        request = cache_pb2.LookupPrefixRequest(prompt=cache_pb2.Prompt(text=text))
        began_s = time.perf_counter()
        found = self._cache.LookupPrefix(request, timeout=60)
        return time.perf_counter() - began_s, found.matched_tokens


class Measurement:
    """Pairs, one after the other: nothing else runs that could hide a difference."""

    def __init__(self, victim: Caller, spy: Caller, seed: int) -> None:
        self._victim = victim
        self._spy = spy
        self._random = random.Random(seed)
        self.others = Seen()  # what the spy saw of Generate
        self.lookups = Seen()  # and of LookupPrefix
        self.own = Seen()  # what the victim saw of its own

    def pair(self) -> None:
        secret = self._prompt()
        self._victim.first_s(secret)
        self._compare(self._spy.lookup_s, secret, self.lookups)
        self._compare(self._spy.first_s, secret, self.others)
        self._compare(self._victim.first_s, secret, self.own)

    def _prompt(self) -> str:
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz     ", k=PROMPT_BYTES))

    def _compare(self, measure: Any, secret: str, seen: Seen) -> None:
        fresh = self._prompt()
        order = [(secret, seen.known_s, seen.known_tokens), (fresh, seen.fresh_s, seen.fresh_tokens)]
        self._random.shuffle(order)
        for text, times, tokens in order:
            taken_s, found = measure(text)
            times.append(taken_s)
            tokens.add(found)


def measure(folder: Path, num_pairs: int, seed: int) -> Measurement:
    """That many pairs against a daemon of its own, behind TLS and tokens."""
    authority = Authority()
    people = [Who("victim", ("generate",)), Who("spy", ("generate", "warm"))]
    principals = write_principals(folder / "principals.toml", people)
    flags = (*FLAGS, *tls_flags(folder, authority, mutual=False), "--principals-file", str(principals))
    with running(folder, tiny_model(folder / "model"), *flags) as daemon:
        address = "localhost:" + daemon.ready_line.rpartition(":")[2].strip()
        victim, spy = (authority.channel(address, None, who.token) for who in people)
        with victim, spy:
            measurement = Measurement(Caller(victim), Caller(spy), seed)
            for _ in range(num_pairs):
                measurement.pair()
    return measurement


def main() -> int:
    seed = first_seed()
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_PAIRS
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), num_pairs, seed)
    result = {
        "campaign": "timing",
        "seed": seed,
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "pairs": num_pairs,
        "prompt_tokens": PROMPT_BYTES,
        "auc_of_anothers": round(found.others.auc, 4),
        "auc_of_anothers_by_lookup": round(found.lookups.auc, 4),
        "auc_of_ones_own": round(found.own.auc, 4),
        "cached_tokens_of_anothers": sorted(found.others.known_tokens | found.lookups.known_tokens),
        "cached_tokens_of_ones_own": sorted(found.own.known_tokens),
        "median_fresh_ms": round(sorted(found.own.fresh_s)[num_pairs // 2] * 1000, 2),
        "median_own_ms": round(sorted(found.own.known_s)[num_pairs // 2] * 1000, 2),
        "median_anothers_ms": round(sorted(found.others.known_s)[num_pairs // 2] * 1000, 2),
    }
    low, high = NEAR_CHANCE
    result["passed"] = (
        all(low <= seen.auc <= high for seen in (found.others, found.lookups))
        and found.own.auc >= CERTAIN
        and found.others.known_tokens == found.lookups.known_tokens == {0}
    )
    print(json.dumps(result, indent=1))
    if num_pairs >= NUM_PAIRS // 2:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
