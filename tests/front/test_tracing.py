"""Traces: whose a call is, what its stages were, and that a collector gets them."""

import gzip
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import generation_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from daemon import messages
from daemon.cache_messages import TierName
from daemon.errors import ErrorReason
from daemon.front import tracing
from daemon.front.ended import End, Ended
from daemon.front.otel import Exporter
from daemon.front.sockets import ListenError
from daemon.front.trace_context import TraceContext, trace_of
from daemon.meter_messages import Loaded
from tests.front.harness import eventually, running_front

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PLANTED = "xylophonic-zeppelin"
USAGE = messages.Usage(
    100, 20, 0, 30, 0.5, 0.25, 0.8, lookup_s=0.01, loads=(Loaded(TierName.DISK, 0.1, 0.4, 30),)
)  # fmt: skip


def ended(**changes: Any) -> Ended:
    values: dict[str, Any] = {
        "request_id": "r", "principal": "p", "trace": TraceContext(TRACE_ID, SPAN_ID, is_sampled=True),
        "ends": (End.STOP,), "error": None, "usage": USAGE, "completion_tokens": 7, "arrived_s": 10.0,
        "submitted_s": 10.2, "first_token_s": 11.0, "last_token_s": 12.0, "ended_s": 12.5,
    }  # fmt: skip
    return Ended(**{**values, **changes})


@pytest.mark.parametrize(
    ("header", "is_read"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-01", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", True),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-a-later-version-adds", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-01-more", False),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01", False),
        (f"00-{'0' * 32}-{SPAN_ID}-01", False),
        (f"00-{TRACE_ID}-{'0' * 16}-01", False),
        (f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-1", False),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-" + "x" * 1000, False),
        ("", False),
    ],
)
def test_a_trace_context_is_read_as_the_standard_has_it(header: str, is_read: bool) -> None:
    found = trace_of((("other", "x"), ("traceparent", header)))
    assert found == (TraceContext(TRACE_ID, SPAN_ID, is_sampled=header[53:55] == "01") if is_read else None)


def test_two_contexts_are_none() -> None:
    header = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")
    assert trace_of((header,)) is not None
    assert trace_of((header, header)) is None
    assert trace_of(None) is None


def test_stages_lie_one_after_the_other_within_the_request() -> None:
    stages = {stage.name: stage for stage in tracing.stages_of(ended())}
    assert list(stages) == ["tokenize", "load disk", "look-up", "queue", "prefill", "decode"]
    in_turn = [stages[name] for name in ("tokenize", "queue", "prefill", "decode")]
    assert all(before.end_s <= after.begin_s for before, after in pairwise(in_turn))
    queue = stages["queue"]
    for name in ("load disk", "look-up"):
        assert queue.begin_s <= stages[name].begin_s < stages[name].end_s <= queue.end_s
    assert stages["prefill"].attributes == {"downcore.tokens": 50}
    assert (stages["decode"].end_s, in_turn[0].begin_s) == (12.0, 10.0)


def test_a_request_that_came_not_far_has_only_the_stages_that_it_came_to() -> None:
    early = {"usage": None, "first_token_s": None, "last_token_s": None}
    assert [s.name for s in tracing.stages_of(ended(submitted_s=None, **early))] == ["tokenize"]
    assert [s.name for s in tracing.stages_of(ended(**early))] == ["tokenize", "queue"]


def test_spans_continue_the_callers_trace_and_follow_its_decision() -> None:
    kept = InMemorySpanExporter()
    exporter = Exporter("http://127.0.0.1:9/", 0.0, kept)
    exporter(ended(trace=TraceContext(TRACE_ID, SPAN_ID, is_sampled=False)))
    exporter(ended(trace=None))  # the setting says that none of these is traced
    exporter(ended(ends=(End.FAILED,), error=ErrorReason.INTERNAL))
    assert exporter.flush(5.0)
    spans = {span.name: span for span in kept.get_finished_spans()}
    root = spans.pop(tracing.ROOT)
    assert len(spans) == 6
    assert root.context is not None
    assert {f"{span.context.trace_id:032x}" for span in (*spans.values(), root) if span.context} == {TRACE_ID}
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN_ID
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in spans.values())
    assert root.attributes is not None
    assert root.attributes["error.type"] == "INTERNAL"
    assert root.attributes["downcore.cached_tokens.disk"] == 30
    assert not root.status.is_ok
    assert root.end_time is not None
    assert root.start_time is not None
    assert root.end_time - root.start_time == pytest.approx(2.5e9, rel=1e-6)


class _Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, as a collector does."""

    received: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collector() -> Generator[tuple[str, list[bytes]]]:
    """Its URL, and the requests that it has got."""
    received: list[bytes] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_Collector,), {"received": received}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        server.server_close()


def test_a_collector_gets_the_spans_of_a_served_request_and_no_word_of_it(tmp_path: Path) -> None:
    with collector() as (endpoint, received):
        with running_front(tmp_path, flags=("--trace-endpoint", endpoint)) as front:
            request = pb.GenerateRequest(text=PLANTED, request_id="mine", stopping=pb.StoppingParams(max_tokens=9))
            metadata = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
            assert len(list(front.generation.Generate(request, timeout=20, metadata=metadata))) > 3
            with pytest.raises(grpc.RpcError):
                front.generate(n=99)
        eventually(lambda: bool(received))
    sent = [ExportTraceServiceRequest.FromString(body) for body in received]
    spans = [s for one in sent for r in one.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert {span.name for span in spans} == {"downcore.generate", "tokenize", "look-up", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    (root,) = (span for span in spans if span.name == tracing.ROOT)
    assert root.parent_span_id.hex() == SPAN_ID
    assert PLANTED.encode() not in b"".join(received)


def test_a_collector_that_is_not_there_costs_no_request(tmp_path: Path) -> None:
    with running_front(tmp_path, flags=("--trace-endpoint", "http://127.0.0.1:9/v1/traces")) as front:
        assert front.generate(stopping=pb.StoppingParams(max_tokens=3))[-1].HasField("summary")


def test_without_the_extra_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="opentelemetry")

    monkeypatch.setattr(tracing.importlib, "import_module", missing)
    with pytest.raises(ListenError, match=r"downcore\[otel\]"):
        tracing.load("http://127.0.0.1:9/", 1.0)
