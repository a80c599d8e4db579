"""A service as the guard serves it: each method with the way to read its requests.

A method is written as `async def Name(request, context)`, where `context` is a Call (caller.py). It raises RequestError
and no other error that a client may see.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from daemon.errors import ErrorReason, RequestError
from daemon.front.wire import Malformed, parser

Context = Any  # a Call, which answers for what grpc.aio.ServicerContext has, and that has no useful type of its own
Method = Callable[[Any, Context], Awaitable[Message | None]]


@dataclass(frozen=True, slots=True)
class Served:
    """A method. `parse` makes a request of its bytes; a stream of requests comes to the method as bytes, unparsed."""

    method: Method
    parse: Callable[[bytes], Message | Malformed]
    has_request_stream: bool
    has_response_stream: bool


def methods_of(service_name: str, servicer: object) -> Mapping[str, Served]:
    """The methods of a service by path, from its descriptor: each is served by the servicer's method of its name."""
    service = descriptor_pool.Default().FindServiceByName(service_name)
    return {
        f"/{service_name}/{method.name}": Served(
            getattr(servicer, method.name),
            parser(message_factory.GetMessageClass(method.input_type)),
            method.client_streaming,
            method.server_streaming,
        )
        for method in service.methods
    }


async def write(context: Context, message: Message, timeout_s: float) -> None:
    """Sends one message of a stream whose messages replace each other; raises RequestError where it is not taken."""
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError:
        raise RequestError(ErrorReason.READER_STALLED, "the client reads too slowly") from None
