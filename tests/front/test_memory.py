"""The front's memory is flat: requests that end, are cancelled at random points, or are never read leave nothing."""

import asyncio
import gc
import itertools
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import psutil
import pytest
from downcore.v1 import generation_pb2 as pb
from downcore.v1 import generation_pb2_grpc

from tests.campaigns import budget
from tests.front.harness import NO_THREAD_CACHES, Front, eventually, ids_of, running_front

BARE_SERVER = Path(__file__).with_name("bare_server.py")
AT_ONCE = 50
STALL_S = 0.1


async def storm(target: str, num_requests: int, rng: random.Random) -> Counter[str]:
    """That many requests over one connection, half of them cut short. Returns: how many ended in which way."""
    ways: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def one() -> None:
            request = pb.GenerateRequest(stopping=pb.StoppingParams(max_tokens=rng.randint(1, 12)))
            if rng.random() < 0.3:
                request.text = "hello there"
            else:
                request.token_ids.ids.extend(ids_of("hello there"))
            way = rng.choices(("whole", "at once", "queued", "streaming", "stalled"), (50, 10, 10, 28, 2))[0]
            if way != "whole":
                request.stopping.max_tokens = 10_000
            if way == "stalled":
                request.sampling.logprobs = True
                request.sampling.top_logprobs = 20
            ways[way] += 1
            call = stub.Generate(request)
            num_read = {"whole": 1_000_000, "streaming": rng.randint(1, 7)}.get(way, 0)
            if way in ("queued", "stalled"):
                await asyncio.sleep(STALL_S if way == "stalled" else rng.random() * 0.004)
            if num_read:
                async for _ in call:
                    num_read -= 1
                    if not num_read:
                        break
            call.cancel()

        for _ in range(num_requests // AT_ONCE):
            await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    return ways


class Look(NamedTuple):
    """What a quiet front has."""

    allocated_bytes: int
    blocks: int
    resident_bytes: int


def num_stalled(front: Front) -> int:
    """Streams that the front has ended because nobody read them."""
    found = (re.search(r"(\d+) streams ended: their clients do not read", line) for line in front.log)
    return sum(int(match[1]) for match in found if match)


def allocated(front: Front) -> tuple[int, int]:
    """Bytes and blocks that a quiet front has allocated; the least of a few looks, since its threads come and go."""
    eventually(lambda: not front.sequences())
    looks: list[tuple[int, int]] = []
    for _ in range(4):
        seen = len([line for line in front.log if line.startswith("allocated:")])
        front.process.send_signal(signal.SIGUSR1)
        eventually(lambda seen=seen: len([line for line in front.log if line.startswith("allocated:")]) > seen)
        found = re.findall(r"\d+", [line for line in front.log if line.startswith("allocated:")][-1])
        looks.append((int(found[0]), int(found[1])))
    return min(looks)


@pytest.mark.parametrize("tunables", [NO_THREAD_CACHES, *([""] if budget.is_full() else [])])
@pytest.mark.parametrize("seed", budget.seeds(fraction=1, full=1))
def test_a_storm_of_requests_half_of_them_cut_short_leaves_nothing(
    tmp_path: Path, seed: int, tunables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    rng = random.Random(seed)
    # Of several windows the least counts: a leak is in each, what happens to be in flight is not.
    warm, measured, windows = (30_000, 25_000, 3) if budget.is_full() else (3_000, 1_000, 3)
    with running_front(tmp_path, engine=("--max-running", "24")) as front:
        process = psutil.Process(front.process.pid)
        target = f"unix:{front.socket}"

        async def measure() -> tuple[list[Look], Counter[str]]:
            await storm(target, warm, rng)
            looks = [Look(*allocated(front), process.memory_info().rss)]
            ways: Counter[str] = Counter()
            for _ in range(windows):
                ways += await storm(target, measured, rng)
                looks.append(Look(*allocated(front), process.memory_info().rss))
            return looks, ways

        assert not front.sequences()  # which also connects this test's own channel
        num_fds = process.num_fds()
        looks, ways = asyncio.run(measure())
        gc.collect()  # of this process: the storm's connection lives as long as its last call
        eventually(lambda: process.num_fds() == num_fds)
        kilo = measured / 1000
        grown = [
            [(now - then) / kilo for then, now in zip(before, after, strict=True)]
            for before, after in itertools.pairwise(looks)
        ]
        bytes_per_kilo, blocks_per_kilo, resident_per_kilo = map(min, zip(*grown, strict=True))
        print(f"{ways} bytes per 1,000: {bytes_per_kilo:.0f}, blocks: {blocks_per_kilo:.1f}, "
              f"resident: {resident_per_kilo:.0f}; of windows {grown}")  # fmt: skip
        assert min(ways.values()) > 0
        assert len(ways) == 5
        assert blocks_per_kilo < (5 if budget.is_full() else 50)
        if tunables:  # a short run has warmed up little: a leak of 8 bytes a request shows all the same
            assert bytes_per_kilo < (1024 if budget.is_full() else 8192)
        if budget.is_full():  # as it is served the caches still fill: 1 to 1.5 KB after 80,000 requests
            assert resident_per_kilo < (1024 if tunables else 2048)


def test_a_cancelled_stream_leaks_in_the_library_and_not_once_it_is_mended(tmp_path: Path) -> None:
    lost = {kind: batches_lost_by_cancelling(tmp_path / kind, kind) for kind in ("bare", "mended")}
    print(f"batches whose memory is lost: {lost}")
    assert lost["bare"] > 400
    assert lost["mended"] == 0


def batches_lost_by_cancelling(socket: Path, kind: str) -> int:
    """Batches without an event taken after 500 cancelled streams of a server without anything of ours."""
    server = subprocess.Popen(
        [sys.executable, str(BARE_SERVER), kind, str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def num_lost() -> int:
        stdin.write("\n")
        stdin.flush()
        given, taken = map(int, stdout.readline().split())
        assert given > 500
        return given - taken

    async def cancel(num_streams: int) -> None:
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            method = channel.unary_stream("/t.T/Stream")

            async def one() -> None:
                call = method(b"")
                async for _ in call:
                    break
                call.cancel()

            for _ in range(num_streams // AT_ONCE):
                await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    try:
        assert stdout.readline() == "listening\n"
        asyncio.run(cancel(500))
        return min(num_lost() for _ in range(20) if time.sleep(0.05) is None)
    finally:
        stdin.close()
        server.wait(10)
        stdout.close()


def test_the_memory_of_streams_that_nobody_read_is_returned(tmp_path: Path) -> None:
    flags = ("--stall-timeout-s", "0.5")
    with running_front(tmp_path, engine=("--token-s", "0.0002"), flags=flags) as front:
        process = psutil.Process(front.process.pid)
        before = process.memory_info().rss
        narrow = front.new_channel(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
        stub = generation_pb2_grpc.GenerationServiceStub(narrow)
        request = pb.GenerateRequest(
            text="hello", sampling=pb.SamplingParams(logprobs=True, top_logprobs=20),
            stopping=pb.StoppingParams(max_tokens=500_000),
        )  # fmt: skip
        calls = [stub.Generate(request, timeout=60) for _ in range(16)]
        eventually(lambda: num_stalled(front) == 16, timeout_s=40)
        assert not front.sequences()
        for call in calls:
            call.cancel()
        narrow.close()
        # Each had a buffer of up to a megabyte here, and what its connection took besides.
        eventually(lambda: process.memory_info().rss - before < 8 << 20)
