"""Requests that nobody would send, by the hundred thousand: the daemon answers each, and is none the worse for it.

`make campaign fuzz` sends 200,000 to a whole daemon, whose tiny model computes, and writes its figures to
results/fuzz.json; the test run sends a fraction, with a seed that rotates by the day. What must hold: neither process
is ever another; each answer is a valid one or an error of the catalogue; a sound request in between has the answer that
it had at the start; the memory of front, engine and workers stays flat once warm; in the end nobody holds anything.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
import psutil
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.front.access import GENERATION
from tests.campaigns.budget import first_seed
from tests.e2e.daemon import TINY_FLAGS, Daemon, tiny_model, tokens_of
from tests.fuzz import http2
from tests.fuzz.heavy import heavy_cases
from tests.fuzz.messages import TEXTS, Maker
from tests.fuzz.methods import DRAIN, Method, all_methods
from tests.fuzz.traffic import Case, Tally, Traffic
from tests.fuzz.wire import mutated

FULL = 200_000
WINDOWS = 10  # memory is looked at after each
BATCHES = 10  # of each window; a sound request follows each
WARM = 3  # windows that fill what has a bound: pools, caches, the allocator's own lists
LAST = 3  # windows that are compared to those
HEAVY_EACH = 400  # one case in so many is as dear as they come
RESULT = Path("tests/campaigns/results/fuzz.json")
FLAGS = (
    *TINY_FLAGS, "--pool-bytes", str(16 << 20), "--host-bytes", str(8 << 20), "--disk-bytes", str(64 << 20),
    "--gateway", "true", "--max-context-tokens", "1024", "--max-tokens-limit", "8", "--tokenizer-timeout-s", "2",
    "--grammar-timeout-s", "1", "--grammar-workers", "2", "--log-level", "warning",
)  # fmt: skip
# What a process may grow by after the windows that warm it up, over all that follow.
MAX_GROWTH_BYTES = {"front": 8 << 20, "engine": 64 << 20}
MAX_WORKER_BYTES = 512 << 20  # of each worker, ever: they are replaced now and then, so that growth says little
SOUND = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[3 + i % 50 for i in range(100)]),
    sampling=pb.SamplingParams(temperature=0.0),
    stopping=pb.StoppingParams(max_tokens=4, ignore_eos=True),
)
BEARERS = ("Bearer x", "Bearer " + "y" * 900, "Basic eA==", "", "Bearer")


@dataclass(slots=True)
class Memory:
    """Resident bytes after each window; of the workers the largest."""

    front: list[int] = field(default_factory=list[int])
    engine: list[int] = field(default_factory=list[int])
    worker: list[int] = field(default_factory=list[int])


class Fuzz:
    """Makes cases from a seed, sends them to a daemon, and looks after it."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self._rng = random.Random(seed)
        self._maker = Maker(self._rng)
        self._methods = [method for method in all_methods() if method.path != DRAIN]
        self._weights = [method.weight for method in self._methods]
        self._traffic = Traffic(daemon.socket, all_methods())
        self._heavy = cycle(self._shuffled_heavy())
        self._engine = psutil.Process(daemon.info().engine_pid)
        self._first = self._sound()
        self._num_made = 0
        self.memory = Memory()
        self.num_sound = 0

    @property
    def tally(self) -> Tally:
        return self._traffic.tally

    def run(self, count: int, windows: int = WINDOWS) -> None:
        """Sends so many; raises AssertionError with the first defects."""
        asyncio.run(self._run(count // windows // BATCHES, windows))

    async def _run(self, batch: int, windows: int) -> None:
        for _ in range(windows):
            batches = (self._cases(batch) for _ in range(BATCHES))
            await self._traffic.run(*batches, look_after=self._look_after)
            self._measure()
            print(f"{self.tally.sent.total()} sent, the front has {self.memory.front[-1] >> 10} KiB", flush=True)

    def check_memory(self) -> None:
        """Raises AssertionError where a process has grown beyond its bound."""
        for name, bound in MAX_GROWTH_BYTES.items():
            seen: list[int] = getattr(self.memory, name)
            grown = min(seen[-LAST:]) - min(seen[:WARM])  # the least: a connection may still be on its way out
            assert grown < bound, (name, [size >> 10 for size in seen])
        assert max(self.memory.worker) < MAX_WORKER_BYTES, self.memory.worker

    def _look_after(self) -> None:
        """Same processes, no defect, and a sound request has its answer."""
        errors = [line for line in self._daemon.log.read_text().splitlines() if '"level":"error"' in line]
        found = "\n".join((*self.tally.defects[:10], *errors[:10]))
        assert self._daemon.process.poll() is None, found
        assert not self.tally.defects, found
        info = self._daemon.info()
        assert (info.engine_pid, info.engine_starts) == (self._engine.pid, 1), found
        assert self._sound() == self._first
        ledger = self._daemon.ledger()
        assert ledger.balanced, (list(ledger.findings), found)
        self.num_sound += 1

    def _sound(self) -> tuple[int, int]:
        """The first token, which no neighbour's batch can change, and how many there were."""
        tokens = tokens_of(list(self._daemon.generation.Generate(SOUND, timeout=60)))
        return tokens[0], len(tokens)

    def _measure(self) -> None:
        self._daemon.wait_idle()
        ledger = self._daemon.ledger()
        assert ledger.balanced, list(ledger.findings)
        time.sleep(0.3)  # the front gives back what is free at its next tick
        front = psutil.Process(self._daemon.process.pid)
        workers = [process for process in front.children() if process.pid != self._engine.pid]
        self.memory.front.append(front.memory_info().rss)
        self.memory.engine.append(self._engine.memory_info().rss)
        self.memory.worker.append(max(worker.memory_info().rss for worker in workers))

    def _cases(self, count: int) -> Iterator[Case | http2.Script]:
        yield http2.sound()
        for _ in range(count - 1):
            self._num_made += 1
            yield self._case() if self._num_made % HEAVY_EACH else next(self._heavy)

    def _case(self) -> Case | http2.Script:
        rng = self._rng
        kind = rng.random()
        if kind < 0.025:
            return http2.script(rng)
        (method,) = rng.choices(self._methods, self._weights)
        if kind < 0.06:
            return self._odd_call(method)
        sound = rng.choice(method.sound)
        if kind < 0.45:
            return self._call("any message", method, self._maker.fresh(method.request).SerializeToString())
        if kind < 0.75:
            return self._call("a sound one, changed", method, self._maker.changed(sound).SerializeToString())
        other = self._maker.fresh(method.request).SerializeToString()
        return self._call("bytes", method, mutated(rng, sound.SerializeToString(), other))

    def _call(self, kind: str, method: Method, data: bytes) -> Case:
        """A few of the clients go before they have their answer."""
        chance = self._rng.random()
        timeout_s = self._rng.choice((1e-6, 0.001, 0.02)) if chance < 0.03 else None
        num_read = self._rng.choice((1, 2)) if chance > 0.97 else None
        return Case(kind, method.path, data, timeout_s=timeout_s, num_read=num_read)

    def _odd_call(self, method: Method) -> Case:
        """A call that is odd around its message."""
        rng = self._rng
        data = rng.choice(method.sound).SerializeToString()
        match rng.randrange(6):
            case 0:
                service = rng.choice((GENERATION, "x", "", "..", "downcore.v1.GenerationService/Generate", "é"))
                return Case("path", f"/{service}/{rng.choice(TEXTS)}", data)
            case 1:
                flood = tuple((f"x-{i}", "y" * rng.choice((1, 50, 400))) for i in range(rng.choice((5, 60, 400))))
                return Case("metadata", method.path, data, metadata=flood)
            case 2:
                pairs = (("x-thing-bin", rng.randbytes(40)), ("traceparent", rng.choice(TEXTS)[:100]))
                return Case("metadata", method.path, data, metadata=pairs)
            case 3:
                return Case("metadata", method.path, data, metadata=(("authorization", rng.choice(BEARERS)),) * 2)
            case 4:
                return Case("no request, or several", method.path, data, requests=rng.choice((0, 2, 9)))
            case _:
                algorithm = rng.choice((grpc.Compression.Gzip, grpc.Compression.Deflate))
                return Case("compressed", method.path, data, compression=algorithm)

    def _shuffled_heavy(self) -> list[Case]:
        cases = list(heavy_cases())
        self._rng.shuffle(cases)
        return cases


def fuzz_drain(folder: Path, seed: int, count: int) -> Tally:
    """Drain with all kinds of requests, against a daemon of its own: once it drains it says so to everybody."""
    rng = random.Random(seed)
    maker = Maker(rng)
    folder.mkdir(mode=0o700)
    daemon = Daemon(folder, tiny_model(folder / "model"), *TINY_FLAGS, "--pool-bytes", str(8 << 20))
    try:
        traffic = Traffic(daemon.socket, all_methods())
        wait = admin_pb2.DrainRequest(timeout_s=0.05)
        made = (maker.changed(wait).SerializeToString() for _ in range(count))
        calls = (Case("drain", DRAIN, mutated(rng, data, b"") if rng.random() < 0.5 else data) for data in made)
        refused = (Case("drained", f"/{GENERATION}/Generate", SOUND.SerializeToString()) for _ in range(20))
        asyncio.run(traffic.run(calls, iter((Case("drain", DRAIN, wait.SerializeToString()),)), refused))
    finally:
        status = daemon.stop()
    assert status == 0
    assert not traffic.tally.defects, "\n".join(traffic.tally.defects[:10])
    assert traffic.tally.answers["DRAINING"] >= 20, traffic.tally
    return traffic.tally


def main() -> int:
    """The whole campaign, or so many requests of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=FULL)
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    seed, began_s = first_seed(), time.monotonic()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="dc-", dir="/tmp") as name:
        folder = Path(name)
        daemon = Daemon(folder, tiny_model(folder / "model"), *FLAGS, "--disk-path", str(folder / "disk"))
        try:
            fuzz = Fuzz(daemon, seed)
            try:
                fuzz.run(arguments.requests)
            finally:
                print(json.dumps(figures(fuzz), indent=1))
            fuzz.check_memory()
        finally:
            status = daemon.stop()
        assert status == 0
        drained = fuzz_drain(folder / "drain", seed, 300)
        log = daemon.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    result = {
        "campaign": "fuzz",
        "seed": seed,
        "commit": commit,
        **figures(fuzz),
        "drain": dict(drained.answers),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{fuzz.tally.sent.total()} requests, all answered, in {result['seconds']} s")
    return 0


def figures(fuzz: Fuzz) -> dict[str, Any]:
    """What was sent, what came back, and the memory in MiB after each window."""
    return {
        "requests": fuzz.tally.sent.total(),
        "sound_requests_between": fuzz.num_sound,
        "sent": dict(fuzz.tally.sent.most_common()),
        "answers": dict(islice(fuzz.tally.answers.most_common(), 60)),
        "front_mib": [round(size / (1 << 20), 2) for size in fuzz.memory.front],
        "engine_mib": [round(size / (1 << 20), 2) for size in fuzz.memory.engine],
        "largest_worker_mib": [round(size / (1 << 20), 2) for size in fuzz.memory.worker],
    }


if __name__ == "__main__":
    sys.exit(main())
