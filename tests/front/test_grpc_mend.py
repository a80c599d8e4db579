"""The mend of grpcio's leak: a batch's event is taken when the core completes it, whoever still waits for it."""

import asyncio
import gc
import logging
from typing import Any

import pytest

from daemon.front import grpc_mend

cygrpc: Any = grpc_mend.cygrpc


class Core:
    """Stands in for the C core: completes batches when told, and sees which events were taken."""

    def __init__(self) -> None:
        self.future: Any = None
        self.taken: list[str] = []

    async def execute_batch(self, call: str, operations: tuple[str, ...], loop: Any) -> None:
        """As the original does: a future from the loop, an await, then the event."""
        if call == "refused":
            raise ValueError("the core refuses this batch")
        self.future = loop.create_future()
        await self.future
        self.taken.append(call)

    def complete(self, error: Exception | None = None) -> None:
        if not self.future.cancelled():
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)


async def start(core: Core, call: str) -> "asyncio.Task[None]":
    execute = grpc_mend.mended(core.execute_batch)

    async def caller() -> None:
        await execute(call, (), asyncio.get_running_loop())

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    return task


def test_an_awaited_batch_wakes_its_caller_after_its_event_is_taken() -> None:
    async def main() -> None:
        core = Core()
        task = await start(core, "write")
        assert not task.done()
        core.complete()
        assert core.taken == ["write"]
        await task

    asyncio.run(main())


def test_a_batch_whose_caller_was_cancelled_still_has_its_event_taken() -> None:
    async def main() -> None:
        core = Core()
        task = await start(core, "write")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert core.taken == []
        core.complete()
        assert core.taken == ["write"]

    asyncio.run(main())


def test_a_failed_batch_has_its_event_taken_and_its_caller_told() -> None:
    async def main() -> None:
        core = Core()
        task = await start(core, "write")
        core.complete(RuntimeError("broken"))
        assert core.taken == ["write"]
        with pytest.raises(RuntimeError, match="broken"):
            await task

    asyncio.run(main())


def test_a_failed_batch_that_nobody_awaits_is_quiet() -> None:
    async def main() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        core = Core()
        task = await start(core, "write")
        task.cancel()
        await asyncio.wait((task,))
        core.complete(RuntimeError("broken"))
        assert core.taken == ["write"]
        del core, task
        gc.collect()
        await asyncio.sleep(0)
        return complaints

    assert asyncio.run(main()) == []


def test_a_batch_that_the_core_refuses_raises_at_once() -> None:
    async def main() -> None:
        task = await start(Core(), "refused")
        with pytest.raises(ValueError, match="refuses"):
            await task

    asyncio.run(main())


def test_it_is_applied_to_the_installed_version_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cygrpc, "execute_batch", cygrpc.execute_batch)  # put back afterwards
    assert grpc_mend.apply()
    mended = cygrpc.execute_batch
    assert mended.__module__ == grpc_mend.__name__
    assert grpc_mend.apply()
    assert cygrpc.execute_batch is mended


def test_another_version_is_left_alone_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = cygrpc.execute_batch
    monkeypatch.setattr(grpc_mend, "version", lambda name: "9.9.9")
    with caplog.at_level(logging.WARNING):
        assert not grpc_mend.apply()
    assert cygrpc.execute_batch is original
    assert "may leak" in caplog.text
