"""/metrics and /healthz over real sockets: valid to every reader, true to what happened, bounded to strangers."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from downcore.v1 import generation_pb2 as pb

from daemon import messages
from daemon.cache_messages import TierName
from daemon.front.families import FAMILIES
from daemon.front.http_listener import MAX_CONNECTIONS, MAX_HEAD_BYTES
from daemon.front.requests import RequestTable
from daemon.front.text import TokenTable
from tests.engines.scripted_meters import COMPUTED_TOKENS, HIT_TOKENS
from tests.front.harness import Front, eventually, running_front
from tests.front.scraping import (
    OPENMETRICS,
    complaints,
    families,
    get,
    get_over_unix,
    metrics_port,
    parsed_strictly,
    values,
)
from tiers.meters import Histogram

FLAGS = ("--metrics-tcp", "127.0.0.1:0", "--metrics-namespaces", "2")
MOST_US_A_TOKEN = 2.0


class Deaf(Histogram):
    """Counts nothing."""

    __slots__ = ()

    def observe(self, value: float) -> None:
        pass


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    """A front with three tiers, that requests of every kind of end have gone through."""
    folder = tmp_path_factory.mktemp("metrics")
    flags = (*FLAGS, "--metrics-listen", str(folder / "m" / "m.sock"))
    (folder / "m").mkdir(mode=0o700)
    with running_front(folder, engine=("--tiers", "device,host,disk", "--max-running", "4"), flags=flags) as front:
        front.generate(stopping=pb.StoppingParams(max_tokens=7), n=2)
        front.generate("ab", stopping=pb.StoppingParams(stop=["b"]))
        call = front.stream(request_id="of-a-client", stopping=pb.StoppingParams(max_tokens=100_000))
        assert [next(call).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
        front.generation.Abort(pb.AbortRequest(request_id="of-a-client"), timeout=10)
        list(call)
        call = front.stream(stopping=pb.StoppingParams(max_tokens=100_000))
        assert [next(call).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
        call.cancel()
        with pytest.raises(grpc.RpcError):
            front.generate(n=99)
        with pytest.raises(grpc.RpcError):
            front.generate(timeout=0.05, stopping=pb.StoppingParams(max_tokens=100_000))
        eventually(lambda: not front.sequences())
        yield front


@pytest.fixture(scope="module")
def page(front: Front) -> bytes:
    response = get(metrics_port(front.log), "/metrics")
    assert (response.status, response.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return response.body


def test_the_page_is_what_promtool_calls_clean(page: bytes) -> None:
    assert complaints(page) == []


def test_the_page_has_every_family_of_the_catalogue_with_its_type_labels_and_no_other(page: bytes) -> None:
    found = families(page)
    assert list(found) == list(FAMILIES)
    for name, family in FAMILIES.items():
        metric = found[name]
        assert metric.type == family.type, name
        assert metric.samples, f"{name} has no sample, although everything has happened"
        assert {key for sample in metric.samples for key in sample.labels} - {"le"} == set(family.labels), name


def test_openmetrics_readers_get_openmetrics(front: Front, page: bytes) -> None:
    response = get(metrics_port(front.log), "/metrics", accept=f"{OPENMETRICS},text/plain;q=0.5")
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert list(parsed_strictly(response.body)) == [name.removesuffix("_total") for name in families(page)]


def test_a_label_has_few_values_whatever_clients_do(page: bytes) -> None:
    series = [tuple(sample.labels.items()) for metric in families(page).values() for sample in metric.samples]
    assert "of-a-client" not in str(series), "a request's id"
    assert len(series) < 1500


def test_requests_are_counted_once_each_by_their_end(page: bytes) -> None:
    ends = {end: values(page, "downcore_answers_total", end=end) for end in ("stop", "length", "aborted")}
    assert ends == {"stop": 1, "length": 2, "aborted": 1}
    failed, cancelled = (values(page, "downcore_answers_total", end=end) for end in ("failed", "cancelled"))
    # One was cancelled and one too late, which the server's clock and its client's say at once.
    assert (failed, cancelled) in {(1, 1), (0, 2)}
    assert values(page, "downcore_open_requests") == 0
    method = "/downcore.v1.GenerationService/Generate"
    assert values(page, "downcore_errors_total", method=method, reason="INVALID_ARGUMENT") == 1
    assert values(page, "downcore_errors_total", method=method, reason="DEADLINE_EXCEEDED") == failed
    assert values(page, "downcore_request_seconds_count") == 3, "those that neither failed nor were cancelled"


def test_tokens_and_gaps_add_up(page: bytes) -> None:
    first, gaps = values(page, "downcore_first_token_seconds_count"), values(page, "downcore_token_gap_seconds_count")
    assert 4 <= first <= 5, "of each request that had one; the late one may have had none"
    assert values(page, "downcore_request_answer_tokens_sum") <= values(page, "downcore_answer_tokens_total")
    assert values(page, "downcore_request_answer_tokens_sum") == gaps + first + 1, (
        "each answer's first token has no gap"
    )
    assert values(page, "downcore_prompt_tokens_total") == values(page, "downcore_request_prompt_tokens_sum")


def test_hits_and_misses_of_the_tiers_make_a_ladder(page: bytes) -> None:
    looked_up = COMPUTED_TOKENS + sum(HIT_TOKENS.values())
    for tier, hits in HIT_TOKENS.items():
        assert values(page, "downcore_tier_hit_tokens_total", tier=tier) == hits
        looked_up -= hits
        assert values(page, "downcore_tier_miss_tokens_total", tier=tier) == looked_up
    assert looked_up == COMPUTED_TOKENS


def test_vllms_names_tell_what_vllm_means_by_them(page: bytes) -> None:
    device, below = HIT_TOKENS[TierName.DEVICE], HIT_TOKENS[TierName.HOST] + HIT_TOKENS[TierName.DISK]
    assert values(page, "vllm:prefix_cache_hits_total") == device
    assert values(page, "vllm:prefix_cache_queries_total") == device + below + COMPUTED_TOKENS
    assert values(page, "vllm:external_prefix_cache_hits_total") == below
    assert values(page, "vllm:external_prefix_cache_queries_total") == below + COMPUTED_TOKENS
    assert values(page, "vllm:kv_cache_usage_perc") == (16 - 1 - 4 - 4) / (16 - 1), "cached blocks are no usage"
    given_up = sum(values(page, "downcore_answers_total", end=end) for end in ("aborted", "cancelled"))
    assert values(page, "vllm:request_success_total", finished_reason="abort") == given_up >= 2
    assert values(page, "vllm:num_requests_running") + values(page, "vllm:num_requests_waiting") == 0
    for ours, theirs in (
        ("downcore_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("downcore_token_gap_seconds", "vllm:inter_token_latency_seconds"),
        ("downcore_token_gap_seconds", "vllm:time_per_output_token_seconds"),
        ("downcore_request_seconds", "vllm:e2e_request_latency_seconds"),
    ):
        assert values(page, f"{ours}_sum") == values(page, f"{theirs}_sum", model_name="scripted", engine="0") > 0


def test_only_as_many_namespaces_are_named_as_the_setting_says(page: bytes) -> None:
    samples = families(page)["downcore_namespace_cached_bytes"].samples
    assert {sample.labels["namespace"]: sample.value for sample in samples} == {"big": 4096, "middle": 1024, "": 64}


def test_processes_are_the_ones_that_run(front: Front, page: bytes) -> None:
    for process in ("front", "engine", "tokenizers"):
        assert values(page, "downcore_process_resident_bytes", process=process) > 1 << 20
        assert values(page, "downcore_process_open_fds", process=process) > 2
    assert values(page, "downcore_process_cpu_seconds_total", process="engine") > 0
    assert abs(values(page, "downcore_start_time_seconds") - time.time()) < 300


def test_the_unix_socket_serves_the_same_to_its_owner_alone(front: Front, page: bytes) -> None:
    path = front.socket.parent.parent / "m" / "m.sock"
    answer = get_over_unix(str(path), "/metrics")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert list(families(answer.partition(b"\r\n\r\n")[2])) == list(families(page))
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_requests_are_refused_in_http(front: Front) -> None:
    port = metrics_port(front.log)
    assert get(port, "/healthz").status == 200
    assert get(port, "/").status == 404
    assert get(port, "/metrics", method="POST").status == 405
    head = get(port, "/metrics", method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["Content-Length"]) > 10_000
    for garbage in (b"\0" * 100 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics SPDY/3\r\n\r\n"):
        assert _exchange(port, garbage).startswith(b"HTTP/1.1 400 "), garbage


def test_a_head_without_end_is_refused_at_its_bound(front: Front) -> None:
    answer = _exchange(metrics_port(front.log), b"GET / HTTP/1.1\r\nX: " + b"x" * (4 * MAX_HEAD_BYTES))
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b"", "or reset, as what it sent was not read"


def test_idle_connections_do_not_keep_scrapers_out_for_long(front: Front) -> None:
    port = metrics_port(front.log)
    with ExitStack() as idle:
        for _ in range(MAX_CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        eventually(lambda: get(port, "/healthz").status == 503)
    eventually(lambda: get(port, "/healthz").status == 200)


def _exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionResetError:
            return b""


def test_without_an_engine_the_page_says_so_and_health_is_503(tmp_path: Path) -> None:
    with running_front(tmp_path, flags=(*FLAGS, "--pulse-timeout-s", "0.5")) as front:
        port = metrics_port(front.log)
        engine_pid = front.info().engine_pid
        os.kill(engine_pid, signal.SIGUSR1)  # the scripted engine's pulse stops
        eventually(lambda: get(port, "/healthz").status == 503)
        page = get(port, "/metrics").body
        assert values(page, "downcore_pulse_age_seconds") > 0.4
        assert values(page, "downcore_serving") == 0
        os.kill(engine_pid, signal.SIGKILL)
        eventually(lambda: get(port, "/healthz").status == 200)
        page = get(port, "/metrics").body
        assert complaints(page) == []
        assert values(page, "downcore_engine_starts_total") == 2
        assert values(page, "downcore_engine_up") == 1


def test_an_engine_that_does_not_answer_costs_a_bounded_wait(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--mute",), flags=(*FLAGS, "--query-timeout-s", "0.2")) as front:
        page = get(metrics_port(front.log), "/metrics").body
        assert values(page, "downcore_engine_up") == 0
        assert complaints(page) == []
        assert not families(page)["downcore_tier_capacity_bytes"].samples
        assert values(page, "downcore_process_resident_bytes", process="front") > 0


def test_metrics_beyond_this_machine_are_refused_even_with_tls_and_authentication(tmp_path: Path) -> None:
    front = Front(tmp_path, flags=("--metrics-tcp", "0.0.0.0:0"), wait=False)
    assert front.process.wait(20) == 1
    eventually(lambda: any("not a loopback address" in line for line in front.log))


def test_a_tokens_share_of_counting_is_small() -> None:
    """In processor time of this process, so that what else runs here does not matter."""
    num_tokens, tokens_a_round = 40_960, 64

    def cost_us(table: RequestTable, *, is_counted: bool) -> float:
        request = table.open("", "default", 0.0)
        request.expect(1, (), 0, TokenTable([bytes((i,)) for i in range(128)]))
        token = messages.Token(request.wire_id, 0, 97)
        if not is_counted:
            table.meters.token_gap_s = Deaf(table.meters.token_gap_s.bounds)
        began, now_s = time.process_time(), 0.0
        for _ in range(num_tokens // tokens_a_round):
            for _ in range(tokens_a_round):
                now_s += 0.02
                request.add(token, False, now_s)
            request.take("m", 1)
        took_s = time.process_time() - began
        num_gaps = table.meters.token_gap_s.num_values
        assert num_gaps == (num_tokens - 1 if is_counted else 0)
        table.close(request)
        return took_s / num_tokens * 1e6

    async def body() -> None:
        counted = min(cost_us(RequestTable(4), is_counted=True) for _ in range(3))
        uncounted = min(cost_us(RequestTable(4), is_counted=False) for _ in range(3))
        assert counted - uncounted < MOST_US_A_TOKEN

    asyncio.run(body())
