"""Every field of a request about the cache: what is wrong with it is told by its name, and harms nothing."""

from collections.abc import Generator
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import cache_pb2 as pb
from downcore.v1 import generation_pb2 as gen

from daemon.front import validate
from tests.front.cached import cached_front, prompt, selector
from tests.front.harness import Front, details_of

NAN, INF = float("nan"), float("inf")
ONE = prompt(34)
KEY = "a" * 64
IDS = gen.TokenIds
BAD_PROMPTS: list[tuple[str, pb.Prompt]] = [
    ("", pb.Prompt()),
    (".text", pb.Prompt(text="")),
    (".token_ids.ids", pb.Prompt(token_ids=IDS())),
    (".token_ids.ids", pb.Prompt(token_ids=IDS(ids=[512]))),
    (".chat.messages", pb.Prompt(chat=gen.Chat())),
    (".chat.messages", pb.Prompt(chat=gen.Chat(messages=[gen.ChatMessage(content="x")]))),
]
SELECTORS: list[tuple[str, Any]] = [
    ("prefix", None),
    ("prefix", pb.PrefixSelector()),
    *(("prefix.key", selector(key)) for key in ("", "a" * 63, "a" * 65, "A" * 64, "g" * 64)),
    *((f"prefix.prompt{name}", pb.PrefixSelector(prompt=bad)) for name, bad in BAD_PROMPTS),
]
BAD: list[tuple[str, str, Any]] = [
    *(("WarmPrefix", "key", pb.WarmPrefixRequest(prompts=[ONE], key=key)) for key in ("a b", "a~w1.0", "x" * 129, "é")),
    ("WarmPrefix", "prompts", pb.WarmPrefixRequest()),
    ("WarmPrefix", "prompts", pb.WarmPrefixRequest(prompts=[ONE] * 65)),
    ("WarmPrefix", "tier", pb.WarmPrefixRequest(prompts=[ONE], tier=9)),  # type: ignore[arg-type]
    *(("WarmPrefix", "ttl_s", pb.WarmPrefixRequest(prompts=[ONE], ttl_s=v)) for v in (0.0, -1.0, NAN, INF, 1e10)),
    ("WarmPrefix", "durable", pb.WarmPrefixRequest(prompts=[ONE], durable=True)),
    ("WarmPrefix", "durable", pb.WarmPrefixRequest(prompts=[ONE], durable=True, tier=pb.CACHE_TIER_HOST)),
    ("WarmPrefix", "detached", pb.WarmPrefixRequest(prompts=[ONE], detached=True)),
    *(("WarmPrefix", f"prompts[1]{name}", pb.WarmPrefixRequest(prompts=[ONE, bad])) for name, bad in BAD_PROMPTS),
    ("LookupPrefix", "prompt", pb.LookupPrefixRequest()),
    *(("LookupPrefix", f"prompt{name}", pb.LookupPrefixRequest(prompt=bad)) for name, bad in BAD_PROMPTS),
    *(("PinPrefix", field, pb.PinPrefixRequest(prefix=bad)) for field, bad in SELECTORS),
    *(("PinPrefix", "ttl_s", pb.PinPrefixRequest(prefix=selector(KEY), ttl_s=v)) for v in (0.0, -1.0, NAN, INF)),
    *(("UnpinPrefix", field, pb.UnpinPrefixRequest(prefix=bad)) for field, bad in SELECTORS),
    *(("EvictPrefix", field, pb.EvictPrefixRequest(prefix=bad)) for field, bad in SELECTORS),
    ("ListPrefixes", "page_size", pb.ListPrefixesRequest(page_size=1001)),
    ("ListPrefixes", "page_token", pb.ListPrefixesRequest(page_token="x" * 1025)),
    ("ListPrefixes", "page_token", pb.ListPrefixesRequest(page_token="né")),
    *(("ListPrefixes", "key_prefix", pb.ListPrefixesRequest(key_prefix=v)) for v in ("A", "x", "a" * 65)),
    ("ListPrefixes", "order", pb.ListPrefixesRequest(order=4)),  # type: ignore[arg-type]
    ("FlushTier", "tier", admin_pb2.FlushTierRequest()),
    ("FlushTier", "tier", admin_pb2.FlushTierRequest(tier=4)),  # type: ignore[arg-type]
    ("VerifyTier", "tier", admin_pb2.VerifyTierRequest()),
    ("VerifyTier", "tier", admin_pb2.VerifyTierRequest(tier=-1)),  # type: ignore[arg-type]
    *(
        ("SetQuota", "namespace", admin_pb2.SetQuotaRequest(namespace=v, cached_bytes=1))
        for v in ("", "a/", "a//b", "x" * 129)
    ),
    ("SetQuota", "cached_bytes", admin_pb2.SetQuotaRequest(namespace="a")),
    ("SetQuota", "cached_bytes", admin_pb2.SetQuotaRequest(namespace="a", cached_bytes=2**51)),
    ("SetQuota", "pinned_bytes", admin_pb2.SetQuotaRequest(namespace="a", pinned_bytes=2**64 - 1)),
    ("SetQuota", "pinned_bytes", admin_pb2.SetQuotaRequest(namespace="a", cached_bytes=4, pinned_bytes=5)),
    *(("RemoveQuota", "namespace", admin_pb2.RemoveQuotaRequest(namespace=v)) for v in ("", "~")),
    ("WarmPrefix", "namespace", pb.WarmPrefixRequest(prompts=[ONE], namespace="default/")),
    ("LookupPrefix", "namespace", pb.LookupPrefixRequest(prompt=ONE, namespace="a b")),
    ("PinPrefix", "namespace", pb.PinPrefixRequest(prefix=selector(KEY), namespace="/")),
    ("UnpinPrefix", "namespace", pb.UnpinPrefixRequest(prefix=selector(KEY), namespace="/a")),
    ("EvictPrefix", "namespace", pb.EvictPrefixRequest(prefix=selector(KEY), namespace="x" * 129)),
    ("ListPrefixes", "namespace", pb.ListPrefixesRequest(namespace="~")),
]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with cached_front(tmp_path_factory.mktemp("cache")) as front:
        yield front


@pytest.mark.parametrize(("method", "field", "request_message"), BAD)
def test_each_bad_field_is_named_and_the_next_call_works(
    front: Front, method: str, field: str, request_message: Any
) -> None:
    stub = front.admin if hasattr(front.admin, method) else front.cache
    call = getattr(stub, method)
    streams = method in ("WarmPrefix", "VerifyTier")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(request_message, timeout=10)) if streams else call(request_message, timeout=10)
    code = caught.value.code()  # type: ignore[attr-defined]
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == field
    assert front.cache.ListPrefixes(pb.ListPrefixesRequest(page_size=1), timeout=10).prefixes


def test_every_rule_has_a_bad_value_here() -> None:
    tables = {
        "WarmPrefix": validate.WARM_PREFIX,
        "LookupPrefix": validate.LOOKUP_PREFIX,
        "PinPrefix": validate.PIN_PREFIX,
        "UnpinPrefix": validate.SELECTED_PREFIX,
        "EvictPrefix": validate.SELECTED_PREFIX,
        "ListPrefixes": validate.LIST_PREFIXES,
        "FlushTier": validate.FLUSH_TIER,
        "VerifyTier": validate.VERIFY_TIER,
        "SetQuota": validate.SET_QUOTA,
        "RemoveQuota": validate.REMOVE_QUOTA,
    }
    assert {method.name for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods} <= set(tables)
    rules = {(method, rule.field) for method, table in tables.items() for rule in table}
    assert rules <= {(method, field) for method, field, _ in BAD}


def test_values_at_their_bounds_pass() -> None:
    for message, rules in (
        (pb.WarmPrefixRequest(prompts=[ONE] * 64, key="A.b_c-9" * 18, ttl_s=3.1536e8), validate.WARM_PREFIX),
        (pb.WarmPrefixRequest(prompts=[ONE], key="k", detached=True, durable=True, tier=pb.CACHE_TIER_DISK, ttl_s=1e-9),
         validate.WARM_PREFIX),
        (pb.PinPrefixRequest(prefix=selector(KEY)), validate.PIN_PREFIX),
        (pb.ListPrefixesRequest(page_size=1000, key_prefix=KEY, order=pb.PREFIX_ORDER_HITS), validate.LIST_PREFIXES),
        (admin_pb2.SetQuotaRequest(namespace="a", cached_bytes=0, pinned_bytes=0), validate.SET_QUOTA),
        (admin_pb2.SetQuotaRequest(namespace="x" * 128, pinned_bytes=1 << 50), validate.SET_QUOTA),
    ):  # fmt: skip
        validate.check(message, rules, validate.NO_LIMITS)
