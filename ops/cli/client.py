"""Calls to the daemon, and what their failures mean to a user of the command line."""

import os
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status

from ops.cli.app import server_target
from ops.cli.credentials import channel_credentials
from ops.cli.errors import CliError, ExitCode

ADMIN = "downcore.v1.AdminService"
CACHE = "downcore.v1.CacheService"
GENERATION = "downcore.v1.GenerationService"
MAX_MESSAGE_BYTES = 64 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy from the environment has no business between a user and a local socket
)
ERROR_DOMAIN = "downcore"
DETAILS_KEY = "grpc-status-details-bin"

_EXIT_CODES = {
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
    grpc.StatusCode.UNAUTHENTICATED: ExitCode.UNAUTHORISED,
    grpc.StatusCode.PERMISSION_DENIED: ExitCode.UNAUTHORISED,
    grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.TIMEOUT,
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
}


class Answer(Protocol):
    """A generated message class, as a decoder needs it."""

    @classmethod
    def FromString(cls, s: bytes, /) -> Self: ...


A = TypeVar("A", bound=Answer)


class Client:
    """One channel to one daemon. Methods are named by their path, requests are messages of the generated modules."""

    def __init__(self, channel: grpc.Channel, target: str) -> None:
        self._channel = channel
        self.target = target

    def unary(self, method: str, request: Message, answer: type[A], timeout_s: float) -> A:
        """One request, one answer."""
        call = self._channel.unary_unary(
            f"/{method}", request_serializer=_serialize, response_deserializer=answer.FromString
        )
        with self.errors():
            return call(request, timeout=timeout_s)

    def stream(self, method: str, request: Message, answer: type[A], timeout_s: float | None) -> Iterator[A]:
        """One request, many answers. Closing the iterator, or any exception at its reader, cancels the call."""
        call = self._channel.unary_stream(
            f"/{method}", request_serializer=_serialize, response_deserializer=answer.FromString
        )
        with self.errors():
            responses = call(request, timeout=timeout_s)
            try:
                yield from responses
            finally:
                responses.cancel()

    @contextmanager
    def errors(self) -> Generator[None]:
        """Turns a failed call into a CliError."""
        try:
            yield
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            raise explain(error, self.target) from None


@contextmanager
def connect(server: str | None) -> Generator[Client]:
    """A client of the daemon at `server`, closed at the end."""
    target = server_target(server)
    credentials = channel_credentials(target, os.environ)
    if credentials is None:
        channel = grpc.insecure_channel(target, options=OPTIONS)
    else:
        channel = grpc.secure_channel(target, credentials, options=OPTIONS)
    with channel:
        yield Client(channel, target)


@asynccontextmanager
async def connect_async(server: str | None) -> AsyncGenerator[grpc.aio.Channel]:
    """The same as a bare channel for an event loop, for who makes many calls at a time."""
    target = server_target(server)
    credentials = channel_credentials(target, os.environ)
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=OPTIONS)
    async with channel:
        yield channel


def explain(call: grpc.Call, target: str) -> CliError:
    """The failure as one line with the daemon's own reason, and the exit code that fits."""
    code, details = call.code(), call.details() or ""
    exit_code = _EXIT_CODES.get(code, ExitCode.FAILED)
    reason = _reason(call)
    if reason is not None:
        if code is grpc.StatusCode.UNAVAILABLE:  # somebody answered, so the daemon is there and does not serve
            exit_code = ExitCode.DEGRADED
        return CliError(exit_code, f"{details} [{reason}]")
    if code is grpc.StatusCode.UNAVAILABLE and "handshake" in details.lower():
        return CliError(exit_code, f"TLS with {target} failed: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        where = target.removeprefix("unix:")
        return CliError(exit_code, f"no daemon answers at {where}: `downcore serve` starts one, --server names one")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CliError(exit_code, f"no answer from {target.removeprefix('unix:')} in the time given by --timeout")
    return CliError(exit_code, f"{details or 'the call failed'} [{code.name}]")


def reason_of(call: grpc.Call | grpc.aio.AioRpcError) -> str | None:
    """The daemon's own reason for a failure, from its catalogue, where it sent one."""
    reason = _reason(call)
    return reason.partition(":")[0] if reason is not None else None


def _reason(call: grpc.Call | grpc.aio.AioRpcError) -> str | None:
    """Reason and fields of the google.rpc details, where the daemon sent any."""
    encoded = [value for key, value in call.trailing_metadata() or () if key == DETAILS_KEY]
    if not encoded:
        return None
    try:
        status = Status.FromString(encoded[0] if isinstance(encoded[0], bytes) else encoded[0].encode())
    except DecodeError:  # not ours
        return None
    reason, fields = None, list[str]()
    for detail in status.details:
        info, bad_request = ErrorInfo(), BadRequest()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason = info.reason
        elif detail.Unpack(bad_request):
            fields += [violation.field for violation in bad_request.field_violations]
    if reason is not None and fields:
        return f"{reason}: {', '.join(fields)}"
    return reason


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
