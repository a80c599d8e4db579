"""The front's end of the socket to the engine: frames in, frames out, and the news that the other end is gone."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from daemon import messages

MAX_UNSENT_BYTES = 256 << 20  # more than this waits for an engine that does not read: new work is refused


class EngineLink(asyncio.Protocol):
    """Calls `on_message` for each message that arrives, in order. `closed` completes at end-of-file or bad framing."""

    def __init__(self, on_message: Callable[[messages.ToFront], None]) -> None:
        self._on_message = on_message
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, sock: socket.socket, on_message: Callable[[messages.ToFront], None]) -> "EngineLink":
        """Takes over the socket."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_message), sock=sock)
        return link

    @property
    def is_full(self) -> bool:
        """The engine does not take what it has been sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES

    def send(self, message: messages.ToEngine) -> None:
        """Queues a message; dropped where the engine is gone, which `closed` tells."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= messages.HEADER.size:
            (body_len,) = messages.HEADER.unpack_from(received, begin)
            if body_len > messages.MAX_MESSAGE_BYTES:
                self._end(f"a message of {body_len} bytes")
                return
            body_begin = begin + messages.HEADER.size
            if len(received) - body_begin < body_len:
                break
            begin = body_begin + body_len
            with memoryview(received) as view, view[body_begin:begin] as body:
                try:
                    message = messages.to_front_decoder.decode(body)
                except ValueError as error:  # msgspec's errors derive from it
                    self._end(f"a message that does not decode: {error}")
                    return
            self._on_message(message)
        if begin:
            del received[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("end of file" if exc is None else type(exc).__name__)

    def _end(self, why: str) -> None:
        if not self.closed.done():
            self.closed.set_result(why)
        self.close()
