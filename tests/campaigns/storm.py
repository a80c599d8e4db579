"""Cancel storm: requests by the thousand, half of them cancelled in every state, and everything comes back.

`make campaign storm` runs 2,000 requests a round for several rounds and writes its figures to results/storm.json; the
test run does a fraction. What must hold: blocks, slots, file handles and threads return exactly to where they began,
and the front's resident memory grows by less than 1 KB per 1,000 requests.

Memory is looked at when the front has rested, so that it has returned what is free. What Python's arenas of small
objects have held at once stays with them in part: so the warm-up has more calls open than the rounds that are measured,
and what counts is the slope of a straight line through those. Samples scatter by some 20 KB, pages that come and go;
30 rounds leave the slope a standard error of about 0.2 KB.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import grpc
from downcore.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from downcore.v1 import generation_pb2 as pb

from tests.campaigns.budget import first_seed
from tests.e2e.daemon import TINY_FLAGS, Daemon, tiny_model
from tests.front.harness import NO_THREAD_CACHES

STATES = ("queued", "prefilling", "decoding", "forked", "stalled")
FLAGS = (
    *TINY_FLAGS,
    "--max-sequences",
    "8",
    "--pool-bytes",
    str(8 << 20),
    "--slice-ms",
    "2",
    "--stall-timeout-s",
    "60",
)
QUICK = ("--restart-backoff-s", "0.05", "--restart-backoff-max-s", "0.5")
OPEN_AT_A_TIME, OPEN_IN_WARMUP = 40, 64
NUM_WARMUP, NUM_ROUNDS = 6, 30
REQUESTS, EACH_STATE, KILLS = 2000, 100, 4  # of a round
REST_S = 3.0  # until the front has returned what is free
KB_PER_1000 = 1.0


@dataclass(slots=True)
class Round:
    """What one round did. `cancelled` by state; `killed` are calls open when the engine was killed."""

    requests: int = 0
    completed: int = 0
    cancelled: Counter[str] = field(default_factory=Counter[str])
    killed: int = 0
    kills: int = 0
    resident_kb: int = 0
    seconds: float = 0.0


class Storm:
    """Traffic against one daemon; a round ends when its quotas are met."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.daemon = daemon
        self.rng = random.Random(seed)
        self.calls: dict[str, Any] = {}
        self.stalled: set[str] = set()
        self.doomed: dict[str, str] = {}  # request ids cancelled by us, with the state they were in
        self.round = Round()
        self._serial = 0

    async def run(self, *, requests: int, each_state: int, kills: int, at_a_time: int = OPEN_AT_A_TIME) -> Round:
        """At least `requests` requests, half of them cancelled, `each_state` in every state and around each kill."""
        self.round = Round()
        began = time.monotonic()
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        async with grpc.aio.insecure_channel(f"unix:{self.daemon.socket}", options=options) as channel:
            self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
            self.admin = admin_pb2_grpc.AdminServiceStub(channel)
            cancelling = asyncio.create_task(self._cancel_by_state(each_state, requests // 2))
            running: set[asyncio.Task[None]] = set()
            while self.round.requests < requests or not cancelling.done():
                while len(running) < at_a_time:
                    running.add(asyncio.create_task(self._one()))
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if cancelling.done():
                    cancelling.result()
                if self.round.kills < kills and self.round.requests > requests * (self.round.kills + 1) // (kills + 1):
                    await self._kill_engine()
            await asyncio.wait(running)
        self.round.seconds = round(time.monotonic() - began, 1)
        return self.round

    async def _one(self) -> None:
        self._serial += 1
        name = f"s{os.getpid()}-{self._serial}"
        self.round.requests += 1
        n = self.rng.choice([1, 1, 1, 1, 2, 4])
        is_staller = self.rng.random() < 0.25
        length = self.rng.choice([self.rng.randint(1, 100), self.rng.randint(100, 900)])
        family = self.rng.randrange(4)
        request = pb.GenerateRequest(
            request_id=name,
            token_ids=pb.TokenIds(ids=[1 + (i * (family + 3)) % 250 for i in range(length)]),
            sampling=pb.SamplingParams(seed=self._serial, logprobs=is_staller, top_logprobs=5 if is_staller else 0),
            stopping=pb.StoppingParams(max_tokens=self.rng.randint(4, 90 if is_staller else 30), ignore_eos=True),
            n=n,
        )
        call = self.calls[name] = self.generation.Generate(request, timeout=120)
        try:
            async for response in call:
                if is_staller and response.HasField("chunk"):
                    self.stalled.add(name)
                    await asyncio.sleep(0.5)  # reads nothing meanwhile; a status would not come before the messages
                    self.stalled.discard(name)
                    is_staller = False
            if name not in self.doomed:
                self.round.completed += 1
        except asyncio.CancelledError:
            if name not in self.doomed:
                raise
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.05)  # the engine is gone: the client's back-off
        finally:
            del self.calls[name]
            self.stalled.discard(name)

    async def _cancel_by_state(self, each_state: int, total: int) -> None:
        """Asks the engine where everyone is, and cancels some there and then."""
        cancelled = self.round.cancelled
        while sum(cancelled.values()) < total or any(cancelled[state] < each_state for state in STATES):
            await asyncio.sleep(0.01)
            try:
                rows = (await self.admin.ListSequences(admin_pb2.ListSequencesRequest(), timeout=20)).sequences
            except grpc.aio.AioRpcError:
                continue
            states: dict[str, str] = {}
            choices = Counter(row.request_id for row in rows)
            for row in rows:
                states[row.request_id] = self._state(row, choices[row.request_id])
            for name, state in states.items():
                behind = cancelled[state] <= min(cancelled[other] for other in STATES) + each_state // 4
                if name in self.calls and name not in self.doomed and behind and self.rng.random() < 0.3:
                    self.doomed[name] = state
                    cancelled[state] += 1
                    self.calls[name].cancel()

    def _state(self, row: admin_pb2.Sequence, choices: int) -> str:
        if row.request_id in self.stalled:
            return "stalled"
        if row.state in (admin_pb2.SEQUENCE_STATE_QUEUED, admin_pb2.SEQUENCE_STATE_PREEMPTED):
            return "queued"
        if row.state == admin_pb2.SEQUENCE_STATE_PREFILLING:
            return "prefilling"
        return "forked" if choices > 1 else "decoding"

    async def _kill_engine(self) -> None:
        info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=20)
        self.round.killed += len(self.calls)
        self.round.kills += 1
        os.kill(info.engine_pid, signal.SIGKILL)
        while True:
            now = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=20)
            if now.state == admin_pb2.ENGINE_STATE_SERVING and now.engine_pid != info.engine_pid:
                return
            await asyncio.sleep(0.05)


def counts(daemon: Daemon) -> dict[str, int]:
    """All that must return to where it began, read while idle."""
    daemon.wait_idle()
    ledger, tier = daemon.ledger(), daemon.tier()
    assert ledger.balanced, list(ledger.findings)
    reserved = sum(entry.count for entry in ledger.entries if entry.owner == "reserved")
    held = {entry.owner for entry in ledger.entries} - {"free", "cache", "reserved", "model"}
    assert not held, f"held by {held} while idle"
    return {
        "blocks not free or cached": tier.blocks - tier.free_blocks - tier.cached_blocks,
        "reserved": reserved,
        "front files": daemon.num_files(),
        "front threads": daemon.num_threads(),
    }


def vars_of(done: Round) -> dict[str, Any]:
    """A round's fields by name. (`asdict` rebuilds a Counter from pairs, and so counts the pairs.)"""
    return {part.name: getattr(done, part.name) for part in fields(done)}


def rested_kb(daemon: Daemon) -> int:
    """Resident memory of an idle front."""
    time.sleep(REST_S)
    return daemon.resident_bytes() // 1024


def growth(rounds: list[Round]) -> tuple[float, float]:
    """KB per 1,000 requests by least squares, and the standard error of that."""
    served = [count / 1000 for count in accumulate(done.requests for done in rounds)]
    resident = [done.resident_kb for done in rounds]
    slope, start = linear_regression(served, resident)
    misses = sum((kb - start - slope * count) ** 2 for count, kb in zip(served, resident, strict=True))
    spread = sum((count - fmean(served)) ** 2 for count in served)
    return slope, sqrt(misses / (len(rounds) - 2) / spread)


def main() -> int:
    """The whole campaign: rounds of warm-up and measured ones."""
    seed = first_seed()
    os.environ["GLIBC_TUNABLES"] = NO_THREAD_CACHES
    with tempfile.TemporaryDirectory(prefix="dc-", dir="/tmp") as name:
        folder = Path(name)
        daemon = Daemon(folder, tiny_model(folder / "model"), *FLAGS, *QUICK)
        try:
            storm = Storm(daemon, seed)
            rounds: list[Round] = []
            before: dict[str, int] = {}
            for index in range(NUM_WARMUP + NUM_ROUNDS):
                at_a_time = OPEN_IN_WARMUP if index < NUM_WARMUP else OPEN_AT_A_TIME
                running = storm.run(requests=REQUESTS, each_state=EACH_STATE, kills=KILLS, at_a_time=at_a_time)
                done = asyncio.run(running)
                after = counts(daemon)
                done.resident_kb = rested_kb(daemon)
                print(f"round {index}: {done}", flush=True)
                if index < NUM_WARMUP:
                    before = after
                    continue
                assert after == before, (before, after)
                assert done.killed >= EACH_STATE, done
                rounds.append(done)
        finally:
            status = daemon.stop()
        assert status == 0
    slope, error = growth(rounds)
    result = {
        "campaign": "storm",
        "seed": seed,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "rounds": [{**vars_of(r), "cancelled": dict(r.cancelled)} for r in rounds],
        "front_kb_per_1000_requests": round(slope, 3),
        "standard_error": round(error, 3),
        "counts": before,
    }
    Path("tests/campaigns/results/storm.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"front memory: {slope:.2f} +- {error:.2f} KB per 1,000 requests; counts returned: {before}")
    assert slope < KB_PER_1000
    return 0


if __name__ == "__main__":
    sys.exit(main())
