"""Warming jobs over a real socket, with the scripted engine's cache."""

import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import cache_pb2 as pb
from downcore.v1 import generation_pb2 as gen

from tests.engines.scripted_cache import GRID, REFUSED, TOKEN_BYTES
from tests.front.cached import cached_front, fails, prompt, receipt_of, warm
from tests.front.harness import Front, details_of, eventually, ids_of, running_front

SLOW = 600 * GRID  # tokens: with a tick of a millisecond each chunk, far from done when a test looks


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with cached_front(tmp_path_factory.mktemp("cache")) as front:
        yield front


def jobs_in_engine(front: Front) -> list[str]:
    return [row.id for row in front.sequences() if row.is_warming]


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


def test_an_engine_that_does_not_answer_costs_a_bounded_wait(tmp_path: Path) -> None:
    with running_front(tmp_path, engine=("--mute",), flags=("--query-timeout-s", "0.2")) as own:
        call = lambda: own.cache.ListPrefixes(pb.ListPrefixesRequest(), timeout=10)  # noqa: E731
        fails(call, grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
