"""The stream of block events of a real daemon: what is in it, whom it is for, and how one goes on after a break."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2, cache_pb2, cache_pb2_grpc
from downcore.v1 import generation_pb2 as pb

from daemon.cache_messages import TierName
from tests.e2e.daemon import TINY_FLAGS, Daemon, running, tiny_model
from tests.front.harness import eventually
from tests.front.secured import Who, write_principals
from tests.gateway.client import Client
from tests.gateway.mirror import Mirror

GRID, BLOCK = 64, 16  # of TINY_FLAGS
ONE, TWO = Who("one", ["generate", "warm"]), Who("two", ["generate", "warm"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("kv")
    principals = write_principals(folder / "principals.toml", (ONE, TWO))
    flags = ("--gateway", "true", "--principals-file", str(principals), "--pool-bytes", str(16 << 20))
    with running(folder, tiny_model(folder / "model"), *TINY_FLAGS, *flags) as daemon:
        yield daemon


def prompt(length: int, salt: int) -> list[int]:
    return [1 + (i * i + salt) % 250 for i in range(length)]


def compute(daemon: Daemon, who: Who, ids: list[int]) -> None:
    for _ in Client(daemon.channel, who.token).stream(ids, max_tokens=1):
        pass


def read_until(stream: Any, mirror: Mirror, condition: Callable[[], bool]) -> None:
    while not condition():
        mirror.read(next(stream))


def test_blocks_come_with_their_tokens_in_path_order_and_go_when_evicted(daemon: Daemon) -> None:
    ids = prompt(3 * GRID + 5, 1)
    mirror, stream = Mirror(), Client(daemon.channel, ONE.token).subscribe()
    read_until(stream, mirror, lambda: mirror.num_parts > 0)
    before = set(mirror.copies)
    compute(daemon, ONE, ids)
    read_until(stream, mirror, lambda: len(mirror.copies) >= len(before) + 3 * GRID // BLOCK)
    new = {key: value for key, value in mirror.copies.items() if key not in before}
    assert {tier for tier, _ in new} == {TierName.DEVICE}
    parent, path = None, list[int]()
    by_parent = {parent: (key, tokens) for (_, key), (parent, tokens) in new.items()}
    while parent in by_parent:
        parent, tokens = by_parent[parent]
        path += tokens
    assert path == ids[: 3 * GRID]
    cache = cache_pb2_grpc.CacheServiceStub(daemon.channel)
    selector = cache_pb2.PrefixSelector(prompt=cache_pb2.Prompt(token_ids=pb.TokenIds(ids=ids)))
    metadata = (("authorization", f"Bearer {ONE.token}"),)
    cache.EvictPrefix(cache_pb2.EvictPrefixRequest(prefix=selector), timeout=10, metadata=metadata)
    read_until(stream, mirror, lambda: set(mirror.copies) == before)
    stream.cancel()


def test_nobody_is_told_of_another_namespaces_blocks(daemon: Daemon) -> None:
    mirrors = {who.name: Mirror() for who in (ONE, TWO)}
    streams = {who.name: Client(daemon.channel, who.token).subscribe() for who in (ONE, TWO)}
    for name, stream in streams.items():
        read_until(stream, mirrors[name], lambda name=name: mirrors[name].num_parts > 0)
    starts = {name: (mirror.sequence, len(mirror.copies)) for name, mirror in mirrors.items()}
    for turn in range(4):
        compute(daemon, TWO if turn < 3 else ONE, prompt(2 * GRID + 5, 20 + turn))
    read_until(streams["one"], mirrors["one"], lambda: len(mirrors["one"].copies) > starts["one"][1])
    assert mirrors["one"].sequence == starts["one"][0] + 1, "a gap would tell that others compute"
    told = {tokens for _, tokens in mirrors["one"].copies.values()}
    for turn in range(3):
        assert tuple(prompt(BLOCK, 20 + turn)) not in told
    read_until(
        streams["two"], mirrors["two"], lambda: len(mirrors["two"].copies) == starts["two"][1] + 3 * 2 * GRID // BLOCK
    )
    for stream in streams.values():
        stream.cancel()


def test_a_stream_goes_on_after_a_break_and_starts_anew_where_it_cannot(daemon: Daemon) -> None:
    client = Client(daemon.channel, ONE.token)
    mirror, stream = Mirror(), client.subscribe()
    read_until(stream, mirror, lambda: mirror.num_parts > 0)
    stream.cancel()
    compute(daemon, ONE, prompt(GRID + 5, 40))
    stream = client.subscribe(mirror.sequence)
    num_before = len(mirror.copies)
    read_until(stream, mirror, lambda: len(mirror.copies) > num_before)
    assert mirror.num_parts == 1, "it was at hand"
    stream.cancel()
    fresh, stream = Mirror(), client.subscribe(mirror.sequence - 1_000_000)
    read_until(stream, fresh, lambda: fresh.num_parts > 0)
    assert fresh.copies == mirror.copies
    stream.cancel()
    quiet = client.subscribe(mirror.sequence)
    assert quiet.initial_metadata() is not None, "a subscriber that has everything must hear that it is heard"
    quiet.cancel()


def test_what_an_engine_that_died_had_is_forgotten(daemon: Daemon) -> None:
    client = Client(daemon.channel, ONE.token)
    compute(daemon, ONE, prompt(GRID + 5, 50))
    mirror, stream = Mirror(), client.subscribe()
    read_until(stream, mirror, lambda: bool(mirror.copies))
    os.kill(daemon.info().engine_pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        read_until(stream, mirror, lambda: False)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: daemon.info().state == admin_pb2.ENGINE_STATE_SERVING, 60)
    stream = client.subscribe(mirror.sequence)
    read_until(stream, mirror, lambda: mirror.num_parts == 2)
    assert not mirror.copies, "the new engine has nothing"
    stream.cancel()
