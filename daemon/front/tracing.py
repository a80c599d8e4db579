"""A request as a trace: its span and one for each stage, from the times that the front and the engine took anyway.

Spans are made when a request is over, so that a token's way knows nothing of them. Who sends them (otel.py) is imported
only where a setting names an endpoint: its packages come with the extra of that name.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from daemon.front.ended import Ended
from daemon.front.sockets import ListenError

EXPORTER_MODULE = "daemon.front.otel"
ROOT = "downcore.generate"
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's time [begin, end), of time.monotonic."""

    name: str
    begin_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])


def load(endpoint: str, fraction: float) -> Callable[[Ended], None]:
    """What is told of each request and sends its spans.

    Raises:
        ListenError: the extra is not installed.
    """
    try:
        exporter = importlib.import_module(EXPORTER_MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ListenError("the setting trace_endpoint needs OpenTelemetry: install downcore[otel]") from None
    return exporter.Exporter(endpoint, fraction)


def attributes_of(ended: Ended) -> dict[str, Value]:
    """Of the request's own span, named as OpenTelemetry's conventions for generative models have it where they do."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.output_tokens": ended.completion_tokens,
        "gen_ai.response.finish_reasons": "+".join(ended.ends),
        "downcore.request_id": ended.request_id,
        "downcore.principal": ended.principal,
    }
    if ended.error is not None:
        attributes["error.type"] = ended.error.value
    if ended.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = ended.usage.prompt_tokens
        attributes["downcore.cached_tokens.device"] = ended.usage.cached_device
        attributes["downcore.cached_tokens.host"] = ended.usage.cached_host
        attributes["downcore.cached_tokens.disk"] = ended.usage.cached_disk
    return attributes


def stages_of(ended: Ended) -> Iterator[Stage]:
    """Tokenize, queue, load by tier, look-up, prefill, decode: those that the request came to, in order of their end.

    Loads are parts of the queue, and so is the look-up that let the request in. The engine counts from when a request
    reaches it, which is taken to be when it was sent.
    """
    if ended.submitted_s is None:
        yield Stage("tokenize", ended.arrived_s, ended.ended_s)
        return
    yield Stage("tokenize", ended.arrived_s, ended.submitted_s)
    usage, at_engine_s = ended.usage, ended.submitted_s
    if usage is None:
        yield Stage("queue", at_engine_s, ended.ended_s)
        return
    for load_ in usage.loads:
        tokens: dict[str, Value] = {"downcore.tokens": load_.tokens}
        yield Stage(f"load {load_.tier}", at_engine_s + load_.begin_s, at_engine_s + load_.end_s, tokens)
    admitted_s = at_engine_s + usage.queue_s
    yield Stage("look-up", admitted_s - usage.lookup_s, admitted_s)
    yield Stage("queue", at_engine_s, admitted_s)
    computed: dict[str, Value] = {
        "downcore.tokens": usage.prompt_tokens - usage.cached_device - usage.cached_host - usage.cached_disk
    }
    yield Stage("prefill", admitted_s, admitted_s + usage.prefill_s, computed)
    if ended.first_token_s is not None and ended.last_token_s is not None:
        yield Stage("decode", ended.first_token_s, ended.last_token_s)
