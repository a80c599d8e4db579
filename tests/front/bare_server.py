"""A grpc.aio server with one endless stream and nothing of ours: `bare_server.py bare|mended SOCKET`.

For each line on stdin it prints how many batches the core was given and how many of their events were taken; it ends
when stdin does. A batch whose event is never taken keeps its native memory for ever.
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

from daemon.front import grpc_mend

execute_batch = getattr(cygrpc, "execute_batch")  # noqa: B009 - not an attribute that type checkers know
num_given = num_taken = 0


async def counted(call: Any, operations: Any, loop: Any) -> None:
    """`execute_batch`, which takes its event on the way to its normal end and on no other."""
    global num_given, num_taken
    num_given += 1
    await execute_batch(call, operations, loop)
    num_taken += 1


async def stream(request: bytes, context: Any) -> None:
    while True:
        await context.write(b"x" * 40)


async def serve(path: str) -> None:
    server = grpc.aio.server()
    methods = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    server.add_registered_method_handlers("t.T", methods)  # as generated code does, too
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    ended = asyncio.Event()

    def on_line() -> None:
        if sys.stdin.readline():
            print(num_given, num_taken, flush=True)
        else:
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin, on_line)
    print("listening", flush=True)
    await ended.wait()
    await server.stop(None)


if __name__ == "__main__":
    setattr(cygrpc, "execute_batch", counted)  # noqa: B010
    if sys.argv[1] == "mended":
        assert grpc_mend.apply()
    asyncio.run(serve(sys.argv[2]))
