"""What counts as an answer: a valid one, or an error of the catalogue. Everything else is a defect.

A method of ours is answered by the daemon itself, with a reason. gRPC answers alone, before any method, to what is no
call: those sentences are listed here, so that a new one is looked at before it is added.
"""

import re
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from daemon.errors import ErrorReason
from daemon.front.status import CODES, DETAILS_KEY, DOMAIN

_TRANSPORT = (
    (grpc.StatusCode.RESOURCE_EXHAUSTED, r".*[Mm]essage larger than max.*"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, r".*metadata size exceeds.*"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, r"Concurrent RPC limit exceeded!"),
    # Of the client's own library: it sends no such metadata, and loses the status of a stream that is answered before
    # it has sent everything.
    (grpc.StatusCode.INTERNAL, r"Invalid metadata"),
    (grpc.StatusCode.INTERNAL, r"Internal error from Core"),
)
_LEAK = re.compile(r"Traceback|File \"|\.py\b|/(?:tmp|home|root|usr|work|proc)/")


def complaint(code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]]) -> str | None:
    """What is wrong with an error that a client got; None where nothing is."""
    if _LEAK.search(message):
        return f"{code.name} tells of the inside: {message!r}"
    reason = reason_of_trailers(trailers)
    if reason is None:
        known = any(code is kind and re.fullmatch(form, message) for kind, form in _TRANSPORT)
        return None if known else f"{code.name} without a reason: {message!r}"
    if reason is ErrorReason.INTERNAL:
        return f"the server has failed: {message!r}"
    return None if CODES[reason] is code else f"{reason} came as {code.name}"


def reason_of_trailers(trailers: Iterable[tuple[str, str | bytes]]) -> ErrorReason | None:
    """The reason that came with an error; None where none of ours did."""
    details = next((value for key, value in trailers if key == DETAILS_KEY), None)
    if not isinstance(details, bytes):
        return None
    try:
        told: Any = status_pb2.Status.FromString(details)
    except DecodeError:
        return None
    for detail in told.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            if info.domain == DOMAIN and info.reason in ErrorReason.__members__.values():
                return ErrorReason(info.reason)
    return None
