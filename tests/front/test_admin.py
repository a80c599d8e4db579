"""AdminService over a real socket: what the engine says, under the names that clients know."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.config import EngineConfig
from daemon.errors import ErrorReason, RequestError
from daemon.front.admin import AdminService
from daemon.front.config import FrontConfig
from daemon.messages import Answer, QueryKind
from tests.front.harness import Front, details_of, eventually, running_front

LONG = pb.StoppingParams(max_tokens=50_000)


def test_server_info_is_the_engines(front: Front) -> None:
    info = front.info()
    assert (info.model, info.vocab_size, info.block_size, info.state) == (
        "scripted", 512, 64, admin_pb2.ENGINE_STATE_SERVING,
    )  # fmt: skip
    assert (info.engine_starts, info.loaded) == (1, 1.0)
    assert info.engine_pid != front.process.pid
    assert info.uptime_s > 0


def test_tiers_add_up(front: Front) -> None:
    (tier,) = front.admin.ListTiers(admin_pb2.ListTiersRequest(), timeout=10).tiers
    assert tier.held_bytes + tier.cached_bytes + tier.free_bytes == tier.capacity_bytes
    assert tier.hit_tokens == 7


def test_watching_tiers_sends_them_now_and_at_each_interval(front: Front) -> None:
    began_s = time.monotonic()
    watch = front.admin.WatchTiers(admin_pb2.WatchTiersRequest(interval_s=0.1), timeout=10)
    times = [next(watch).time_s for _ in range(3)]
    watch.cancel()
    assert time.monotonic() - began_s >= 0.2
    assert times == sorted(times)


def test_a_watcher_that_does_not_read_is_ended_and_leaves_its_place() -> None:
    class Asked:
        async def query(self, kind: QueryKind) -> Answer:
            return Answer(1)

    class Stalled:
        async def write(self, message: object) -> None:
            await asyncio.Event().wait()

    async def watch() -> RequestError:
        config = FrontConfig(engine=EngineConfig("model"), stall_timeout_s=0.05)
        nothing: Any = None
        supervisor: Any = Asked()
        service = AdminService(
            config, "0", nothing, supervisor, nothing, abort=lambda request: 0, on_drain=lambda: None
        )  # fmt: skip
        request = admin_pb2.WatchTiersRequest(interval_s=0.1)
        with pytest.raises(RequestError) as caught:
            await asyncio.wait_for(service.WatchTiers(request, Stalled()), 10)
        assert service._num_watchers == 0
        return caught.value

    assert asyncio.run(watch()).reason is ErrorReason.READER_STALLED


def test_sequences_and_ledger_carry_the_clients_ids(front: Front) -> None:
    call = front.stream(request_id="mine", n=2, stopping=LONG)
    next(call)
    rows = front.sequences()
    assert {(row.id, row.request_id, row.index) for row in rows} == {("mine/0", "mine", 0), ("mine/1", "mine", 1)}
    one = front.admin.ListSequences(admin_pb2.ListSequencesRequest(id="mine/1"), timeout=10).sequences
    assert [row.id for row in one] == ["mine/1"]
    assert one[0].residency == admin_pb2.Residency(
        device_blocks=2, host_blocks=3, disk_blocks=4, streamed_bytes=4096, streamed_bytes_per_s=1e6
    )
    assert [row.HasField("residency") for row in rows] == [False, True], "only of what is larger than the device"
    assert not front.admin.ListSequences(admin_pb2.ListSequencesRequest(id="other"), timeout=10).sequences
    ledger = front.admin.GetLedger(admin_pb2.GetLedgerRequest(), timeout=10)
    assert ledger.balanced
    assert [entry.owner for entry in ledger.entries] == ["mine/0"]
    call.cancel()
    eventually(lambda: not front.sequences())


def test_aborting_one_sequence_leaves_the_others(front: Front) -> None:
    call = front.stream(request_id="pair", n=2, stopping=LONG)
    next(call)
    done = front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="pair/0"), timeout=10)
    assert done.aborted == 1
    eventually(lambda: [row.id for row in front.sequences()] == ["pair/1"])
    with pytest.raises(grpc.RpcError) as caught:
        front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="pair/0"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="pair"), timeout=10).aborted == 1
    ends = [r.finished for r in call if r.HasField("finished")]
    assert {(end.index, end.reason) for end in ends} == {
        (0, pb.FINISH_REASON_ABORTED), (1, pb.FINISH_REASON_ABORTED),
    }  # fmt: skip
    eventually(lambda: not front.sequences())


def test_an_unknown_sequence_is_not_found_and_the_field_named(front: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="nobody"), timeout=10)
    assert details_of(caught.value)["ErrorInfo"].reason == "NOT_FOUND"
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == "id"


def test_an_engine_that_does_not_answer_costs_a_bounded_wait(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--mute",), flags=("--query-timeout-s", "0.2")) as front:
        with pytest.raises(grpc.RpcError) as caught:
            front.admin.ListTiers(admin_pb2.ListTiersRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert front.generate(stopping=pb.StoppingParams(max_tokens=1))[-1].HasField("summary")
