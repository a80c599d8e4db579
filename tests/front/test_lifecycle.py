"""Deaths and ends: the engine's, the front's, an orderly one, a hasty one; and who gets to know what."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from downcore.v1 import admin_pb2, generation_pb2_grpc
from downcore.v1 import generation_pb2 as pb
from grpc_health.v1 import health_pb2

from tests.front.harness import Front, details_of, eventually, running_front, text_of

LONG = pb.StoppingParams(max_tokens=100_000)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def code_of(caught: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    return caught.value.code()  # type: ignore[attr-defined, no-any-return]


def test_the_front_never_imports_torch() -> None:
    script = "import daemon.__main__, sys; assert 'grpc' in sys.modules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_when_the_engine_dies_every_open_call_ends_at_once_and_the_next_is_served(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--max-running", "20")) as front:
        calls = [front.stream(stopping=LONG) for _ in range(32)]
        eventually(lambda: len(front.sequences()) == 32)
        assert sum(s.state == admin_pb2.SEQUENCE_STATE_DECODING for s in front.sequences()) == 20
        killed_s = time.monotonic()
        os.kill(front.info().engine_pid, signal.SIGKILL)
        errors: list[grpc.RpcError] = []
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            errors.append(caught.value)
        assert time.monotonic() - killed_s < 1.0
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}  # type: ignore[attr-defined]
        details = details_of(errors[0])
        assert details["ErrorInfo"].reason == "ENGINE_UNAVAILABLE"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        eventually(lambda: front.health_status() == SERVING)
        assert text_of(front.generate("back", stopping=pb.StoppingParams(max_tokens=4))) == "back"
        assert front.info().engine_starts == 2


def test_an_engine_that_cannot_load_ends_the_front_with_its_message(tmp_path: Path) -> None:
    front = Front(tmp_path, engine=("--fail-load", "no such tensor"), wait=False)
    assert front.process.wait(20) == 1
    front.close()
    assert "downcored: no such tensor\n" in front.log
    assert not any("Traceback" in line for line in front.log)


def test_an_engine_that_always_dies_while_loading_is_given_up(tmp_path: Path) -> None:
    flags = ("--max-failed-starts", "3", "--restart-backoff-s", "0.01")
    front = Front(tmp_path, engine=("--crash-loading",), flags=flags, wait=False)
    assert front.process.wait(30) == 1
    front.close()
    assert sum("engine started" in line for line in front.log) == 3


def test_a_folder_without_a_tokenizer_ends_the_front_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    front = Front(tmp_path, flags=("--model", str(tmp_path / "empty")), wait=False)
    assert front.process.wait(30) == 1
    front.close()
    assert "downcored: the model folder has no tokenizer.json\n" in front.log


def test_sigterm_while_streaming_lets_the_stream_finish_and_exits_0(tmp_path: Path) -> None:
    front = Front(tmp_path, engine=("--token-s", "0.002"))
    call = front.stream("hello", stopping=pb.StoppingParams(max_tokens=300))
    got = [next(call)]
    watch = front.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    engine_pid = front.info().engine_pid
    front.process.send_signal(signal.SIGTERM)
    assert next(watch).status == NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        front.generate("late")
    assert code_of(caught) is grpc.StatusCode.UNAVAILABLE
    assert details_of(caught.value)["ErrorInfo"].reason == "DRAINING"
    got += list(call)
    assert got[-1].summary.usage.completion_tokens == 300
    assert front.process.wait(10) == 0
    assert not psutil.pid_exists(engine_pid)
    assert not front.socket.exists()
    front.close()


def test_what_outlives_the_drain_window_is_aborted_and_the_exit_is_still_0(tmp_path: Path) -> None:
    front = Front(tmp_path, flags=("--drain-window-s", "0.3"))
    call = front.stream(stopping=LONG)
    next(call)
    front.process.send_signal(signal.SIGTERM)
    got = list(call)
    assert got[-2].finished.reason == pb.FINISH_REASON_ABORTED
    assert got[-1].HasField("summary")
    assert front.process.wait(10) == 0
    front.close()


def test_a_second_signal_ends_at_once_and_takes_the_engine_along(tmp_path: Path) -> None:
    front = Front(tmp_path)
    call = front.stream(stopping=LONG)
    next(call)
    engine_pid = front.info().engine_pid
    front.process.send_signal(signal.SIGTERM)
    eventually(lambda: front.health_status() == NOT_SERVING)
    threading.Event().wait(0.1)  # a signal that comes at once with the first is the same one
    second_s = time.monotonic()
    front.process.send_signal(signal.SIGTERM)
    assert front.process.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - second_s < 1.0
    eventually(lambda: not psutil.pid_exists(engine_pid))
    front.close()


def test_one_signal_to_the_whole_process_group_is_one_signal(tmp_path: Path) -> None:
    front = Front(tmp_path, new_group=True)
    call = front.stream("hello", stopping=pb.StoppingParams(max_tokens=200))
    got = [next(call)]
    front.process.send_signal(signal.SIGTERM)
    os.killpg(front.process.pid, signal.SIGTERM)
    got += list(call)
    assert got[-1].summary.usage.completion_tokens == 200
    assert front.process.wait(10) == 0
    front.close()


def test_engine_and_tokenizers_end_when_the_front_is_killed(tmp_path: Path) -> None:
    front = Front(tmp_path)
    children = psutil.Process(front.process.pid).children(recursive=True)
    assert len(children) == 2
    os.kill(front.process.pid, signal.SIGKILL)
    front.process.wait()
    eventually(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    front.close()


def test_a_killed_fronts_socket_hinders_nobody_and_a_living_ones_is_not_taken(tmp_path: Path) -> None:
    first = Front(tmp_path)
    second = Front(tmp_path, wait=False)
    assert second.process.wait(20) == 1
    second.close()
    assert any("another daemon holds" in line for line in second.log)
    assert text_of(first.generate("still", stopping=pb.StoppingParams(max_tokens=4))) == "still"
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert first.socket.exists()
    first.close()
    with running_front(tmp_path) as third:
        assert text_of(third.generate("new", stopping=pb.StoppingParams(max_tokens=3))) == "new"


def test_drain_refuses_new_work_and_answers_when_the_last_request_has_ended(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--token-s", "0.002")) as front:
        call = front.stream(stopping=pb.StoppingParams(max_tokens=200))
        next(call)
        early = front.admin.Drain(admin_pb2.DrainRequest(timeout_s=0), timeout=10)
        assert (early.drained, early.open_requests) == (False, 1)
        assert front.info().state == admin_pb2.ENGINE_STATE_DRAINING
        assert (front.health_status(), front.health_status("live")) == (NOT_SERVING, SERVING)
        with pytest.raises(grpc.RpcError) as caught:
            front.generate("late")
        assert details_of(caught.value)["ErrorInfo"].reason == "DRAINING"
        draining = front.admin.Drain.future(admin_pb2.DrainRequest(timeout_s=20), timeout=30)
        assert list(call)[-1].HasField("summary")
        assert draining.result().drained


def test_health_follows_loading_the_step_clock_and_the_engines_death(tmp_path: Path) -> None:
    front = Front(tmp_path, engine=("--load-s", "0.7"), flags=("--pulse-timeout-s", "0.5"), wait=False)
    eventually(front.socket.exists)
    eventually(lambda: any("engine started" in line for line in front.log))
    grpc.channel_ready_future(front.channel).result(timeout=10)
    services = ("", "downcore.v1.GenerationService", "downcore.v1.CacheService", "downcore.v1.AdminService")
    assert {front.health_status(name) for name in services} == {NOT_SERVING}
    assert front.health_status("live") == SERVING, "who loads is alive"
    assert front.info().state == admin_pb2.ENGINE_STATE_LOADING
    with pytest.raises(grpc.RpcError) as caught:
        front.generate("too early")
    assert details_of(caught.value)["ErrorInfo"].reason == "ENGINE_UNAVAILABLE"
    watch = front.health.Watch(health_pb2.HealthCheckRequest(service=services[1]))
    assert [next(watch).status for _ in range(2)] == [NOT_SERVING, SERVING]
    assert {front.health_status(name) for name in services} == {SERVING}
    engine_pid = front.info().engine_pid
    os.kill(engine_pid, signal.SIGUSR1)
    assert next(watch).status == NOT_SERVING
    assert front.health_status("live") == NOT_SERVING, "its step clock stands still"
    assert front.info().state == admin_pb2.ENGINE_STATE_DOWN
    os.kill(engine_pid, signal.SIGUSR2)
    assert next(watch).status == SERVING
    os.kill(engine_pid, signal.SIGKILL)
    assert [next(watch).status for _ in range(2)] == [NOT_SERVING, SERVING]
    with pytest.raises(grpc.RpcError) as caught:
        front.health_status("no.such.Service")
    assert code_of(caught) is grpc.StatusCode.NOT_FOUND
    watch.cancel()
    assert front.close() == 0


def test_a_reader_that_stalls_is_ended_and_its_engine_side_freed(tmp_path: Path) -> None:
    engine, flags = ("--token-s", "0.0002"), ("--stall-timeout-s", "0.4")
    with running_front(tmp_path, engine=engine, flags=flags) as front:
        sampling = pb.SamplingParams(logprobs=True, top_logprobs=20)
        # A small fixed window, so that little has to be made before it is full.
        narrow = front.new_channel(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
        stub = generation_pb2_grpc.GenerationServiceStub(narrow)
        stalled = stub.Generate(
            pb.GenerateRequest(request_id="stalled", text="hello", sampling=sampling, stopping=LONG), timeout=60
        )
        next(stalled)
        other = front.stream(stopping=pb.StoppingParams(max_tokens=20))
        assert list(other)[-1].HasField("summary")
        eventually(lambda: "stalled" not in {s.request_id for s in front.sequences()}, timeout_s=20)
        eventually(lambda: any("their clients do not read" in line for line in front.log))
        assert not front.generation.Abort(pb.AbortRequest(request_id="stalled"), timeout=10).found
        with pytest.raises(grpc.RpcError) as caught:
            list(stalled)
        assert code_of(caught) is grpc.StatusCode.ABORTED
        assert details_of(caught.value)["ErrorInfo"].reason == "READER_STALLED"
        narrow.close()
