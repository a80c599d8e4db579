"""W3C trace context: which trace a call belongs to, as its metadata says (https://www.w3.org/TR/trace-context/)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEADER = "traceparent"
MAX_CHARS = 512  # later versions may add fields, which are not read
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The caller's place in a trace."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16, of the span that called
    is_sampled: bool


def trace_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext | None:
    """What a call's metadata says. Wrong, doubled or absent: None, as the standard has it, and the call goes on."""
    found = [value for key, value in metadata or () if key == HEADER]
    if len(found) != 1 or not isinstance(found[0], str) or len(found[0]) > MAX_CHARS:
        return None
    match = _FORM.fullmatch(found[0].strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    is_valid = version != "ff" and (version != "00" or more is None) and trace_id.strip("0") and span_id.strip("0")
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED)) if is_valid else None
