"""Sends traces to an OpenTelemetry collector. Imported only where a setting names its endpoint.

A thread of the SDK's own sends them, in batches; what it cannot send is dropped, and serving goes on.
"""

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from daemon.front.ended import End, Ended
from daemon.front.trace_context import TraceContext
from daemon.front.tracing import ROOT, attributes_of, stages_of

EXPORT_TIMEOUT_S = 5.0
NS = 1_000_000_000


class Exporter:
    """Makes a request's spans when it is over.

    Args:
        fraction: of the requests that came without a trace context, those that are traced; the others are as their
            callers are.
        exporter: what sends spans; by default OTLP over HTTP.
    """

    def __init__(self, endpoint: str, fraction: float, exporter: SpanExporter | None = None) -> None:
        resource = Resource.create({"service.name": "downcore"})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(fraction)), resource=resource, shutdown_on_exit=True
        )
        sender = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(sender))
        self._tracer = self._provider.get_tracer("downcore")

    def __call__(self, ended: Ended) -> None:
        offset_ns = time.time_ns() - int(time.monotonic() * NS)
        root = self._tracer.start_span(
            ROOT,
            context=set_span_in_context(_parent(ended.trace)) if ended.trace is not None else None,
            kind=SpanKind.SERVER,
            attributes=attributes_of(ended),
            start_time=offset_ns + int(ended.arrived_s * NS),
        )
        if root.is_recording():
            inside = set_span_in_context(root)
            for stage in stages_of(ended):
                begin_ns, end_ns = offset_ns + int(stage.begin_s * NS), offset_ns + int(stage.end_s * NS)
                span = self._tracer.start_span(
                    stage.name, context=inside, attributes=stage.attributes, start_time=begin_ns
                )
                span.end(end_ns)
            if End.FAILED in ended.ends:
                root.set_status(Status(StatusCode.ERROR))
        root.end(offset_ns + int(ended.ended_s * NS))

    def flush(self, timeout_s: float) -> bool:
        """Sends what is waiting. Returns: whether all of it was sent in time."""
        return self._provider.force_flush(int(timeout_s * 1000))


def _parent(trace: TraceContext) -> NonRecordingSpan:
    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(
        SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)
    )
