"""The catalogue of what can go wrong with a request: one name for each kind, and the exception that carries it.

The engine and the front raise or send these names; one place in the front (daemon/front/status.py) turns them into
gRPC statuses with google.rpc details. A message never holds a path, an address or a traceback.
"""

from enum import StrEnum


class ErrorReason(StrEnum):
    """Reason of a google.rpc.ErrorInfo, domain "downcore"."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"  # prompt plus max_tokens exceed the model or the pool: never possible
    TOO_LARGE = "TOO_LARGE"  # more bytes or items than the server takes in one request
    QUEUE_FULL = "QUEUE_FULL"  # too many requests, or too many bytes of them: try again later
    NO_CAPACITY = "NO_CAPACITY"  # ended because no block was left for it
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"  # nobody known here calls
    PERMISSION_DENIED = "PERMISSION_DENIED"  # the caller lacks the scope, or asks for another's namespace
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"  # the caller's own limit: try again when less of it is open
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"  # this key names a job of other content
    PREFIX_PINNED = "PREFIX_PINNED"  # unpin it first
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"  # the namespace has no room left for this
    TIER_UNAVAILABLE = "TIER_UNAVAILABLE"  # the daemon has no such tier, or it takes nothing now
    ABORTED = "ABORTED"  # an operator ended it
    DRAINING = "DRAINING"
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE"  # loading, dead or being restarted
    READER_STALLED = "READER_STALLED"  # the client took no message for too long
    TOKENIZER_TIMEOUT = "TOKENIZER_TIMEOUT"  # the prompt, or the model's template, took too long; try a smaller one
    UNIMPLEMENTED = "UNIMPLEMENTED"  # no such method, or one of a foreign service that has no counterpart here
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """One request failed, and why. `field` is the request's field at fault, in dotted form, where one is."""

    def __init__(
        self, reason: ErrorReason, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
