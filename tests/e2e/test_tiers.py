"""The whole daemon with a disk tier: warmed prefixes outlive the engine, the daemon, and kills at any instant."""

import os
import random
import signal
from pathlib import Path

import grpc
import pytest
from downcore.v1 import cache_pb2, cache_pb2_grpc
from downcore.v1 import generation_pb2 as pb

from tests.campaigns.budget import seeds
from tests.e2e.daemon import TINY_FLAGS, Daemon, running, summary_of, tiny_model, tokens_of
from tests.front.harness import eventually

GREEDY = pb.SamplingParams(temperature=0, logprobs=True)
STOPPING = pb.StoppingParams(max_tokens=8, ignore_eos=True)


def flags(folder: Path) -> tuple[str, ...]:
    disk = ("--disk-path", str(folder / "tier"), "--disk-bytes", str(256 << 20), "--break-even", "false")
    return (*TINY_FLAGS, "--pool-bytes", str(16 << 20), *disk)


def prompt(salt: int, length: int = 300) -> pb.TokenIds:
    return pb.TokenIds(ids=[1 + (i * i + 7 * salt) % 250 for i in range(length)])


def warm(daemon: Daemon, salt: int) -> cache_pb2.WarmReceipt:
    """A prefix on disk, synced; the receipt."""
    request = cache_pb2.WarmPrefixRequest(
        prompts=[cache_pb2.Prompt(token_ids=prompt(salt))], tier=cache_pb2.CACHE_TIER_DISK, durable=True
    )
    responses = list(cache_pb2_grpc.CacheServiceStub(daemon.channel).WarmPrefix(request, timeout=60))
    return responses[-1].receipt


def serve(daemon: Daemon, salt: int) -> tuple[list[int], int]:
    """The answer, and how many of the prompt's tokens came from disk."""
    responses = daemon.generate(token_ids=prompt(salt), sampling=GREEDY, stopping=STOPPING)
    return tokens_of(responses), summary_of(responses).usage.cached_tokens.disk


def test_a_durable_prefix_is_found_after_the_engine_and_after_the_daemon_were_killed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    daemon = Daemon(tmp_path, model, *flags(tmp_path))
    try:
        cold, from_disk = serve(daemon, 1)
        assert from_disk == 0
        receipt = warm(daemon, 2)
        assert receipt.prefixes[0].durable
        answer, _ = serve(daemon, 2)
        before = daemon.info()
        os_kill(before.engine_pid)
        eventually(lambda: daemon.info().engine_starts == 2 and is_serving(daemon), timeout_s=30)
        assert serve(daemon, 2) == (answer, 256)
    finally:
        daemon.channel.close()
        daemon.process.kill()
        daemon.process.wait()
    with running(tmp_path, model, *flags(tmp_path)) as again:
        assert serve(again, 2) == (answer, 256)
        assert serve(again, 1) == (cold, 256), "what was served is written down too"
        assert again.ledger().balanced


@pytest.mark.parametrize("seed", seeds(fraction=2, full=50))
def test_a_daemon_killed_while_it_writes_serves_what_was_committed_and_nothing_torn(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = tiny_model(tmp_path / "model")
    expected: dict[int, list[int]] = {}
    durable: list[int] = []
    for round_ in range(2):
        daemon = Daemon(tmp_path, model, *flags(tmp_path))
        try:
            for salt in durable:
                assert serve(daemon, salt) == (expected[salt], 256), "a receipt was a promise"
            for salt in range(round_ * 6, round_ * 6 + 6):
                expected[salt], _ = serve(daemon, salt)
                if rng.random() < 0.5:
                    warm(daemon, salt)
                    durable.append(salt)
        finally:
            engine_pid = daemon.info().engine_pid
            victims = [engine_pid, daemon.process.pid]
            rng.shuffle(victims)
            for pid in victims:
                os_kill(pid)
            daemon.channel.close()
            daemon.process.wait()
    with running(tmp_path, model, *flags(tmp_path)) as daemon:
        for salt, answer in expected.items():
            found, from_disk = serve(daemon, salt)
            assert found == answer
            assert salt not in durable or from_disk == 256
        assert daemon.ledger().balanced


def os_kill(pid: int) -> None:
    """SIGKILL to a process that this test started."""
    os.kill(pid, signal.SIGKILL)


def is_serving(daemon: Daemon) -> bool:
    """It answers a request."""
    try:
        daemon.generate(token_ids=pb.TokenIds(ids=[1]), stopping=pb.StoppingParams(max_tokens=1), timeout=5)
    except grpc.RpcError:
        return False
    return True
