"""Workers that cannot be started: who asks is told, and is served again as soon as they can."""

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from daemon.front import worker_pool
from daemon.front.worker_pool import PoolFull, PoolLimits, WorkerDied, WorkerKind, WorkerPool, WorkersFailed
from daemon.messages import HEADER

ECHO = f"""#!{sys.executable} -SE
import os, struct
while len(header := os.read(0, {HEADER.size})) == {HEADER.size}:
    size = struct.unpack({HEADER.format!r}, header)[0]
    body = os.read(0, size)
    if body == b"die":
        os._exit(1)
    if body == b"wait":
        os.read(os.open("go", os.O_RDONLY), 1)
    os.write(1, header + body)
"""
DIES = "#!/bin/false\n"


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(stat.S_IRWXU)


def pool_of(program: Path, num_workers: int = 1, queue_size: int = 8) -> WorkerPool[bytes, bytes]:
    kind: WorkerKind[bytes, bytes] = WorkerKind(
        name="echo",
        command=(str(program),),
        frame=lambda body: HEADER.pack(len(body)) + body,
        decode=bytes,
        max_reply_bytes=100,
        hello=b"hello",
        is_ready=lambda reply: reply == b"hello",
    )
    return WorkerPool(kind, PoolLimits(num_workers, queue_size, 5.0))


@pytest.mark.parametrize("fault", ["gone", "dies"])
def test_while_no_worker_starts_who_asks_is_told_and_later_served(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "RESPAWN_DELAY_S", 0.01)
    program = tmp_path / "echo"

    async def go() -> None:
        write_program(program, ECHO)
        pool = pool_of(program)
        assert await pool.start(b"first") == b"first"
        program.unlink()
        if fault == "dies":
            write_program(program, DIES)
        with pytest.raises(WorkerDied):
            await pool.ask(b"die")
        async with asyncio.timeout(10.0):
            with pytest.raises(WorkersFailed):
                await pool.ask(b"anyone")
        write_program(tmp_path / "new", ECHO)
        (tmp_path / "new").rename(program)
        async with asyncio.timeout(10.0):
            while True:
                try:
                    assert await pool.ask(b"again") == b"again"
                    break
                except WorkersFailed:  # the last of those that could not start
                    await asyncio.sleep(0.01)
        await pool.stop()
        assert pool.pids == ()

    asyncio.run(go())


def test_a_program_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    async def go() -> None:
        pool = pool_of(tmp_path / "nothing")
        with pytest.raises(WorkersFailed):
            await pool.start(b"first")
        assert pool.pids == ()

    asyncio.run(go())


def test_a_question_whose_asker_has_gone_keeps_no_place_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("go")

    async def go() -> None:
        write_program(tmp_path / "echo", ECHO)
        pool = pool_of(tmp_path / "echo", queue_size=2)
        await pool.start(b"first")
        busy = asyncio.create_task(pool.ask(b"wait"))
        let_go = await asyncio.to_thread(os.open, "go", os.O_WRONLY)  # it has the question
        gone = [asyncio.create_task(pool.ask(b"gone")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(PoolFull):
            await pool.ask(b"one too many")
        for one in gone:
            one.cancel()
        await asyncio.wait(gone)
        patient = asyncio.create_task(pool.ask(b"patient"))
        await asyncio.sleep(0)
        os.write(let_go, b"x")
        os.close(let_go)
        assert (await busy, await patient) == (b"wait", b"patient")
        await pool.stop()

    asyncio.run(go())


def test_a_worker_that_died_while_it_was_idle_fails_no_question(tmp_path: Path) -> None:
    async def go() -> None:
        write_program(tmp_path / "echo", ECHO)
        pool = pool_of(tmp_path / "echo")
        await pool.start(b"first")
        for number in range(1, 4):
            (pid,) = pool.pids
            os.kill(pid, signal.SIGKILL)
            while is_there(pid):
                await asyncio.sleep(0.001)
            assert await pool.ask(b"anyone") == b"anyone"
            assert pool.kills == number
        await pool.stop()

    asyncio.run(go())


def is_there(pid: int) -> bool:
    """Its end has not been seen by who started it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
