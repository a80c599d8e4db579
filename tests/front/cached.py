"""A front with the scripted engine's cache, and what tests ask of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import cache_pb2 as pb
from downcore.v1 import generation_pb2 as gen

from tests.engines.scripted_cache import GRID
from tests.front.harness import Front, details_of, running_front

NUM_PREFIXES = 25


def cached_front(folder: Path) -> AbstractContextManager[Front]:
    """Three tiers and some prefixes; each test works with prompts of its own."""
    engine = (
        "--tiers", "device,host,disk", "--prefixes", str(NUM_PREFIXES), "--records", "40", "--damaged", "2",
        "--context", str(1 << 22),
    )  # fmt: skip
    return running_front(folder, engine)


def prompt(first: int, num_tokens: int = GRID) -> pb.Prompt:
    """Token ids that no other `first` begins with."""
    return pb.Prompt(token_ids=gen.TokenIds(ids=[first] + [5] * (num_tokens - 1)))


def warm(front: Front, *prompts: pb.Prompt, **fields: Any) -> list[pb.WarmPrefixResponse]:
    return list(front.cache.WarmPrefix(pb.WarmPrefixRequest(prompts=prompts, **fields), timeout=20))


def receipt_of(responses: list[pb.WarmPrefixResponse]) -> pb.WarmReceipt:
    assert responses[-1].HasField("receipt")
    return responses[-1].receipt


def selector(key: str) -> pb.PrefixSelector:
    return pb.PrefixSelector(key=key)


def fails(call: Callable[[], object], code: grpc.StatusCode, reason: str, field: str = "") -> Any:
    """The failed call's error, which has this code, reason and field."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    details = details_of(caught.value)
    assert (caught.value.code(), details["ErrorInfo"].reason) == (code, reason)  # type: ignore[attr-defined]
    fields = [v.field for v in details["BadRequest"].field_violations] if "BadRequest" in details else []
    assert fields == ([field] if field else [])
    return caught.value
