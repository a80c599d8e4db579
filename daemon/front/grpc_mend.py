"""Mends a leak in the asyncio server of one exact grpcio version, and how it accepts calls (grpc_accept.py).

There, `execute_batch` hands a batch of operations to the C core, awaits a future, and then takes the batch's event,
which is what gives the native operation array back. Where the awaiting task is cancelled, or the batch fails, the
future raises and the event is never taken: about fifty bytes are lost for every cancelled stream, for ever.

The mend separates the two. The original coroutine is driven by hand, by the core's own completion, so the event is
always taken; whoever awaits the batch awaits another future, which may be cancelled freely. Every message of a stream
is such a batch, so as little as can be of this runs in the interpreter.

It rests on internals, so it is applied to PINNED_VERSION alone. Any other version runs as it is, and the log says so.
"""

import asyncio
import functools
import logging
import operator
import os
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any

from grpc._cython import cygrpc  # pyright: ignore[reportMissingTypeStubs]

from daemon.front.grpc_accept import AcceptingServer

PINNED_VERSION = "1.85.1"

_log = logging.getLogger(__name__)


class _Batch:
    """One batch in flight: what the original has for its loop, and for the future that it awaits.

    The original calls `create_future` once and awaits what it gets once, which only suspends it. The core's queue asks
    whether that is `cancelled`, and reports through `set_result` or `set_exception`, which resume the original so that
    it takes the event, and only then wake the caller.
    """

    __slots__ = ("caller", "original")

    cancelled = bool  # called without arguments: never, since the event is still to be taken
    # How the queue, which serves the real loop, reports to a batch whose `loop` is another object: in its own loop's
    # thread. A process that is mended has no other loop.
    call_soon_threadsafe = operator.call
    __await__ = functools.partial(iter, (None,))

    def __init__(self, caller: "asyncio.Future[None]") -> None:
        self.caller = caller
        self.original: Coroutine[Any, Any, None] | None = None

    def create_future(self) -> "_Batch":
        return self

    def set_result(self, result: None) -> None:
        self._take_event()
        if not self.caller.done():
            self.caller.set_result(None)

    def set_exception(self, exception: type | BaseException) -> None:
        self._take_event()
        if not self.caller.done():
            self.caller.set_exception(exception)

    def _take_event(self) -> None:
        original, self.original = self.original, None
        assert original is not None, "the core completed a batch twice"
        try:
            original.send(None)
        except StopIteration:
            return
        raise RuntimeError("execute_batch awaits something else than its batch")


def mended(execute_batch: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., "asyncio.Future[None]"]:
    """A replacement of `execute_batch` that takes every batch's event, awaited or not."""

    def execute(call: Any, operations: Any, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[None]":
        batch = _Batch(loop.create_future())
        batch.original = original = execute_batch(call, operations, batch)
        original.send(None)  # starts the batch; raises where the core refuses it
        return batch.caller

    return execute


def quiet_core() -> None:
    """Keeps the core from writing to stderr, unless GRPC_VERBOSITY says otherwise: a peer's own words would be in it,
    line breaks included. It reads its settings when it is imported, so it is told to read them again."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    reset = getattr(cygrpc, "reset_grpc_config_vars", None)
    if reset is not None:
        reset()


def apply() -> bool:
    """Replaces `execute_batch` and the server of the pinned version. Called once, before a server or channel is made.

    Returns: whether this process is mended.
    """
    found = version("grpcio")
    original = getattr(cygrpc, "execute_batch", None)
    if found != PINNED_VERSION or original is None:
        message = "grpcio %s is not %s: cancelled streams may leak memory, and a path that is no UTF-8 end the service"
        _log.warning(message, found, PINNED_VERSION)
        return False
    if getattr(original, "__module__", "") != __name__:
        setattr(cygrpc, "execute_batch", mended(original))  # noqa: B010 - not an attribute that type checkers know
        setattr(cygrpc, "AioServer", AcceptingServer)  # noqa: B010
    return True
