"""The engine's end of the socket pair: frames in and out without ever blocking a step."""

import select
import socket
from typing import Protocol

from daemon.messages import HEADER, MAX_MESSAGE_BYTES, ToEngine, ToFront, encode, to_engine_decoder

MAX_UNSENT_BYTES = 256 << 20


class SupportsFileno(Protocol):
    """What select waits for."""

    def fileno(self) -> int: ...


class FrontGone(Exception):
    """The front has closed its end, does not read any more, or sent something that is no message."""


class Link:
    """Sends at once what the socket takes and keeps the rest, within a bound; receives whole messages only."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: ToFront) -> None:
        """Raises FrontGone where the front left, or lets more than MAX_UNSENT_BYTES pile up."""
        self._unsent += encode(message)
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise FrontGone("the front does not read")

    def flush(self) -> None:
        """Sends what it can now."""
        while self._unsent:
            try:
                sent = self._sock.send(memoryview(self._unsent)[: 1 << 20])
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontGone(str(error)) from error
            del self._unsent[:sent]

    def receive(self, timeout_s: float, *wakers: SupportsFileno) -> list[ToEngine]:
        """The messages that have arrived; raises FrontGone at the end.

        Waits up to `timeout_s` for the first of them, or until one of the wakers is readable.
        """
        writable = [self._sock] if self._unsent else []
        readable, ready, _ = select.select([self._sock, *wakers], writable, [], timeout_s)
        if ready:
            self.flush()
        if self._sock in readable:
            self._read()
        return self._split()

    def _read(self) -> None:
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontGone(str(error)) from error
            if not data:
                raise FrontGone("end of file")
            self._received += data
            if len(self._received) > MAX_MESSAGE_BYTES:
                return  # whole messages first; the rest waits in the socket

    def _split(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        at = 0
        while len(self._received) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received, at)
            if size > MAX_MESSAGE_BYTES:
                raise FrontGone(f"message of {size} bytes, limit {MAX_MESSAGE_BYTES}")
            end = at + HEADER.size + size
            if len(self._received) < end:
                break
            messages.append(to_engine_decoder.decode(memoryview(self._received)[at + HEADER.size : end]))
            at = end
        del self._received[:at]
        return messages
