"""The engine is killed under load: every stream is told at once and when to come back, and what was cached is found."""

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import grpc.aio
from downcore.v1 import admin_pb2, cache_pb2, cache_pb2_grpc, generation_pb2_grpc
from downcore.v1 import generation_pb2 as pb

from daemon.front.status import PUSHBACK_KEY
from tests.campaigns.budget import is_full
from tests.e2e.daemon import TINY_FLAGS, Daemon, crowd, running, summary_of, tiny_model, tokens_of
from tests.front.harness import details_of, eventually

NUM_STREAMS = 32
MAX_TOLD_S = 1.0
MAX_BACK_S = 10.0
KILLS = 5 if is_full() else 1
PROMPT = pb.TokenIds(ids=[1 + (i * i) % 250 for i in range(300)])
ANSWER = pb.StoppingParams(max_tokens=8, ignore_eos=True)
LONG = pb.StoppingParams(max_tokens=3_000, ignore_eos=True)


async def kill_under_streams(daemon: Daemon) -> tuple[float, list[grpc.aio.AioRpcError]]:
    """Kills the engine once 32 streams have a token each. Returns: seconds until the last was told, and what."""
    async with grpc.aio.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def one(index: int) -> tuple[float, grpc.aio.AioRpcError]:
            call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5 + index] * 20), stopping=LONG))
            try:
                async for response in call:
                    if response.HasField("chunk"):
                        streaming.add(index)
            except grpc.aio.AioRpcError as error:
                return time.monotonic(), error
            raise AssertionError("a stream ended as if nothing had happened")

        streaming: set[int] = set()
        calls = [asyncio.create_task(one(index)) for index in range(NUM_STREAMS)]
        async with asyncio.timeout(60):
            while len(streaming) < NUM_STREAMS:
                await asyncio.sleep(0.01)
        killed_s = time.monotonic()
        os.kill(daemon.info().engine_pid, signal.SIGKILL)
        ended = await asyncio.gather(*calls)
    return max(told_s for told_s, _ in ended) - killed_s, [error for _, error in ended]


def answer(daemon: Daemon) -> tuple[list[int], pb.CachedTokens]:
    """What is answered to the prompt, and where it was found."""
    greedy = pb.SamplingParams(temperature=0.0)
    responses = daemon.generate(token_ids=PROMPT, sampling=greedy, stopping=ANSWER)
    return tokens_of(responses), summary_of(responses).usage.cached_tokens


def test_an_engine_killed_under_32_streams_is_told_of_at_once_and_its_prefixes_are_found_again(tmp_path: Path) -> None:
    disk = ("--disk-path", str(tmp_path / "tier"), "--disk-bytes", str(256 << 20), "--break-even", "false")
    flags = (*TINY_FLAGS, "--pool-bytes", str(32 << 20), "--max-sequences", str(NUM_STREAMS), *disk)
    with running(tmp_path, tiny_model(tmp_path / "model"), *flags) as daemon:
        warm = cache_pb2.WarmPrefixRequest(
            prompts=[cache_pb2.Prompt(token_ids=PROMPT)], tier=cache_pb2.CACHE_TIER_DISK, durable=True
        )
        list(cache_pb2_grpc.CacheServiceStub(daemon.channel).WarmPrefix(warm, timeout=60))
        before, _ = answer(daemon)
        for kill in range(KILLS):
            told_s, errors = asyncio.run(kill_under_streams(daemon))
            began_s = time.monotonic()
            assert told_s < MAX_TOLD_S
            assert len(errors) == NUM_STREAMS
            for error in errors:
                check_told(error)
            eventually(lambda: daemon.info().state == admin_pb2.ENGINE_STATE_SERVING, timeout_s=60)
            after, cached = answer(daemon)
            back_s = time.monotonic() - began_s
            print(f"32 streams told in {told_s * 1000:.0f} ms; served again, from disk, after {back_s:.1f} s")
            assert back_s < MAX_BACK_S * crowd()
            assert (after, cached.disk) == (before, 256)
            assert daemon.info().engine_starts == kill + 2
        daemon.wait_idle()
        assert daemon.ledger().balanced, list(daemon.ledger().findings)


def check_told(error: grpc.aio.AioRpcError) -> None:
    """UNAVAILABLE, with the time after which to try again in both places where clients look."""
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    details = details_of(error)
    assert details["ErrorInfo"].reason == "ENGINE_UNAVAILABLE"
    assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    assert int(dict(error.trailing_metadata())[PUSHBACK_KEY]) > 0
