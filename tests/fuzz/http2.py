"""What a peer may send that is no gRPC client: frames written by hand, sound ones and all kinds of others."""

import random
import struct
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
ABORT = "/downcore.v1.GenerationService/Abort"
BASE = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", ABORT.encode()), (b":authority", b"x"),
    (b"te", b"trailers"), (b"content-type", b"application/grpc"),
)  # fmt: skip
MESSAGE = b"\x0a\x01z"  # an AbortRequest
ODD_HEADERS = (
    (b"content-type", b"text/html"), (b"content-type", b"application/grpc+json"), (b"content-type", b""),
    (b":method", b"GET"), (b":method", b"PUT"), (b":scheme", b"gopher"), (b":path", b"/../../etc/passwd"),
    (b":path", b""), (b":path", b"*"), (b":path", b"/" + b"a" * 6_000), (b":path", b"/\xff\xfe/\x80"),
    (b":path", b"no slash"),
    (b":authority", b""), (b":authority", b"a" * 3_000), (b":status", b"200"), (b":nothing", b"x"), (b"te", b"gzip"),
    (b"grpc-timeout", b"1"), (b"grpc-timeout", b"-1S"), (b"grpc-timeout", b"99999999H"), (b"grpc-timeout", b"0n"),
    (b"grpc-encoding", b"zstd"), (b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"x" * 500),
    (b"grpc-accept-encoding", b"zstd,br,x"), (b"authorization", b"Bearer \xff\xfe\x00"),
    (b"authorization", b"Basic eA=="),
    (b"traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"), (b"traceparent", b"\xff" * 55),
    (b"x-thing-bin", b"!!not base64!!"), (b"grpc-status-details-bin", b"AAAA"), (b"grpc-previous-rpc-attempts", b"x"),
    (b"Upper-Case", b"x"), (b"with space", b"x"), (b"new\nline", b"a\r\nb"), (b"", b"nothing"),
    (b"connection", b"close"),
    (b"transfer-encoding", b"chunked"), (b"content-length", b"-1"), (b"host", b"../.."), (b"grpc-status", b"0"),
)  # fmt: skip
ZSTD_BOMB = b"\x28\xb5\x2f\xfd\xa4\x00\x00\x00\x20" + b"\x02\x00\x00" + b"\x4b" * 4_000  # says 512 MiB of content


@dataclass(frozen=True, slots=True)
class Script:
    """What one connection sends. `expects` is in what comes back; a slow one is left open as it is."""

    name: str
    data: bytes
    expects: bytes = b""
    is_slow: bool = False


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", size: int | None = None) -> bytes:
    """A frame, whose length may lie."""
    length = len(payload) if size is None else size
    return struct.pack(">I", length)[1:] + bytes((kind, flags)) + struct.pack(">I", stream & 0xFFFFFFFF) + payload


def fields(pairs: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Header fields in HPACK, each a literal that no table keeps."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in pairs)


def message(data: bytes, flag: int = 0, size: int | None = None) -> bytes:
    """A gRPC message, whose length may lie."""
    return struct.pack(">BI", flag, len(data) if size is None else size) + data


def opening(extra: tuple[tuple[bytes, bytes], ...] = (), stream: int = 1, flags: int = END_HEADERS) -> bytes:
    """HEADERS of a call; of two fields of a name both are sent."""
    return frame(HEADERS, flags, stream, fields((*BASE, *extra)))


def sound() -> Script:
    """A whole call, which shows that what is written here is HTTP/2."""
    data = PREFACE + frame(SETTINGS, 0, 0) + opening() + frame(DATA, END_STREAM, 1, message(MESSAGE))
    return Script("sound", data, expects=b"grpc-status\x010")


def script(rng: random.Random) -> Script:
    """One of them."""
    begin = PREFACE + frame(SETTINGS, 0, 0)
    call = opening() + frame(DATA, END_STREAM, 1, message(MESSAGE))
    match rng.randrange(22):
        case 0:
            return Script("garbage", rng.randbytes(rng.choice((1, 24, 300, 5_000))))
        case 1:
            return Script("HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 3_000 + b"\r\n")
        case 2:
            return Script("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508))
        case 3:
            return Script("slow preface", PREFACE[: rng.randrange(1, len(PREFACE))], is_slow=True)
        case 4:
            frames = (
                frame(rng.randrange(14), rng.randrange(256), rng.randrange(6), rng.randbytes(rng.randrange(60)))
                for _ in range(30)
            )
            return Script("frames", begin + b"".join(frames))
        case 5:
            kind = rng.randrange(10)
            return Script("long frame", begin + frame(kind, 0, 1, b"x" * 100, size=(1 << 24) - 1))
        case 6:
            pairs = b"".join(
                struct.pack(">HI", rng.randrange(9), rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1))) for _ in range(5)
            )
            return Script("settings", PREFACE + frame(SETTINGS, 0, 0, pairs) + call)
        case 7:
            return Script("settings flood", begin + frame(SETTINGS, 0, 0) * 2_000)
        case 8:
            return Script("ping flood", begin + frame(PING, 0, 0, b"12345678") * 2_000)
        case 9:  # one field put into the table, and named from there again and again
            block = fields(BASE) + b"\x40" + _text(b"x") + _text(b"y" * 3_900) + b"\xbe" * 10_000
            return Script("header bomb", begin + frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
        case 10:
            block = fields(BASE[:2])
            more = frame(CONTINUATION, 0, 1, fields(((b"x" * 50, b"y" * 50),))) * 800
            return Script("continuations", begin + frame(HEADERS, 0, 1, block) + more)
        case 11:
            pairs = (opening(stream=2 * i + 1) + frame(RESET, 0, 2 * i + 1, b"\0\0\0\x08") for i in range(150))
            return Script("rapid reset", begin + b"".join(pairs))
        case 12:
            lost = frame(DATA, END_STREAM, rng.choice((0, 3, 2)), b"x" * 100)
            window = frame(WINDOW, 0, rng.choice((0, 1)), struct.pack(">I", rng.choice((0, 1, 2**31 - 1, 2**32 - 1))))
            return Script("astray", begin + rng.choice((lost, window, frame(GOAWAY, 0, 0, b"\xff" * 8))) + call)
        case 13:
            flood = tuple((b"x-%d" % i, b"y" * 60) for i in range(rng.choice((20, 150, 1_000))))
            return Script("metadata flood", begin + opening(flood) + frame(DATA, END_STREAM, 1, message(MESSAGE)))
        case 14 | 15 | 16:
            odd = tuple(rng.choice(ODD_HEADERS) for _ in range(rng.choice((1, 1, 2))))
            kept = tuple(pair for pair in BASE if pair[0] not in {name for name, _ in odd} or rng.random() < 0.2)
            ordered = sorted((*kept, *odd), key=lambda pair: not pair[0].startswith(b":"))
            block = frame(HEADERS, END_HEADERS, 1, fields(tuple(ordered)))
            return Script("odd headers", begin + block + frame(DATA, END_STREAM, 1, message(MESSAGE)))
        case 17:
            body = rng.choice((
                message(MESSAGE, flag=rng.choice((1, 2, 255))), message(MESSAGE, size=2**32 - 1),
                message(MESSAGE, size=2), message(b"", size=100), b"", b"\0", message(MESSAGE) * 3,
                message(b"\xff" * 50),
            ))  # fmt: skip
            return Script("message", begin + opening() + frame(DATA, END_STREAM, 1, body))
        case 18:
            coded = opening(((b"grpc-encoding", rng.choice((b"zstd", b"gzip", b"deflate"))),))
            return Script("coded", begin + coded + frame(DATA, END_STREAM, 1, message(ZSTD_BOMB, flag=1)))
        case 19:
            return Script("slow call", begin + opening(), is_slow=True)
        case _:
            data = bytearray(begin + call)
            for _ in range(rng.choice((1, 2, 5))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return Script("flipped", bytes(data))


def _text(value: bytes) -> bytes:
    """A string literal of HPACK, not Huffman-coded."""
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    found = bytearray((127,))
    size -= 127
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found) + value
