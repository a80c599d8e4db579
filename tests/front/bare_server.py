"""A grpc.aio server with one endless stream and nothing of ours: `bare_server.py bare|mended SOCKET`.

For each line on stdin it prints how many bytes the C library has handed out; it ends when stdin does.
"""

import asyncio
import ctypes
import gc
import sys
from typing import Any

import grpc
import grpc.aio

from daemon.front import grpc_mend, memory
from tests.front.launch import mallinfo


async def stream(request: bytes, context: Any) -> None:
    while True:
        await context.write(b"x" * 40)
        await asyncio.sleep(0.001)


def report() -> None:
    gc.collect()
    found = mallinfo(ctypes.CDLL(None))
    print(found.uordblks + found.hblkhd, flush=True)


async def serve(path: str) -> None:
    server = grpc.aio.server()
    methods = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    ended = asyncio.Event()

    def on_line() -> None:
        if sys.stdin.readline():
            report()
        else:
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin, on_line)
    print("listening", flush=True)
    await ended.wait()
    await server.stop(None)


if __name__ == "__main__":
    memory.bound_allocator()
    if sys.argv[1] == "mended":
        assert grpc_mend.apply()
    asyncio.run(serve(sys.argv[2]))
