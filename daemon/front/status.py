"""The one place where an error becomes a gRPC status: code, message and google.rpc details.

Details are ErrorInfo (reason, domain "downcore"), BadRequest where a field is at fault, RetryInfo where trying again
makes sense. Then a trailer says the same to gRPC's own retries, which read no details: grpc-retry-pushback-ms.
"""

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from daemon.errors import ErrorReason, RequestError

DOMAIN = "downcore"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# Statuses travel in HTTP/2 trailers, of which clients take 8 KiB: there a message is written once with three characters
# for a byte that is not ASCII, and twice more within the details.
MAX_MESSAGE_BYTES = 512

CODES = {
    ErrorReason.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.CONTEXT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.NO_CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorReason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorReason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorReason.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.DUPLICATE_REQUEST_ID: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.PREFIX_PINNED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.TIER_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ABORTED: grpc.StatusCode.ABORTED,
    ErrorReason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.ENGINE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.READER_STALLED: grpc.StatusCode.ABORTED,
    ErrorReason.TOKENIZER_TIMEOUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorReason.INTERNAL: grpc.StatusCode.INTERNAL,
}
# Seconds after which a client may try again, where the error itself names none.
RETRY_S = {
    ErrorReason.QUEUE_FULL: 1.0,
    ErrorReason.NO_CAPACITY: 1.0,
    ErrorReason.LIMIT_EXCEEDED: 1.0,
    ErrorReason.DRAINING: 5.0,
    ErrorReason.ENGINE_UNAVAILABLE: 1.0,
}


def status_of(error: RequestError) -> status_pb2.Status:
    """The google.rpc.Status that a client reads."""
    message = error.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_s = retry_s_of(error)
    if retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    text = f"{error.field}: {message}" if error.field else message
    status = status_pb2.Status(code=CODES[error.reason].value[0], message=text)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def retry_s_of(error: RequestError) -> float | None:
    """Seconds after which trying again makes sense; None: it does not."""
    return error.retry_after_s if error.retry_after_s is not None else RETRY_S.get(error.reason)


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: RequestError) -> None:
    """Ends the call with the error's status. Never returns normally."""
    status = status_of(error)
    metadata: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status.SerializeToString()),)
    retry_s = retry_s_of(error)
    if retry_s is not None:
        metadata += ((PUSHBACK_KEY, str(int(retry_s * 1000))),)
    await context.abort(CODES[error.reason], status.message, trailing_metadata=metadata)
