"""Accepts calls in the asyncio server of one exact grpcio version, so that no path that a client sends ends the server.

There, one loop takes all calls, and decodes each one's path before anything else looks at it: a path that is no UTF-8
raises in the loop, and with it the server ends, for everybody, before anybody is asked for a credential.

Here no path is ever decoded. Methods that are served are registered with the core, which tells their calls apart by
itself; each is accepted by a loop of its own, which knows its name. All other calls are accepted by one more loop, as
calls of UNSERVED, whatever their path is. That is also quicker: the original waits for a set of futures at each call.

It rests on internals; grpc_mend.py puts it in place for the pinned version alone.
"""

import asyncio
from typing import Any

from grpc._cython import cygrpc  # pyright: ignore[reportMissingTypeStubs]

UNSERVED = "/"
_core: Any = cygrpc


class AcceptingServer(_core.AioServer):
    """The core's server, which asks `_make_request_call_future` once for each method and once for all others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        *_, max_calls = args
        self._calls_loop = loop
        self._max_calls: int | None = max_calls
        self._calls: set[asyncio.Task[None]] = set()
        self._handlers: list[Any] = []
        super().__init__(loop, *args)  # pyright: ignore[reportUnknownMemberType]

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers.extend(handlers)
        super().add_generic_rpc_handlers(handlers)  # pyright: ignore[reportUnknownMemberType]

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Task[None]":
        """What the core's own loop awaits, and takes for a call: it ends with the server, by the core's exception."""
        return self._calls_loop.create_task(self._accept(method))

    async def _accept(self, method: bytes | None) -> None:
        name = method.decode() if method is not None else UNSERVED
        loop, handlers = self._calls_loop, _core._MethodResolver(self._handlers, {})
        while True:
            call = await (self._request_call() if method is None else self._request_registered_call(method))
            is_over_limit = self._max_calls is not None and len(self._calls) >= self._max_calls
            answering = _core._handle_rpc(name, handlers, (), call, loop, is_over_limit)
            task = loop.create_task(_core._schedule_rpc_coro(answering, call, loop, name))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            call = answering = task = None  # the next one may be long in coming
