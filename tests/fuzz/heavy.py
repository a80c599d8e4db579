"""Requests as large, as deep and as dear as they come: each is one that a limit is there for."""

import json
from collections.abc import Iterator

import grpc
from downcore.v1 import cache_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.front.access import ADMIN, CACHE, GENERATION, VLLM_ENGINE
from tests.front.hostile import DEPTH, hostile_structures
from tests.fuzz.traffic import Case
from tests.fuzz.wire import nested

GENERATE = f"/{GENERATION}/Generate"
LARGEST = 15 << 20  # of the 16 MiB that a message may have
SHORT = pb.StoppingParams(max_tokens=2)
DEEP_TEXTS = {
    "arrays": "[" * DEPTH + "]" * DEPTH,
    "objects": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "quotes": '"' + "\\" * DEPTH + '"',
    "marks": "e\u0301" * 30_000,
    "one word": "x" * 500_000,
}


def heavy_cases() -> Iterator[Case]:
    """All of them; made one at a time, since many have megabytes."""
    yield from _bytes()
    yield from _prompts()
    for name, hostile in hostile_structures().items():
        request = pb.GenerateRequest(text="{", structured_output=hostile.structure, stopping=SHORT)
        yield Case("structure", GENERATE, request.SerializeToString(), name=name)


def _bytes() -> Iterator[Case]:
    unknown = b"\x98\x7d\x01"  # number 2003, a varint
    many = {
        "unknown fields": unknown * (LARGEST // 3),
        "unknown fields, and no message": unknown * (LARGEST // 3) + b"\xff",
        "empty stop strings": _long(6, b"\x1a\x00" * (LARGEST // 2)),
        "empty messages of a chat": _long(4, b"\x0a\x00" * (LARGEST // 2)),
        "token ids": _long(3, _long(1, b"\x01" * LARGEST)),
        "biases": _long(5, b"\x4a\x02\x08\x05" * (LARGEST // 4)),
        "nested": nested(5_000),
        "over the limit": b"\x12" + b"\x00" * (17 << 20),
    }
    for name, data in many.items():
        yield Case("large", GENERATE, data, name=name)
        if "unknown" in name or name == "nested":
            yield Case("large", f"/{VLLM_ENGINE}/Generate", data, name=name)
    yield Case("large", f"/{VLLM_ENGINE}/Generate", _long(4, b"\xd2\x01\x02\x08\x05" * (LARGEST // 5)), name="biases")
    yield Case("large", f"/{VLLM_ENGINE}/Abort", b"\x0a\x00" * (LARGEST // 2), name="ids")
    yield Case("large", f"/{CACHE}/WarmPrefix", b"\x12\x00" * (LARGEST // 2), name="prompts")
    yield Case("large", f"/{ADMIN}/WatchEvents", _long(4, b"\x01" * LARGEST), name="kinds")
    for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        for size in (LARGEST, 64 << 20):
            bomb = b"\x12\xff\xff\xff\x7f" + b"a" * size
            yield Case("bomb", GENERATE, bomb, name=f"{algorithm.name} {size}", compression=algorithm)


def _prompts() -> Iterator[Case]:
    for name, text in DEEP_TEXTS.items():
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
        for request in (pb.GenerateRequest(text=text, stopping=SHORT), pb.GenerateRequest(chat=chat, stopping=SHORT)):
            yield Case("deep prompt", GENERATE, request.SerializeToString(), name=name)
        tokenize = pb.TokenizeRequest(text=text)
        yield Case("deep prompt", f"/{GENERATION}/Tokenize", tokenize.SerializeToString(), name=name)
        warm = cache_pb2.WarmPrefixRequest(prompts=[cache_pb2.Prompt(text=text)])
        yield Case("deep prompt", f"/{CACHE}/WarmPrefix", warm.SerializeToString(), name=name)
    for trick in ("hang", "grow", "escape"):  # the test folder's template does so on demand
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=trick)])
        yield Case("template", GENERATE, pb.GenerateRequest(chat=chat).SerializeToString(), name=trick)
    schema = json.dumps({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    structure = pb.StructuredOutput(json_schema=schema)
    request = pb.GenerateRequest(text="{", structured_output=structure, stopping=SHORT)
    yield Case("structure", GENERATE, request.SerializeToString(), name="two that refer to each other")


def _long(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    size, head = len(data), bytearray((number << 3 | 2,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + data
