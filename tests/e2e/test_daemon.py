"""The whole daemon with a tiny model: what a client sees, and what is left when it has gone."""

import asyncio
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.config import EngineConfig, LoadFormat
from tests.campaigns.budget import first_seed
from tests.campaigns.storm import FLAGS, STATES, Storm, counts
from tests.e2e.daemon import TINY_FLAGS, Daemon, running, summary_of, tiny_model, tokens_of
from tests.exact.probe import Probe
from tests.front.harness import eventually


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("d")
    with running(folder, tiny_model(folder / "model"), *TINY_FLAGS, "--pool-bytes", str(16 << 20)) as daemon:
        yield daemon


def prompt(length: int, salt: int = 0) -> pb.TokenIds:
    return pb.TokenIds(ids=[1 + (i * i + salt) % 250 for i in range(length)])


GREEDY = pb.SamplingParams(temperature=0, logprobs=True)


def test_the_wire_gives_what_the_engine_computes(daemon: Daemon, tmp_path: Path) -> None:
    responses = daemon.generate(
        token_ids=prompt(200), sampling=GREEDY, stopping=pb.StoppingParams(max_tokens=20, ignore_eos=True)
    )
    config = EngineConfig(
        str(tiny_model(tmp_path / "model")),
        load_format=LoadFormat.DUMMY,
        dtype="float32",
        threads=1,
        block_size=16,
        grid=64,
        pool_bytes=1 << 20,
        max_sequences=4,
    )
    assert tokens_of(responses) == list(Probe(config).run(list(prompt(200).ids), 20).answer)
    assert [r.WhichOneof("event") for r in responses[:1] + responses[-2:]] == ["started", "finished", "summary"]
    usage, timings = summary_of(responses).usage, summary_of(responses).timings
    assert (usage.prompt_tokens, usage.completion_tokens) == (200, 20)
    assert 0 <= timings.queue_s <= timings.first_token_s <= timings.total_s
    assert 0 < timings.prefill_s <= timings.first_token_s


def test_the_second_request_is_told_what_came_from_the_cache(daemon: Daemon) -> None:
    first, second = (
        daemon.generate(token_ids=prompt(300, 5), sampling=GREEDY, stopping=pb.StoppingParams(max_tokens=5))
        for _ in range(2)
    )
    assert summary_of(first).usage.cached_tokens.device == 0
    assert summary_of(second).usage.cached_tokens.device == 256
    assert tokens_of(first) == tokens_of(second)
    assert daemon.tier().hit_tokens >= 256


def test_choices_differ_and_each_is_reproduced_by_its_own_seed(daemon: Daemon) -> None:
    stopping = pb.StoppingParams(max_tokens=12, ignore_eos=True)
    forked = daemon.generate(token_ids=prompt(70), sampling=pb.SamplingParams(seed=50), stopping=stopping, n=8)
    answers = [tokens_of(forked, index) for index in range(8)]
    assert len({tuple(answer) for answer in answers}) == 8
    alone = daemon.generate(token_ids=prompt(70), sampling=pb.SamplingParams(seed=53), stopping=stopping)
    assert tokens_of(alone) == answers[3]
    assert summary_of(forked).usage.completion_tokens == 96


def test_logprobs_are_a_distribution(daemon: Daemon) -> None:
    responses = daemon.generate(
        token_ids=prompt(30),
        sampling=pb.SamplingParams(temperature=0, logprobs=True, top_logprobs=20),
        stopping=pb.StoppingParams(max_tokens=8, ignore_eos=True),
    )
    positions = [position for r in responses if r.HasField("chunk") for position in r.chunk.logprobs]
    assert len(positions) == 8
    for position in positions:
        assert position.top[0].token_id == position.chosen.token_id
        assert position.top[0].logprob == position.chosen.logprob
        values = [top.logprob for top in position.top]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1.0 + 1e-5


def test_one_request_is_seen_in_every_table_and_can_be_aborted(daemon: Daemon) -> None:
    call = daemon.generation.Generate(
        pb.GenerateRequest(
            request_id="seen", token_ids=prompt(40), n=2, stopping=pb.StoppingParams(max_tokens=3000, ignore_eos=True)
        )
    )
    assert next(call).HasField("started")
    rows = {row.id: row for row in daemon.sequences()}
    assert {"seen/0", "seen/1"} <= set(rows)
    assert rows["seen/1"].state == admin_pb2.SEQUENCE_STATE_DECODING
    assert any(entry.owner == "seen/0" and entry.kind == "blocks" for entry in daemon.ledger().entries)
    daemon.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="seen/1"), timeout=10)
    eventually(lambda: {row.id for row in daemon.sequences()} == {"seen/0"})
    daemon.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="seen"), timeout=10)
    reasons = {r.finished.index: r.finished.reason for r in call if r.HasField("finished")}
    assert reasons == {0: pb.FINISH_REASON_ABORTED, 1: pb.FINISH_REASON_ABORTED}
    eventually(lambda: not daemon.sequences())
    assert daemon.ledger().balanced


def test_a_prompt_that_can_never_fit_is_refused_and_the_next_works(daemon: Daemon) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.generate(token_ids=prompt(4000), stopping=pb.StoppingParams(max_tokens=2000))
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert tokens_of(daemon.generate(token_ids=prompt(10), stopping=pb.StoppingParams(max_tokens=2, ignore_eos=True)))


def test_a_killed_engine_is_replaced_and_serves_the_same_answers(tmp_path: Path) -> None:
    with running(tmp_path, tiny_model(tmp_path / "model"), *TINY_FLAGS, "--pool-bytes", str(8 << 20)) as daemon:
        request: dict[str, Any] = {
            "token_ids": prompt(100),
            "sampling": GREEDY,
            "stopping": pb.StoppingParams(max_tokens=8),
        }
        before = tokens_of(daemon.generate(**request))
        call = daemon.generation.Generate(
            pb.GenerateRequest(token_ids=prompt(5), stopping=pb.StoppingParams(max_tokens=3000, ignore_eos=True))
        )
        assert next(call).HasField("started")
        os.kill(daemon.info().engine_pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        eventually(lambda: daemon.info().state == admin_pb2.ENGINE_STATE_SERVING, 60)
        assert tokens_of(daemon.generate(**request)) == before
        assert daemon.info().engine_starts == 2


def test_sigterm_lets_a_running_stream_finish(tmp_path: Path) -> None:
    with running(tmp_path, tiny_model(tmp_path / "model"), *TINY_FLAGS, "--pool-bytes", str(8 << 20)) as daemon:
        call = daemon.generation.Generate(
            pb.GenerateRequest(token_ids=prompt(5), stopping=pb.StoppingParams(max_tokens=200, ignore_eos=True))
        )
        assert next(call).HasField("started")
        daemon.process.send_signal(signal.SIGTERM)
        responses = list(call)
        assert summary_of(responses).usage.completion_tokens == 200
        assert daemon.process.wait(30) == 0


def test_a_storm_of_cancellations_returns_every_count(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, tiny_model(tmp_path / "model"), *FLAGS)
    try:
        storm = Storm(daemon, first_seed())
        asyncio.run(storm.run(requests=40, each_state=2, kills=1))
        before, num_threads = counts(daemon), threading.active_count()
        done = asyncio.run(storm.run(requests=120, each_state=8, kills=1))
        print(f"storm: {done}")
        assert all(done.cancelled[state] >= 8 for state in STATES)
        assert done.killed >= 10
        assert done.completed >= 10
        assert counts(daemon) == before
        assert threading.active_count() <= num_threads  # of the client, which is this process
    finally:
        status = daemon.stop()
    assert status == 0
