"""/metrics and /healthz over HTTP, for scrapers and probes that speak nothing else.

It is as small as that needs: one GET or HEAD a connection, no body in, everything bounded. It runs on the event loop,
beside the streams. What must hold: whoever connects gets an answer or a closed connection within a bounded time, and
costs a bounded amount of memory.
"""

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from http import HTTPStatus

from daemon.front.metrics_page import format_for
from daemon.front.scrape import Scrape
from daemon.front.sockets import Claim, claim_socket, tcp_target

log = logging.getLogger("downcore.front")

MAX_HEAD_BYTES = 8 << 10
MAX_CONNECTIONS = 16
READ_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Content:
    """The body of an answer."""

    content_type: str
    body: bytes


class HttpListener:
    """The listeners of one front, from the moment their addresses are claimed.

    Raises:
        ListenError: an address is taken, or is not loopback.
    """

    def __init__(self, path: str | None, tcp: str | None) -> None:
        self._tcp = tcp_target(tcp, is_guarded=False) if tcp is not None else None
        self._claim: Claim | None = claim_socket(path) if path is not None else None
        self._servers: list[asyncio.Server] = []
        self._num_connections = 0
        self._scrape: Scrape | None = None

    async def start(self, scrape: Scrape) -> list[str]:
        """Listens. Returns: where."""
        self._scrape = scrape
        listening: list[str] = []
        if self._claim is not None:
            server = await asyncio.start_unix_server(self._serve, self._claim.path, limit=MAX_HEAD_BYTES)
            os.chmod(self._claim.path, 0o600)
            self._servers.append(server)
            listening.append(self._claim.target)
        if self._tcp is not None:
            host, _, port = self._tcp.rpartition(":")
            server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES)
            self._servers.append(server)
            (bound,) = (sock.getsockname()[1] for sock in server.sockets)
            listening.append(f"http://{host}:{bound}")
        return listening

    def stop(self) -> None:
        """Closes the ports; connections that are open end by themselves, within their time limits."""
        for server in self._servers:
            server.close()

    def release(self) -> None:
        """Removes the socket and lets another daemon have its path."""
        if self._claim is not None:
            self._claim.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
            else:
                writer.write(_response(HTTPStatus.SERVICE_UNAVAILABLE, Content(TEXT, b"too many connections\n")))
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, Content(TEXT, b"")))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()
        except Exception:
            log.exception("a scrape failed")
            writer.transport.abort()
        finally:
            self._num_connections -= 1
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        request_line, *lines = head.decode("latin-1").split("\r\n")
        words = request_line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST, Content(TEXT, b"not a request\n"))
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, Content(TEXT, b""), "Allow: GET, HEAD")
        assert self._scrape is not None
        status, page = HTTPStatus.OK, Content(TEXT, b"ok\n")
        match target.partition("?")[0]:
            case "/metrics":
                written_as = format_for(_header(lines, "accept"))
                page = Content(written_as.content_type, await (await self._scrape.page()).write(written_as))
            case "/healthz" if not self._scrape.is_serving:
                status, page = HTTPStatus.SERVICE_UNAVAILABLE, Content(TEXT, b"not serving\n")
            case "/healthz":
                pass
            case _:
                status, page = HTTPStatus.NOT_FOUND, Content(TEXT, b"/metrics and /healthz are here\n")
        response = _response(status, page)
        return response[: -len(page.body)] if method == "HEAD" else response


def _response(status: HTTPStatus, page: Content, *headers: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode("latin-1") + page.body


def _header(lines: list[str], name: str) -> str:
    """All values of a header, as one; empty where there is none."""
    found = (line.partition(":") for line in lines)
    return ", ".join(value.strip() for key, _, value in found if key.strip().lower() == name)
