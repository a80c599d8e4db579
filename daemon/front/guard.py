"""What stands before every method of a listener: who calls, whether it may, whether it is within its limits.

gRPC knows one handler for each listener, this one, so there is no way around it. Who may call what is the table of
access.py. What must hold: of a call that is refused nothing is parsed, and where its headers are enough to refuse it
nothing is read; whatever goes wrong, a client sees an error of the catalogue and no other; a call that is over has
given its request's memory back.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from daemon.errors import ErrorReason, RequestError
from daemon.front import status
from daemon.front.access import Access, access_of
from daemon.front.caller import Call
from daemon.front.door import Door
from daemon.front.held import Holding
from daemon.front.limits import OpenCall, Use, Uses
from daemon.front.principals import Identity, Principal
from daemon.front.service import Served
from daemon.front.wire import Malformed

log = logging.getLogger("downcore.front")

NOBODY = Principal(name="nobody", scopes=())  # calls what is open to anybody
SHED = {ErrorReason.LIMIT_EXCEEDED, ErrorReason.QUEUE_FULL, ErrorReason.NO_CAPACITY}  # for want of room
MAX_READ_S = 60.0  # for a request, 16 MiB at most, to come whole
UNKNOWN = "unknown"  # how meters name every method that there is not: paths are the client's to make up
# Calls that count for no principal, by who may make them: so many at a time on one listener. Together they are fewer
# than SPARE_CALLS of listeners.py, so that whoever makes them leaves the places of requests and of operators.
MOST_UNCOUNTED = {Access.OPEN: 128, Access.CALLER: 288, Access.GATEWAY: 64}
COUNTED = {ErrorReason.UNAUTHENTICATED, ErrorReason.PERMISSION_DENIED, *SHED}


class Guard(grpc.GenericRpcHandler):
    """The handler of one listener.

    Args:
        uses: of all listeners together.
        refused: counts refusals by reason, of all listeners together.
        failed: counts all errors, by method and reason.
    """

    def __init__(
        self,
        methods: Mapping[str, Served],
        door: Door,
        uses: Uses,
        refused: Counter[ErrorReason],
        failed: Counter[tuple[str, ErrorReason]],
    ) -> None:
        self._door = door
        self._uses = uses
        self._refused = refused
        self._failed = failed
        self._num_open: Counter[Access | None] = Counter()
        self._access = {path: access_of(path) for path in methods}
        self._handlers = {path: self._handler(path, served) for path, served in methods.items()}
        self._no_handler = self._refusal(UNKNOWN, RequestError(ErrorReason.UNIMPLEMENTED, "there is no such method"))

    def service(self, handler_call_details: Any) -> Any:
        """gRPC asks for the handler of each call, before it reads the request."""
        path = handler_call_details.method
        handler = self._handlers.get(path)
        if handler is None:
            return self._no_handler
        if self._access[path] is Access.OPEN:
            return handler
        try:
            self._door.check_early(handler_call_details.invocation_metadata)
        except RequestError as error:
            return self._refusal(path, error)
        return handler

    def _handler(self, path: str, served: Served) -> Any:
        # All as if requests came in streams: a call of one request that comes without it would never get an answer.
        is_stream = served.has_response_stream
        make: Any = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        return make(self._guarded(path, served), response_serializer=_serialize)

    def _refusal(self, path: str, error: RequestError) -> Any:
        """A handler that answers with the error, and reads nothing."""

        async def refuse(requests: Any, context: Any) -> None:
            self._refused[error.reason] += 1
            self._failed[path, error.reason] += 1
            await status.abort(context, error)

        make: Any = grpc.stream_stream_rpc_method_handler
        return make(refuse)

    def _guarded(self, path: str, served: Served) -> Callable[[Any, Any], Awaitable[Message | None]]:
        access = self._access[path]

        async def call(requests: Any, context: Any) -> Message | None:
            opened: OpenCall | None = None
            use: Use | None = None
            request: Any = None
            held = Holding(self._uses.held)
            self._num_open[access] += 1
            try:
                identity = self._admit(context, access)
                principal = identity.principal if isinstance(identity, Identity) else identity
                if isinstance(identity, Identity):
                    task = asyncio.current_task()
                    assert task is not None
                    opened = OpenCall(identity, task)
                    self._uses.calls.add(opened)
                if access is not None and access.is_counted:
                    use = self._uses.begin(principal)
                self._check_places(access)
                request = requests if served.has_request_stream else served.parse(await _read(context, held))
                if isinstance(request, Malformed):
                    raise request.error()
                return await served.method(request, Call(context, principal, use or Use(), held, opened))
            except RequestError as error:
                failure = error
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                if opened is None or opened.ended is None:
                    raise
                failure = opened.ended
            except Exception:
                log.exception("a method failed")
                failure = RequestError(ErrorReason.INTERNAL, "the server has failed; its log says how")
            finally:
                self._num_open[access] -= 1
                held.release()
                if use is not None:
                    use.num_requests -= 1
                if opened is not None:
                    self._uses.calls.discard(opened)
            if failure.reason in COUNTED:
                self._refused[failure.reason] += 1
            self._failed[path, failure.reason] += 1
            _forget_frames(failure)
            request = None  # this frame lives on in what gRPC makes abort raise
            return await status.abort(context, failure)

        return call

    def _admit(self, context: Any, access: Access | None) -> Identity | Principal:
        """Who calls. Raises RequestError where nobody known does, or one who may not."""
        if access is Access.OPEN:
            return NOBODY
        identity = self._door.identify(context)
        if access is None:
            raise RequestError(ErrorReason.PERMISSION_DENIED, "nobody may call this method")
        principal = identity.principal if isinstance(identity, Identity) else identity
        if access.scope is not None and access.scope not in principal.scopes:
            raise RequestError(ErrorReason.PERMISSION_DENIED, f"this needs the scope {access.scope}")
        return identity

    def _check_places(self, access: Access | None) -> None:
        most = MOST_UNCOUNTED.get(access) if access is not None else None
        if most is not None and self._num_open[access] > most:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{most} calls of this kind are open, which is the limit")


async def _read(context: Any, held: Holding) -> bytes:
    """The request of a call that has one. Raises RequestError where it does not come, or all hold too much."""
    try:
        async with asyncio.timeout(MAX_READ_S):
            data = await context.read()
    except TimeoutError:
        raise RequestError(ErrorReason.DEADLINE_EXCEEDED, "the request did not come in time") from None
    if data is grpc.aio.EOF:
        raise RequestError(ErrorReason.INVALID_ARGUMENT, "the call has no request")
    held.add(len(data))
    return data


def _forget_frames(error: RequestError) -> None:
    """An error and the frames it went through hold each other, and the frames the request: 16 MiB or what became of it.

    Only the collector would find that, some thousands of calls later.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
