"""What all methods share: parsing without surprises, errors to statuses, and the table of handlers of a service.

A method is written as `async def Name(request, context)`; it raises RequestError, and no other error is a client's to
see.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from daemon.errors import ErrorReason, RequestError
from daemon.front import status
from daemon.front.wire import Malformed, parser

log = logging.getLogger("downcore.front")

Context = Any  # grpc.aio.ServicerContext, which has no useful type of its own
Method = Callable[[Any, Context], Awaitable[Message | None]]


def handler_of(service_name: str, servicer: object) -> grpc.GenericRpcHandler:
    """The handler of a service, from its descriptor: every method is served by the servicer's method of its name."""
    service = descriptor_pool.Default().FindServiceByName(service_name)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        assert not method.client_streaming
        make: Any = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make = grpc.unary_stream_rpc_method_handler
        handlers[method.name] = make(
            _guarded(getattr(servicer, method.name)),
            request_deserializer=parser(message_factory.GetMessageClass(method.input_type)),
            response_serializer=_serialize,
        )
    return grpc.method_handlers_generic_handler(service_name, handlers)


async def write(context: Context, message: Message, timeout_s: float) -> None:
    """Sends one message of a stream whose messages replace each other; raises RequestError where it is not taken."""
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError:
        raise RequestError(ErrorReason.READER_STALLED, "the client reads too slowly") from None


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _guarded(method: Method) -> Method:
    async def call(request: Message | Malformed, context: Context) -> Message | None:
        try:
            if isinstance(request, Malformed):
                raise request.error()
            return await method(request, context)
        except RequestError as error:
            failure = error
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("a method failed")
            failure = RequestError(ErrorReason.INTERNAL, "the server has failed; its log says how")
        return await status.abort(context, failure)

    return call
