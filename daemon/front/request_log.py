"""A line for each request that is over, or a part of them: who, how it ended, counts and times; never a word of it."""

import logging
from typing import Any

from daemon import logs
from daemon.errors import ErrorReason
from daemon.front.ended import Ended

log = logging.getLogger("downcore.requests")

SERVER_FAULTS = {ErrorReason.INTERNAL, ErrorReason.ENGINE_UNAVAILABLE, ErrorReason.TOKENIZER_TIMEOUT}


class RequestLog:
    """Logs every request that failed, and this part of the others, evenly."""

    def __init__(self, fraction: float) -> None:
        assert 0.0 <= fraction <= 1.0
        self._fraction = fraction
        self._due = 0.0

    def __call__(self, ended: Ended) -> None:
        if ended.error is None:
            self._due += self._fraction
            if self._due < 1.0:
                return
            self._due -= 1.0
        level = logging.WARNING if ended.error in SERVER_FAULTS else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request over", extra={logs.FIELDS: fields_of(ended)})


def fields_of(ended: Ended) -> dict[str, Any]:
    """What the line says; what a request did not come to is left out."""
    usage, trace = ended.usage, ended.trace
    fields: dict[str, Any] = {
        "request_id": ended.request_id,
        "principal": ended.principal,
        "ends": "+".join(ended.ends),
        "error": ended.error.value if ended.error is not None else None,
        "prompt_tokens": usage.prompt_tokens if usage is not None else None,
        "cached_device": usage.cached_device if usage is not None else None,
        "cached_host": usage.cached_host if usage is not None else None,
        "cached_disk": usage.cached_disk if usage is not None else None,
        "completion_tokens": ended.completion_tokens,
        "queue_s": _rounded(ended.queue_s),
        "prefill_s": _rounded(usage.prefill_s if usage is not None else None),
        "first_token_s": _rounded(ended.first_token_s - ended.arrived_s if ended.first_token_s is not None else None),
        "duration_s": _rounded(ended.duration_s),
        "trace_id": trace.trace_id if trace is not None else None,
        "span_id": trace.span_id if trace is not None else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    """To a tenth of a millisecond."""
    return round(seconds, 4) if seconds is not None else None
