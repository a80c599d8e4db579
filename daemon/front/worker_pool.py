"""Worker processes: a few, one question at a time each, killed and replaced where one takes too long.

What must hold: a question ends within its time, whatever it does to its worker; one that hangs or kills its worker
fails alone; the queue before the workers is bounded, and who has gone has no place in it; while no worker starts, who
asks is told so.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from daemon.front.child import Child
from daemon.messages import HEADER

log = logging.getLogger("downcore.front")

START_TIMEOUT_S = 120.0  # reading a large vocabulary on a busy machine
RESPAWN_DELAY_S = 0.2

Q = TypeVar("Q")
R = TypeVar("R")


class PoolFull(Exception):
    """As many questions wait as may."""


class WorkerDied(Exception):
    """The question ended its worker."""


class WorkerTimeout(Exception):
    """The question took too long; its worker was ended."""


class WorkersFailed(Exception):
    """No worker starts."""


@dataclass(frozen=True)
class WorkerKind(Generic[Q, R]):
    """A program that answers questions on its standard input and output, in frames as in daemon/messages.py."""

    name: str  # in logs
    command: Sequence[str]
    frame: Callable[[Q], bytes]
    decode: Callable[[bytes], R]  # raises ValueError
    max_reply_bytes: int
    hello: Q  # what a new worker is asked first, so that its start does not count as a question's time
    is_ready: Callable[[R], bool]  # whether it answered as a worker that works


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How many workers there are, how many questions wait for them, and how long each may take."""

    num_workers: int
    queue_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process and the socket that is its standard input and output."""

    process: Child
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Generic[Q, R]):
    question: Q
    reply: "asyncio.Future[R]"


class WorkerPool(Generic[Q, R]):
    """Answers questions through processes of one kind."""

    def __init__(self, kind: WorkerKind[Q, R], limits: PoolLimits) -> None:
        self._kind = kind
        self._limits = limits
        self._jobs: dict[_Job[Q, R], None] = {}  # those that wait for a worker, oldest first
        self._has_jobs = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self._ready: set[_Worker] = set()  # of them, those that have answered
        self.kills = 0  # workers that had to be killed, or had died

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that there are now."""
        return tuple(worker.process.pid for worker in self._workers)

    async def start(self, first: Q) -> R:
        """Starts the workers. Returns: the first one's reply to `first`; the others are asked `hello`.

        Raises:
            WorkersFailed: the first one does not answer, or cannot work.
        """
        worker: _Worker | None = None
        try:
            worker = await self._spawn()
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._ask(worker, first)
        except (TimeoutError, WorkerDied, OSError) as error:
            if worker is not None:
                await self._kill(worker)
            log.error("%s worker does not start: %s", self._kind.name, error)
            raise self._no_worker() from None
        self._ready.add(worker)
        self._tasks = [asyncio.create_task(self._work(worker))]
        self._tasks += [asyncio.create_task(self._work(None)) for _ in range(1, self._limits.num_workers)]
        return reply

    async def ask(self, question: Q) -> R:
        """The reply to one question.

        Raises:
            PoolFull, WorkerTimeout, WorkerDied, WorkersFailed: there is none.
        """
        if len(self._jobs) >= self._limits.queue_size:
            raise PoolFull
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        job = _Job(question, reply)
        self._jobs[job] = None
        self._has_jobs.set()
        try:
            return await reply
        finally:
            self._jobs.pop(job, None)  # where its caller has gone before a worker took it

    def kill(self) -> None:
        """Ends all workers at once."""
        for worker in self._workers:
            worker.process.kill()

    async def stop(self) -> None:
        """Ends the workers; nothing waits for them any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in tuple(self._workers):
            await self._kill(worker)

    async def _work(self, worker: _Worker | None) -> None:
        while True:
            if worker is None:
                worker = await self._ready_worker()
            await self._wait_for_job()
            if worker.reader.at_eof():  # it has ended while it had nothing to do: no question's fault
                await self._replace(worker, "it ended while it was idle")
                worker = None
                continue
            job = self._next_job()
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    reply = await self._ask(worker, job.question)
            except (TimeoutError, WorkerDied) as error:
                fault = WorkerTimeout() if isinstance(error, TimeoutError) else error
                await self._replace(worker, "time over" if isinstance(fault, WorkerTimeout) else fault)
                worker = None
                if not job.reply.done():
                    job.reply.set_exception(fault)
                continue
            if not job.reply.done():
                job.reply.set_result(reply)

    async def _replace(self, worker: _Worker, why: object) -> None:
        """Ends a worker that no other question shall have; another one takes its turn."""
        self.kills += 1
        await self._kill(worker)
        log.warning("%s worker replaced: %s", self._kind.name, why)

    async def _ready_worker(self) -> _Worker:
        while True:
            worker: _Worker | None = None
            try:
                worker = await self._spawn()
                async with asyncio.timeout(START_TIMEOUT_S):
                    reply = await self._ask(worker, self._kind.hello)
                if self._kind.is_ready(reply):
                    self._ready.add(worker)
                    return worker
                log.error("%s worker refused to start: %s", self._kind.name, reply)
            except (TimeoutError, WorkerDied, OSError) as error:
                log.error("%s worker died at its start: %s", self._kind.name, error)
            if worker is not None:
                await self._kill(worker)
            if not self._ready:
                self._fail_waiting()
            await asyncio.sleep(RESPAWN_DELAY_S)

    async def _wait_for_job(self) -> None:
        while not self._jobs:
            self._has_jobs.clear()
            await self._has_jobs.wait()

    def _next_job(self) -> _Job[Q, R]:
        """The one that waits for longest, which waits no more."""
        job = next(iter(self._jobs))
        del self._jobs[job]
        return job

    def _fail_waiting(self) -> None:
        """No worker is there and none starts: nobody should wait for one."""
        while self._jobs:
            job = self._next_job()
            if not job.reply.done():
                job.reply.set_exception(self._no_worker())

    def _no_worker(self) -> WorkersFailed:
        return WorkersFailed(f"the {self._kind.name} worker does not start")

    async def _spawn(self) -> _Worker:
        """Raises OSError: it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = Child(self._kind.command, stdio=theirs)
        except OSError:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = _Worker(process, reader, writer)
        self._workers.add(worker)
        return worker

    async def _kill(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.writer.close()
        await worker.process.wait()
        self._workers.discard(worker)
        self._ready.discard(worker)

    async def _ask(self, worker: _Worker, question: Q) -> R:
        try:
            worker.writer.write(self._kind.frame(question))
            await worker.writer.drain()
            (size,) = HEADER.unpack(await worker.reader.readexactly(HEADER.size))
            if size > self._kind.max_reply_bytes:
                raise WorkerDied(f"a reply of {size} bytes")
            return self._kind.decode(await worker.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise WorkerDied(type(error).__name__) from error
