"""The tables of warming jobs and of open questions: bounded, and deaf to what comes too late."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front import warm
from daemon.front.questions import MAX_LONG, MAX_QUESTIONS, Questions
from daemon.front.warm import MAX_JOBS, MAX_RECEIPTS, Receipt, WarmJobs
from daemon.front.wire_ids import client_name, client_owner

ERROR = RequestError(ErrorReason.ENGINE_UNAVAILABLE, "gone")
RECEIPT = Receipt((1024,), (), 1.0)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 20))


def done_of(wire_id: str) -> cm.WarmDone:
    return cm.WarmDone(wire_id, "k" * 64, 1024, 0, cm.BytesByTier(), False, False)


def test_jobs_are_bounded_and_receipts_too() -> None:
    async def body() -> None:
        jobs = WarmJobs()
        running = [jobs.open(f"j{i}", "default", b"", is_detached=False) for i in range(MAX_JOBS)]
        with pytest.raises(RequestError) as caught:
            jobs.open("one-more", "default", b"", is_detached=False)
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        for job in running:
            job.end(ERROR)
            jobs.close(job, keep_until_s=100.0)
        assert jobs.join("j0", "default", b"", 0.0) is None  # a failure leaves no receipt
        for number in range(MAX_RECEIPTS + 5):
            job = jobs.open(f"r{number}", "default", b"", is_detached=False)
            job.end(RECEIPT)
            jobs.close(job, keep_until_s=100.0)
            jobs.check()
        assert jobs.join("r4", "default", b"", 0.0) is None
        assert jobs.join("r5", "default", b"", 0.0) is RECEIPT
        assert jobs.join("r5", "default", b"", 100.0) is None  # its time is over
        assert len(jobs) == 0

    run(body())


def test_a_key_that_is_running_or_remembered_takes_no_other_content() -> None:
    async def body() -> None:
        jobs = WarmJobs()
        job = jobs.open("a", "default", b"1", is_detached=False)
        assert jobs.join("a", "default", b"1", 0.0) is job
        for _ in range(2):
            with pytest.raises(RequestError) as caught:
                jobs.join("a", "default", b"2", 0.0)
            assert (caught.value.reason, caught.value.field) == (ErrorReason.ALREADY_EXISTS, "key")
            if not job.is_over:
                job.end(RECEIPT)
                jobs.close(job, keep_until_s=9.0)
        assert jobs.join("a", "default", b"2", 9.0) is None

    run(body())


def test_a_job_that_ends_before_its_task_has_begun_leaves_the_table() -> None:
    async def body() -> None:
        jobs = WarmJobs()
        job = jobs.open("a", "default", b"", is_detached=False)

        async def carry_out() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                jobs.close(job, keep_until_s=None)

        job.task = asyncio.create_task(carry_out())
        job.cancel(ERROR)  # as an operator may, in the same turn of the loop
        await asyncio.wait((job.task,), timeout=10)
        assert job.task.done()
        assert len(jobs) == 0

    run(body())


def test_fresh_keys_are_no_others() -> None:
    async def body() -> None:
        jobs = WarmJobs()
        jobs.open("w-1", "default", b"", is_detached=False)
        keys = {jobs.open("", "default", b"", is_detached=False).key for _ in range(5)}
        assert len(keys | {"w-1"}) == 6

    run(body())


def test_what_comes_after_the_end_is_dropped() -> None:
    async def body() -> None:
        jobs = WarmJobs()
        job = jobs.open("a", "default", b"", is_detached=False)
        job.begin((1024, 1024, 1024))
        first, second = jobs.submit(job, 0), jobs.submit(job, 1)
        jobs.receive(cm.WarmProgress(job.wire_id(0), cm.WarmStage.COMPUTING, 512, 1024))
        assert job.parts[0].done_tokens == 512
        jobs.receive(done_of(job.wire_id(0)))
        jobs.receive(cm.WarmProgress(job.wire_id(0), cm.WarmStage.QUEUED, 0, 1024))
        assert first.result().tokens == job.parts[0].done_tokens == 1024
        job.end(ERROR)
        assert jobs.withdraw(job) == [messages.Abort(job.wire_id(1))]  # not what has ended, nor what was never sent
        assert second.cancelled()
        jobs.receive(done_of(job.wire_id(1)))
        assert not job.parts[1].is_done
        jobs.close(job, keep_until_s=None)
        again = jobs.open("a", "default", b"", is_detached=False)
        assert again.wire_id(0) != job.wire_id(0)  # so that nothing of the first can reach the second
        jobs.check()

    run(body())


def test_a_lost_engine_ends_every_prompt_and_every_promise() -> None:
    async def body() -> None:
        jobs = WarmJobs()
        kept = jobs.open("kept", "default", b"", is_detached=False)
        kept.end(RECEIPT)
        jobs.close(kept, keep_until_s=100.0)
        job = jobs.open("a", "default", b"", is_detached=False)
        job.begin((1024,))
        ended = jobs.submit(job, 0)
        jobs.lose_engine(ERROR)
        assert ended.exception() is ERROR
        assert jobs.join("kept", "default", b"", 0.0) is None
        jobs.check()
        assert not await jobs.wait_idle(0.01)
        job.end(ERROR)
        assert jobs.withdraw(job) == []
        jobs.close(job, keep_until_s=None)
        assert await jobs.wait_idle(0.01)

    run(body())


def test_wire_ids_go_back_to_what_the_client_said() -> None:
    wire_id = warm.warm_wire_id("night.ly-1", 7, 12)
    assert (client_name(wire_id).name, client_name(wire_id).warm_index) == ("night.ly-1", 12)
    assert (client_name("mine~3").name, client_name("mine~3").warm_index) == ("mine", None)
    owners = {f"{wire_id}/0": "night.ly-1/12", "mine~3/1": "mine/1", "mine~3": "mine", "cache": "cache", "free": "free"}
    assert {owner: client_owner(owner) for owner in owners} == owners


def test_questions_are_bounded_and_late_answers_dropped() -> None:
    async def body() -> None:
        sent: list[messages.ToEngine] = []
        questions = Questions(sent.append)

        def list_quotas(timeout_s: float) -> "asyncio.Task[cm.QuotaList]":
            return asyncio.create_task(questions.ask(cm.ListQuotas, cm.QuotaList, timeout_s))

        open_ones = [list_quotas(5.0) for _ in range(MAX_QUESTIONS)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as caught:
            await list_quotas(5.0)
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        questions.receive(cm.QuotaList(1, ()))
        questions.receive(cm.QuotaList(1, ()))
        questions.receive(cm.Refused(2, ErrorReason.NOT_FOUND, "no", "field"))
        questions.fail(ERROR)
        results = await asyncio.gather(*open_ones, return_exceptions=True)
        assert results[0] == cm.QuotaList(1, ())
        assert isinstance(results[1], RequestError)
        assert (results[1].reason, results[1].field) == (ErrorReason.NOT_FOUND, "field")
        assert set(results[2:]) == {ERROR}
        with pytest.raises(RequestError) as caught:
            await list_quotas(0.01)
        assert caught.value.reason is ErrorReason.ENGINE_UNAVAILABLE
        questions.receive(cm.QuotaList(MAX_QUESTIONS + 1, ()))
        assert not any(isinstance(message, cm.Cancel) for message in sent)

    run(body())


def test_progress_that_is_not_read_is_replaced_and_closing_cancels() -> None:
    async def body() -> None:
        sent: list[messages.ToEngine] = []
        questions = Questions(sent.append)
        events = questions.verify(cm.TierName.DISK)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        for done in range(1000):
            questions.receive(cm.VerifyProgress(1, done, 1000, done, 1000))
        assert await first == cm.VerifyProgress(1, 999, 1000, 999, 1000)
        await events.aclose()
        assert sent == [cm.Verify(1, cm.TierName.DISK), cm.Cancel(1)]
        finished = questions.verify(cm.TierName.DISK)
        last = asyncio.ensure_future(anext(finished))
        await asyncio.sleep(0)
        questions.receive(cm.VerifyDone(2, 1, 1, 0.1, 0, ()))
        assert await last == cm.VerifyDone(2, 1, 1, 0.1, 0, ())
        assert [event async for event in finished] == []
        assert sent[-1] == cm.Verify(2, cm.TierName.DISK)
        open_ones = [asyncio.ensure_future(anext(questions.verify(cm.TierName.DISK))) for _ in range(MAX_LONG)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="already"):
            await anext(questions.verify(cm.TierName.DISK))
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        assert sum(isinstance(message, cm.Cancel) for message in sent) == 1 + MAX_LONG

    run(body())
