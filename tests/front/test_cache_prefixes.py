"""Looking up, pinning, evicting and listing prefixes; tiers and quotas: over a real socket, with the scripted cache."""

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import cache_pb2 as pb
from downcore.v1 import generation_pb2 as gen

from tests.engines.scripted_cache import BLOCK, GRID, TOKEN_BYTES
from tests.front.cached import NUM_PREFIXES, cached_front, fails, prompt, receipt_of, selector, warm
from tests.front.harness import Front, eventually, running_front

SLOW = 600 * GRID  # tokens: with a tick of a millisecond each chunk, far from done when a test looks
HEX = "0123456789abcdef"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with cached_front(tmp_path_factory.mktemp("cache")) as front:
        yield front


# Look-up, pin, evict, list


def test_a_lookup_explains(front: Front) -> None:
    request = pb.LookupPrefixRequest(prompt=prompt(30, 2 * GRID + 1))
    nothing = front.cache.LookupPrefix(request, timeout=10)
    assert (nothing.prompt_tokens, nothing.resume_tokens, nothing.key) == (2 * GRID + 1, 0, "")
    assert (nothing.stop_reason, nothing.gate) == ("UNKNOWN", pb.GATE_DECISION_NOTHING)
    assert not nothing.HasField("checkpoint")
    (prefix,) = receipt_of(warm(front, prompt(30, 2 * GRID))).prefixes
    found = front.cache.LookupPrefix(request, timeout=10)
    assert (found.matched_tokens, found.resume_tokens, found.key) == (2 * GRID, 2 * GRID, prefix.key)
    assert found.checkpoint == pb.CheckpointPlace(position=2 * GRID, tier=pb.CACHE_TIER_DEVICE)
    (tier,) = found.tiers
    assert (tier.tier, tier.tokens, tier.bytes) == (pb.CACHE_TIER_DEVICE, 2 * GRID, 2 * GRID * TOKEN_BYTES)
    assert found.compute_s == pytest.approx(2 * GRID * 1e-4)
    assert found.stop


def test_a_lookup_on_a_lower_tier_weighs_loading_against_computing(front: Front) -> None:
    first = [0] * (GRID + 1)  # one of those that were there from the beginning, on disk alone
    request = pb.LookupPrefixRequest(prompt=pb.Prompt(token_ids=gen.TokenIds(ids=first)))
    found = front.cache.LookupPrefix(request, timeout=10)
    assert found.tiers[0].tier == pb.CACHE_TIER_DISK
    assert 0 < found.load_s < found.compute_s
    assert found.gate == pb.GATE_DECISION_LOAD


def test_a_pin_holds_until_it_is_taken_back(front: Front) -> None:
    (prefix,) = receipt_of(warm(front, prompt(31, 2 * GRID))).prefixes
    select = selector(prefix.key)
    pinned = front.cache.PinPrefix(pb.PinPrefixRequest(prefix=select, ttl_s=100), timeout=10).prefix
    assert pinned.pinned
    assert pinned.HasField("expires_time_s")
    evict = lambda: front.cache.EvictPrefix(pb.EvictPrefixRequest(prefix=select), timeout=10)  # noqa: E731
    fails(evict, grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_PINNED", "prefix")
    by_prompt = pb.PrefixSelector(prompt=prompt(31, 2 * GRID + 7))
    free = front.cache.UnpinPrefix(pb.UnpinPrefixRequest(prefix=by_prompt), timeout=10).prefix
    assert (free.key, free.pinned) == (prefix.key, False)
    assert not free.HasField("expires_time_s")
    gone = evict()
    assert (gone.prefixes, gone.blocks, gone.kept_blocks) == (1, 2 * GRID // BLOCK, 0)
    assert gone.bytes == pb.BytesByTier(device=2 * GRID * TOKEN_BYTES)
    for call in (
        evict,
        lambda: front.cache.PinPrefix(pb.PinPrefixRequest(prefix=select), timeout=10),
        lambda: front.cache.UnpinPrefix(pb.UnpinPrefixRequest(prefix=select), timeout=10),
    ):
        fails(call, grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "prefix")


def test_an_eviction_takes_what_continues_it_and_leaves_what_it_continues(front: Front) -> None:
    short, middle, _ = (receipt_of(warm(front, prompt(32, n * GRID))).prefixes[0] for n in (1, 2, 3))
    gone = front.cache.EvictPrefix(pb.EvictPrefixRequest(prefix=selector(middle.key)), timeout=10)
    assert (gone.prefixes, gone.blocks, gone.kept_blocks) == (2, 2 * GRID // BLOCK, GRID // BLOCK)
    left = front.cache.LookupPrefix(pb.LookupPrefixRequest(prompt=prompt(32, 4 * GRID)), timeout=10)
    assert left.key == short.key


def pages(front: Front, page_size: int, **fields: Any) -> list[pb.Prefix]:
    """All pages of a list, none larger than asked for, none empty but an only one."""
    found: list[pb.Prefix] = []
    token = ""
    while True:
        request = pb.ListPrefixesRequest(page_size=page_size, page_token=token, **fields)
        answer = front.cache.ListPrefixes(request, timeout=10)
        assert len(answer.prefixes) <= page_size
        found += answer.prefixes
        token = answer.next_page_token
        if not token:
            assert len(found) == answer.total
            return found
        assert len(answer.prefixes) == page_size


VALUES: dict[Any, Callable[[pb.Prefix], float]] = {
    pb.PREFIX_ORDER_UNSPECIFIED: lambda prefix: prefix.last_use_time_s,
    pb.PREFIX_ORDER_RECENCY: lambda prefix: prefix.last_use_time_s,
    pb.PREFIX_ORDER_BYTES: lambda prefix: prefix.bytes.device + prefix.bytes.host + prefix.bytes.disk,
    pb.PREFIX_ORDER_HITS: lambda prefix: prefix.hits,
}


@pytest.mark.parametrize("order", list(VALUES))
@pytest.mark.parametrize("page_size", [1, 7, 1000])
def test_pages_hold_every_prefix_once_and_in_order(front: Front, order: Any, page_size: int) -> None:
    found = pages(front, page_size, order=order)
    assert len(found) >= NUM_PREFIXES
    assert len({prefix.key for prefix in found}) == len(found)
    assert found == sorted(found, key=lambda prefix: (-VALUES[order](prefix), prefix.key))
    assert {prefix.namespace for prefix in found} == {"default"}


def test_a_key_prefix_narrows_the_list(front: Front) -> None:
    everything = pages(front, 1000)
    by_digit = [pages(front, 3, key_prefix=digit) for digit in HEX]
    assert sum(map(len, by_digit)) == len(everything)
    (one,) = pages(front, 10, key_prefix=everything[0].key)
    assert one == everything[0]
    assert pages(front, 10, key_prefix="0" * 64) == []


def test_a_token_of_another_list_is_refused(front: Front) -> None:
    token = front.cache.ListPrefixes(pb.ListPrefixesRequest(page_size=1), timeout=10).next_page_token
    assert token
    for request in (
        pb.ListPrefixesRequest(page_token=token, order=pb.PREFIX_ORDER_HITS),
        pb.ListPrefixesRequest(page_token=token, key_prefix="a"),
        pb.ListPrefixesRequest(page_token=token[:-2]),
        pb.ListPrefixesRequest(page_token="AAAA"),
        pb.ListPrefixesRequest(page_token="A"),
    ):
        call = lambda request=request: front.cache.ListPrefixes(request, timeout=10)  # noqa: E731
        fails(call, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "page_token")


# Tiers and quotas


def test_tiers_tell_what_an_operator_needs(front: Front) -> None:
    device, host, disk = front.admin.ListTiers(admin_pb2.ListTiersRequest(), timeout=10).tiers
    assert device.state == host.state == admin_pb2.TIER_STATE_OK
    assert (host.is_unified, host.host_free_bytes, host.HasField("driver_free_bytes")) == (True, 77, False)
    assert (host.reads, host.read_bytes, host.read_s) == (4, 4096, 0.002)
    assert (disk.state, disk.state_reason) == (admin_pb2.TIER_STATE_READ_ONLY, "no space is left")
    assert (disk.used_bytes, disk.quota_bytes, disk.dirty_bytes) == (5000, 8192, 256)
    assert (disk.dropped_writes, disk.verify_failures, disk.quarantined, disk.gate_refusals) == (6, 1, 1, 9)
    assert not device.HasField("quota_bytes")


def test_a_verify_tells_its_progress_and_names_the_damage(front: Front) -> None:
    events = list(front.admin.VerifyTier(admin_pb2.VerifyTierRequest(tier=pb.CACHE_TIER_DISK), timeout=20))
    done = [event.progress.done_records for event in events[:-1]]
    assert done == sorted(set(done))
    assert events[0].progress.total_records == 40
    report = events[-1].report
    assert (report.records, report.damaged, len(report.damage)) == (40, 2, 2)
    assert (report.damage[1].name, report.damage[1].what) == ("segment 3 at 4096", "checksum differs")


def test_a_cancelled_verify_or_flush_ends_in_the_engine(tmp_path: Path) -> None:
    engine = ("--tiers", "device,disk", "--records", "1000000")
    with running_front(tmp_path, engine) as own:
        in_engine = lambda: [  # noqa: E731
            entry.owner for entry in own.admin.GetLedger(admin_pb2.GetLedgerRequest(), timeout=10).entries
        ]
        verify = own.admin.VerifyTier(admin_pb2.VerifyTierRequest(tier=pb.CACHE_TIER_DISK), timeout=20)
        next(verify)
        flush = own.admin.FlushTier.future(admin_pb2.FlushTierRequest(tier=pb.CACHE_TIER_DISK), timeout=20)
        eventually(lambda: sorted(in_engine()) == ["Flush", "Verify"])
        verify.cancel()
        eventually(lambda: in_engine() == ["Flush"])
        flush.cancel()
        eventually(lambda: in_engine() == [])


def test_only_a_few_tiers_are_read_at_a_time(tmp_path: Path) -> None:
    with running_front(tmp_path, ("--tiers", "device,disk", "--records", "1000000")) as own:
        request = admin_pb2.VerifyTierRequest(tier=pb.CACHE_TIER_DISK)
        calls = [own.admin.VerifyTier(request, timeout=20) for _ in range(4)]
        for call in calls:
            next(call)
        verify = lambda: list(own.admin.VerifyTier(request, timeout=20))  # noqa: E731
        fails(verify, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        for call in calls:
            call.cancel()


def test_an_engine_that_dies_ends_a_verify(tmp_path: Path) -> None:
    with running_front(tmp_path, ("--tiers", "device,disk", "--records", "1000000")) as own:
        call = own.admin.VerifyTier(admin_pb2.VerifyTierRequest(tier=pb.CACHE_TIER_DISK), timeout=20)
        next(call)
        os.kill(own.info().engine_pid, signal.SIGKILL)
        fails(lambda: list(call), grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")


def test_a_flush_says_what_it_wrote(front: Front) -> None:
    done = front.admin.FlushTier(admin_pb2.FlushTierRequest(tier=pb.CACHE_TIER_DISK), timeout=10)
    assert (done.records, done.bytes, done.durable) == (40, 40 * 4096, True)


def test_a_quota_is_set_listed_felt_and_lifted(front: Front) -> None:
    (prefix,) = receipt_of(warm(front, prompt(33))).prefixes
    request = admin_pb2.SetQuotaRequest(namespace="default", pinned_bytes=GRID)
    quota = front.admin.SetQuota(request, timeout=10).quota
    assert (quota.pinned_bytes, quota.HasField("cached_bytes"), quota.durable) == (GRID, False, False)
    pin = lambda: front.cache.PinPrefix(pb.PinPrefixRequest(prefix=selector(prefix.key)), timeout=10)  # noqa: E731
    fails(pin, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    (listed,) = front.admin.ListQuotas(admin_pb2.ListQuotasRequest(), timeout=10).quotas
    assert listed.used_cached_bytes > NUM_PREFIXES * GRID * TOKEN_BYTES
    front.admin.RemoveQuota(admin_pb2.RemoveQuotaRequest(namespace="default"), timeout=10)
    assert pin().prefix.pinned
    remove = lambda: front.admin.RemoveQuota(admin_pb2.RemoveQuotaRequest(namespace="default"), timeout=10)  # noqa: E731
    fails(remove, grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "namespace")
