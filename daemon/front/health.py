"""grpc.health.v1: SERVING while the engine's step clock turns and new work is taken, else NOT_SERVING.

Of the name "live" it says whether the daemon is alive at all: while it loads, drains or replaces its engine it is, and
whoever restarts it for not SERVING would cut it off.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2 as pb

from daemon.errors import ErrorReason, RequestError

LIVE = "live"
MAX_WATCHERS = 256

_Status = pb.HealthCheckResponse


class Health:
    """The methods of grpc.health.v1.Health for these services and for the server as a whole, the empty name."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = {"", LIVE, *services}
        self._serving = False
        self._alive = True
        self._changed = asyncio.Event()  # replaced at each change
        self._num_watchers = 0

    @property
    def is_serving(self) -> bool:
        return self._serving

    def set(self, *, serving: bool, alive: bool) -> bool:
        """Tells watchers where this is news. Returns: whether `serving` is."""
        if (serving, alive) == (self._serving, self._alive):
            return False
        is_news = serving != self._serving
        self._serving, self._alive = serving, alive
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return is_news

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        if request.service not in self._names:
            raise RequestError(ErrorReason.NOT_FOUND, "no such service", field="service")
        return self._response(request.service)

    async def List(self, request: Message, context: Any) -> Message:
        # The package's type stubs are older than this method, so its message goes by name.
        descriptor: Any = pb.DESCRIPTOR.message_types_by_name["HealthListResponse"]
        list_response = message_factory.GetMessageClass(descriptor)
        return list_response(statuses={name: self._response(name) for name in self._names})

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_WATCHERS} clients watch already")
        self._num_watchers += 1
        try:
            told: pb.HealthCheckResponse | None = None
            while True:
                changed, response = self._changed, self._response(request.service)
                if response != told:
                    await context.write(response)
                    told = response
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _response(self, service: str) -> pb.HealthCheckResponse:
        if service not in self._names:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        is_well = self._alive if service == LIVE else self._serving
        return _Status(status=_Status.SERVING if is_well else _Status.NOT_SERVING)
