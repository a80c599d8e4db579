"""grpc.health.v1: SERVING while the engine's step clock turns and new work is taken, else NOT_SERVING."""

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2 as pb

from daemon.errors import ErrorReason, RequestError

SERVICE_NAME = "grpc.health.v1.Health"
MAX_WATCHERS = 256

_Status = pb.HealthCheckResponse


class Health:
    """The methods of grpc.health.v1.Health for these services and for the server as a whole, the empty name."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = {"", *services}
        self._serving = False
        self._changed = asyncio.Event()  # replaced at each change
        self._num_watchers = 0

    @property
    def is_serving(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> bool:
        """Tells watchers where this is news. Returns: whether it is."""
        if serving == self._serving:
            return False
        self._serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

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
            while True:
                changed = self._changed
                await context.write(self._response(request.service))
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _response(self, service: str) -> pb.HealthCheckResponse:
        if service not in self._names:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._serving else _Status.NOT_SERVING)
