"""A bare grpc.aio server on uvloop with nothing of ours: what the front's cost a message is held against.

`python front_echo.py SOCKET`. `/echo/Stream` sends one message again and again: a request is ECHO (how many, and the
milliseconds between two, 0: none) and the message. `/echo/Unary` sends the request back.
"""

import asyncio
import struct
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

ECHO = struct.Struct("<If")


async def _stream(request: bytes, context: Any) -> None:
    count, interval_ms = ECHO.unpack_from(request)
    message = request[ECHO.size :]
    loop = asyncio.get_running_loop()
    for _ in range(count):
        if interval_ms:
            # To the next whole interval, so that all streams wake together, as those of an engine's step do.
            now_ms = loop.time() * 1000
            await asyncio.sleep((interval_ms - now_ms % interval_ms) / 1000)
        await context.write(message)


async def _unary(request: bytes, context: Any) -> bytes:
    return request


async def _serve(path: str) -> None:
    server = grpc.aio.server()
    stream: Any = grpc.unary_stream_rpc_method_handler
    unary: Any = grpc.unary_unary_rpc_method_handler
    methods: dict[str, Any] = {"Stream": stream(_stream), "Unary": unary(_unary)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", methods),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("listening", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
