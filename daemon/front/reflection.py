"""grpc.reflection.v1alpha: which services a listener has, for clients that ask before they call."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from daemon.errors import ErrorReason, RequestError


class Reflection:
    """The method of grpc.reflection.v1alpha.ServerReflection, of these services."""

    def __init__(self, services: Sequence[str]) -> None:
        asynchronous: Any = reflection.aio  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self._servicer: Any = asynchronous.ReflectionServicer(services)

    async def ServerReflectionInfo(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for response in self._servicer.ServerReflectionInfo(_parsed(requests), context):
            await context.write(response)


async def _parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    async for data in requests:
        try:
            yield reflection_pb2.ServerReflectionRequest.FromString(data)
        except DecodeError:
            raise RequestError(ErrorReason.INVALID_ARGUMENT, "the request is not a valid message") from None
