"""Log lines: for people on a terminal, one JSON object each anywhere else.

What must hold: no prompt and no answer is ever in a line. Messages are written by us and their arguments are counts,
times and ids; but an exception that nobody foresaw may say anything, so in the process that has text (the front) such a
one is logged by its type and the places it went through, without its words.
"""

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

FIELDS = "fields"  # attribute of a record, set by `extra`: what a line says besides its message
FORMATS = ("auto", "text", "json")
_GRPC_LOGGER, _GRPC_HEADER = "grpc._cython.cygrpc", "Invalid encoding on"
log = logging.getLogger("downcore.front")


def configure(process: str, *, level: str, log_format: str, tells_errors: bool = True) -> None:
    """Sends all of this process's logging to stderr.

    Args:
        process: front or engine, as lines name it.
        log_format: text, json, or auto: text on a terminal.
        tells_errors: whether an exception's own words may be logged.
    """
    assert log_format in FORMATS
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    make = JsonFormatter if is_json else TextFormatter
    handler.setFormatter(make(process, tells_errors=tells_errors))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It would log headers that are no UTF-8, whole and for every call; a token may be among them.
    logging.getLogger(_GRPC_LOGGER).addFilter(lambda record: not str(record.msg).startswith(_GRPC_HEADER))


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "process": ..., "logger": ..., "message": ...}`, the line's fields, and an error."""

    def __init__(self, process: str, *, tells_errors: bool) -> None:
        super().__init__()
        self._process = process
        self._tells_errors = tells_errors

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line["error"] = "".join(_told(error, tells_errors=self._tells_errors))
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """The same for people: fields follow the message as name=value."""

    def __init__(self, process: str, *, tells_errors: bool) -> None:
        super().__init__()
        self._process = process
        self._tells_errors = tells_errors

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        head = f"{_utc(record.created)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return head
        return "\n".join((head, "".join(_told(error, tells_errors=self._tells_errors)).rstrip()))


def on_loop_error(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """The event loop's exception handler: its own would print what callbacks were called with."""
    log.error("the event loop caught an error", exc_info=context.get("exception"))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, FIELDS, {})


def _told(error: BaseException, *, tells_errors: bool) -> list[str]:
    """Lines about an exception and those it came from, outermost last."""
    if tells_errors:
        return traceback.format_exception(error)
    told: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        told = [*traceback.format_tb(link.__traceback__), f"{type(link).__name__}\n", *told]
        link = link.__cause__ or link.__context__
    return told


def _utc(unix_s: float) -> str:
    """RFC 3339 with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1000):03d}Z"
