"""CacheService and what AdminService adds to it, over a real socket with the scripted engine's cache."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import cache_pb2 as pb
from downcore.v1 import generation_pb2 as gen

from daemon.front import validate
from tests.engines.scripted_cache import BLOCK, GRID, REFUSED, TOKEN_BYTES
from tests.front.harness import Front, details_of, eventually, ids_of, running_front

SLOW = 600 * GRID  # tokens: with a tick of a millisecond each chunk, far from done when a test looks
NUM_PREFIXES = 25
HEX = "0123456789abcdef"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    """Three tiers and some prefixes; each test works with prompts of its own."""
    engine = (
        "--tiers", "device,host,disk", "--prefixes", str(NUM_PREFIXES), "--records", "40", "--damaged", "2",
        "--context", str(1 << 22),
    )  # fmt: skip
    with running_front(tmp_path_factory.mktemp("cache"), engine) as front:
        yield front


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


def jobs_in_engine(front: Front) -> list[str]:
    return [row.id for row in front.sequences() if row.is_warming]


# Warming


def test_a_warm_tells_its_stages_in_order_and_ends_with_a_receipt(front: Front) -> None:
    responses = warm(front, prompt(11, 3 * GRID + 100), tier=pb.CACHE_TIER_DISK, durable=True, pin=True, ttl_s=60)
    assert responses[0].started.prompt_tokens == [3 * GRID + 100]
    progress = [r.progress for r in responses[1:-1]]
    stages = list(dict.fromkeys(p.stage for p in progress))
    expected = [pb.WARM_STAGE_QUEUED, pb.WARM_STAGE_COMPUTING, pb.WARM_STAGE_WRITING, pb.WARM_STAGE_DONE]
    assert stages == [stage for stage in expected if stage in stages]
    assert stages[-1] == pb.WARM_STAGE_DONE
    for stage in stages:
        done = [p.done_tokens for p in progress if p.stage == stage]
        assert done == sorted(done)
    assert progress[-1].done_tokens == progress[-1].total_tokens == 3 * GRID
    receipt = receipt_of(responses)
    assert receipt.key == responses[0].started.key != ""
    (prefix,) = receipt.prefixes
    size = 3 * GRID * TOKEN_BYTES
    assert (prefix.tokens, prefix.cached_tokens, prefix.durable, prefix.pinned) == (3 * GRID, 0, True, True)
    assert prefix.bytes == pb.BytesByTier(device=size, disk=size)
    assert receipt.time_s + 50 < prefix.expires_time_s < receipt.time_s + 70
    assert not receipt.is_repeated


def test_what_is_cached_already_is_told_and_not_computed(front: Front) -> None:
    warm(front, prompt(12, 2 * GRID))
    (prefix,) = receipt_of(warm(front, prompt(12, 5 * GRID))).prefixes
    assert (prefix.tokens, prefix.cached_tokens) == (5 * GRID, 2 * GRID)


def test_text_chat_and_ids_are_warmed_in_one_call(front: Front) -> None:
    text = "m" * (GRID + 10)
    chat = gen.Chat(messages=[gen.ChatMessage(role="user", content=text)])
    ids = gen.TokenIds(ids=ids_of(text))
    responses = warm(front, pb.Prompt(text=text), pb.Prompt(chat=chat), pb.Prompt(token_ids=ids))
    rendered = len(f"<user>{text}\n")
    assert responses[0].started.prompt_tokens[0] == responses[0].started.prompt_tokens[2] == GRID + 10
    assert GRID + 10 < responses[0].started.prompt_tokens[1] <= rendered
    by_text, by_chat, by_ids = receipt_of(responses).prefixes
    assert by_text.key == by_ids.key != by_chat.key


def test_many_prompts_are_warmed_a_few_at_a_time(front: Front) -> None:
    prompts = [prompt(100 + i, 20 * GRID) for i in range(20)]
    seen: list[int] = []
    call = front.cache.WarmPrefix(pb.WarmPrefixRequest(prompts=prompts), timeout=30)
    for response in call:
        if response.HasField("progress") and response.progress.stage == pb.WARM_STAGE_COMPUTING and len(seen) < 5:
            seen.append(len(jobs_in_engine(front)))
        if response.HasField("receipt"):
            assert len({prefix.key for prefix in response.receipt.prefixes}) == 20
    assert seen
    assert max(seen) <= 4


def test_cancelling_a_warm_in_the_middle_ends_it_in_the_engine(front: Front) -> None:
    call = front.cache.WarmPrefix(pb.WarmPrefixRequest(key="stopped", prompts=[prompt(13, SLOW)]), timeout=20)
    assert any(r.HasField("progress") and r.progress.stage == pb.WARM_STAGE_COMPUTING for r in call)
    assert jobs_in_engine(front) == ["stopped/0"]
    call.cancel()
    eventually(lambda: jobs_in_engine(front) == [])
    assert front.info().state == admin_pb2.ENGINE_STATE_SERVING


def test_a_deadline_ends_a_warm_in_the_engine(front: Front) -> None:
    request = pb.WarmPrefixRequest(key="late", prompts=[prompt(14, SLOW)])
    with pytest.raises(grpc.RpcError) as caught:
        list(front.cache.WarmPrefix(request, timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    eventually(lambda: jobs_in_engine(front) == [])


def test_a_thousand_cancels_leave_nothing(front: Front) -> None:
    request = pb.WarmPrefixRequest(prompts=[prompt(15, 50 * GRID), prompt(16, 50 * GRID)])
    for number in range(1000):
        call = front.cache.WarmPrefix(request)
        if number % 10 == 0:
            next(call)
        call.cancel()
    eventually(lambda: jobs_in_engine(front) == [])
    assert receipt_of(warm(front, prompt(17))).prefixes[0].tokens == GRID


def test_the_same_key_and_content_is_one_job_until_its_last_listener_leaves(front: Front) -> None:
    request = pb.WarmPrefixRequest(key="shared", prompts=[prompt(18, SLOW)])
    first = front.cache.WarmPrefix(request, timeout=20)
    next(first)
    second = front.cache.WarmPrefix(request, timeout=20)
    assert next(second).started == pb.WarmStarted(key="shared", prompt_tokens=[SLOW])
    assert jobs_in_engine(front) == ["shared/0"]
    first.cancel()
    before = next(r for r in second if r.HasField("progress")).progress.done_tokens
    assert any(r.HasField("progress") and r.progress.done_tokens > before for r in second)
    second.cancel()
    eventually(lambda: jobs_in_engine(front) == [])


def test_a_key_gives_the_same_receipt_again_and_is_no_other_jobs(front: Front) -> None:
    first = warm(front, prompt(19), key="once")
    again = warm(front, prompt(19), key="once")
    assert len(again) == 2
    assert again[0] == first[0]
    repeated = receipt_of(again)
    assert repeated.is_repeated
    repeated.is_repeated = False
    assert repeated == receipt_of(first)
    for other in ({"pin": True}, {"ttl_s": 5.0}, {"tier": pb.CACHE_TIER_HOST}):
        call = lambda other=other: warm(front, prompt(19), key="once", **other)  # noqa: E731
        fails(call, grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", "key")
    fails(lambda: warm(front, prompt(20), key="once"), grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", "key")


def test_a_cancelled_key_begins_anew_at_once(front: Front) -> None:
    slow = pb.WarmPrefixRequest(key="again", prompts=[prompt(21, SLOW)])
    for _ in range(20):
        call = front.cache.WarmPrefix(slow, timeout=20)
        assert next(call).HasField("started")
        call.cancel()
    eventually(lambda: jobs_in_engine(front) == [])
    assert not receipt_of(warm(front, prompt(22), key="again")).is_repeated


def test_equal_calls_at_the_same_moment_are_one_job(front: Front) -> None:
    with ThreadPoolExecutor(8) as pool:
        gate = threading.Barrier(8)

        def call(_: int) -> list[pb.WarmPrefixResponse]:
            gate.wait()
            return warm(front, prompt(23, 30 * GRID), key="herd")

        receipts = [receipt_of(responses) for responses in pool.map(call, range(8))]
    assert len({receipt.time_s for receipt in receipts}) == 1
    assert {prefix.cached_tokens for receipt in receipts for prefix in receipt.prefixes} == {0}


def test_a_detached_job_outlives_its_call_and_its_receipt_is_there(front: Front) -> None:
    request = pb.WarmPrefixRequest(key="night", prompts=[prompt(24, 100 * GRID)], detached=True)
    call = front.cache.WarmPrefix(request, timeout=20)
    next(call)
    call.cancel()
    assert jobs_in_engine(front) == ["night/0"]
    eventually(lambda: jobs_in_engine(front) == [])
    receipt = receipt_of(list(front.cache.WarmPrefix(request, timeout=20)))
    assert receipt.is_repeated
    assert receipt.prefixes[0].tokens == 100 * GRID


def test_an_operator_sees_and_ends_a_job_by_its_key(front: Front) -> None:
    request = pb.WarmPrefixRequest(key="endless", prompts=[prompt(25, SLOW), prompt(26, SLOW)], detached=True)
    call = front.cache.WarmPrefix(request, timeout=20)
    assert next(call).HasField("started")
    eventually(lambda: jobs_in_engine(front) == ["endless/0", "endless/1"])
    one = front.admin.ListSequences(admin_pb2.ListSequencesRequest(id="endless/1"), timeout=10).sequences
    assert [(row.id, row.request_id, row.index, row.is_warming) for row in one] == [("endless/1", "endless", 1, True)]
    abort = lambda name: front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id=name), timeout=10)  # noqa: E731
    fails(lambda: abort("endless/1"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "id")
    assert abort("endless").aborted == 2
    fails(lambda: list(call), grpc.StatusCode.ABORTED, "ABORTED")
    eventually(lambda: jobs_in_engine(front) == [])
    fails(lambda: abort("endless"), grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "id")


def test_one_prompt_that_fails_fails_the_job_and_is_named(front: Front) -> None:
    call = lambda: warm(front, prompt(27, SLOW), prompt(REFUSED))  # noqa: E731
    error = fails(call, grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_CAPACITY", "prompts[1]")
    assert details_of(error)["RetryInfo"].retry_delay.seconds == 2
    eventually(lambda: jobs_in_engine(front) == [])


def test_a_prompt_without_a_prefix_is_refused_before_anything_is_computed(front: Front) -> None:
    call = lambda: warm(front, prompt(28, GRID), prompt(29, GRID - 1))  # noqa: E731
    fails(call, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "prompts[1]")
    lookup = front.cache.LookupPrefix(pb.LookupPrefixRequest(prompt=prompt(28, GRID + 1)), timeout=10)
    assert lookup.matched_tokens == 0


def test_a_template_that_hangs_fails_its_job_alone(tmp_path: Path) -> None:
    chat = gen.Chat(messages=[gen.ChatMessage(role="user", content="hang")])
    with running_front(tmp_path, flags=("--tokenizer-timeout-s", "0.3")) as own:
        call = lambda: warm(own, prompt(5), pb.Prompt(chat=chat))  # noqa: E731
        fails(call, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKENIZER_TIMEOUT", "prompts[1].chat")
        assert receipt_of(warm(own, prompt(5)))


def test_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with running_front(tmp_path) as own:
        assert own.info().tiers == [pb.CACHE_TIER_DEVICE]
        call = lambda: warm(own, prompt(5), tier=pb.CACHE_TIER_DISK)  # noqa: E731
        fails(call, grpc.StatusCode.FAILED_PRECONDITION, "TIER_UNAVAILABLE", "tier")
        verify = admin_pb2.VerifyTierRequest(tier=pb.CACHE_TIER_HOST)
        for refused in (
            lambda: list(own.admin.VerifyTier(verify, timeout=10)),
            lambda: own.admin.FlushTier(admin_pb2.FlushTierRequest(tier=pb.CACHE_TIER_HOST), timeout=10),
        ):
            fails(refused, grpc.StatusCode.FAILED_PRECONDITION, "TIER_UNAVAILABLE", "tier")


def test_an_engine_that_dies_fails_its_jobs_and_forgets_their_receipts(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--context", str(1 << 22))) as own:
        warm(own, prompt(5), key="before")
        call = own.cache.WarmPrefix(
            pb.WarmPrefixRequest(key="during", prompts=[prompt(6, SLOW)], detached=True), timeout=20
        )
        next(call)
        os.kill(own.info().engine_pid, signal.SIGKILL)
        fails(lambda: list(call), grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        eventually(lambda: own.info().state == admin_pb2.ENGINE_STATE_SERVING)
        assert not receipt_of(warm(own, prompt(5), key="before")).is_repeated


def test_a_drain_waits_for_jobs_and_takes_no_new_one(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--context", str(1 << 22))) as own:
        call = own.cache.WarmPrefix(pb.WarmPrefixRequest(key="last", prompts=[prompt(5, 300 * GRID)]), timeout=20)
        next(call)
        soon = own.admin.Drain(admin_pb2.DrainRequest(timeout_s=0), timeout=10)
        assert (soon.drained, soon.open_requests) == (False, 1)
        fails(lambda: warm(own, prompt(6)), grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert own.admin.Drain(admin_pb2.DrainRequest(timeout_s=15), timeout=20).drained
        assert receipt_of(list(call)).prefixes[0].tokens == 300 * GRID


def test_jobs_left_after_the_drain_window_end_and_the_front_leaves_in_order(tmp_path: Path) -> None:
    engine, flags = ("--context", str(1 << 22)), ("--drain-window-s", "0.2")
    with running_front(tmp_path, engine, flags) as own:
        call = own.cache.WarmPrefix(pb.WarmPrefixRequest(prompts=[prompt(5, SLOW)]), timeout=20)
        next(call)
        own.process.send_signal(signal.SIGTERM)
        fails(lambda: list(call), grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert own.process.wait(20) == 0


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


# Bad values

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


def test_an_engine_that_does_not_answer_costs_a_bounded_wait(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--mute",), flags=("--query-timeout-s", "0.2")) as own:
        call = lambda: own.cache.ListPrefixes(pb.ListPrefixesRequest(), timeout=10)  # noqa: E731
        fails(call, grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
