"""A front that tells its callers apart, and who they are."""

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import cache_pb2, generation_pb2

from tests.engines.scripted_cache import GRID
from tests.front.harness import Front, ids_of
from tests.front.pki import Authority


def fresh_token(name: str) -> str:
    """A token as `downcore token new` makes them."""
    return f"dct_{name}.{base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b'=').decode()}"


def hash_of(token: str) -> str:
    salt = os.urandom(16)
    return f"sha256:{salt.hex()}:{hashlib.sha256(salt + token.partition('.')[2].encode()).hexdigest()}"


@dataclass
class Who:
    """A principal, with one token."""

    name: str
    scopes: Iterable[str]
    namespace: str = ""
    certificates: Iterable[str] = ()
    expires: datetime | None = None
    limits: dict[str, int] = field(default_factory=dict)
    token: str = ""

    def __post_init__(self) -> None:
        self.token = self.token or fresh_token(self.name)
        self._hash = hash_of(self.token)

    def table(self) -> str:
        expires = f", expires = {self.expires.isoformat()}" if self.expires is not None else ""
        values: dict[str, Any] = {
            "name": self.name,
            "scopes": list(self.scopes),
            "namespace": self.namespace,
            "certificates": list(self.certificates),
            **self.limits,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join(["[[principals]]", *lines, f'tokens = [{{ hash = "{self._hash}"{expires} }}]', ""])


def write_principals(path: Path, people: Iterable[Who]) -> Path:
    """In place of what is there, at once."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text("\n".join(who.table() for who in people))
    fresh.rename(path)
    return path


@dataclass
class Guarded:
    """A front behind mutual TLS, with a listener of its own for administration."""

    front: Front
    authority: Authority
    address: str
    admin_address: str
    principals: Path
    cert: Path
    key: Path


def tls_flags(folder: Path, authority: Authority, *, mutual: bool) -> list[str]:
    """Files in the folder, and the flags that name them."""
    cert, key, ca = folder / "server.crt", folder / "server.key", folder / "ca.crt"
    authority.issue("localhost", "127.0.0.1").write(cert, key)
    ca.write_bytes(authority.pem)
    flags = ["--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    return [*flags, "--tls-client-ca-file", str(ca)] if mutual else flags


def addresses_of(front: Front) -> list[str]:
    """Where it says that it listens, TCP ones by name so that certificates fit."""
    said = front.ready_line.partition(" on ")[2].split(", ")
    return [where.replace("127.0.0.1", "localhost") for where in said]


def generate(channel: grpc.Channel, text: str, timeout_s: float = 10.0, **fields: Any) -> Any:
    stub = channel.unary_stream(
        "/downcore.v1.GenerationService/Generate",
        request_serializer=generation_pb2.GenerateRequest.SerializeToString,
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )
    ids = generation_pb2.TokenIds(ids=ids_of(text))
    stopping = generation_pb2.StoppingParams(max_tokens=fields.pop("max_tokens", 1), ignore_eos=True)
    return stub(generation_pb2.GenerateRequest(token_ids=ids, stopping=stopping, **fields), timeout=timeout_s)


def text_of(responses: Any) -> str:
    return "".join(response.chunk.text for response in responses)


def listed(channel: grpc.Channel, namespace: str = "") -> list[cache_pb2.Prefix]:
    answer = unary(channel, "CacheService/ListPrefixes", cache_pb2.ListPrefixesRequest(namespace=namespace))
    return list(cache_pb2.ListPrefixesResponse.FromString(answer).prefixes)


def unary(channel: grpc.Channel, method: str, request: Any) -> bytes:
    return channel.unary_unary(f"/downcore.v1.{method}")(request.SerializeToString(), timeout=10)


def warm(channel: grpc.Channel, *, timeout_s: float = 10.0, **fields: Any) -> list[cache_pb2.WarmPrefixResponse]:
    stub = channel.unary_stream(
        "/downcore.v1.CacheService/WarmPrefix",
        request_serializer=cache_pb2.WarmPrefixRequest.SerializeToString,
        response_deserializer=cache_pb2.WarmPrefixResponse.FromString,
    )
    prompt = cache_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=[5] * GRID))
    return list(stub(cache_pb2.WarmPrefixRequest(prompts=[prompt], **fields), timeout=timeout_s))


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()  # type: ignore[attr-defined]
