"""Tokenizer workers: a few processes, one question at a time each, killed and replaced where one takes too long.

What must hold: a question ends within its time, whatever the model folder's template does with it; a question that
hangs or kills its worker fails alone; the queue before the workers is bounded.
"""

import asyncio
import logging
import socket
import sys
from dataclasses import dataclass

from daemon.errors import ErrorReason, RequestError
from daemon.front import tokenizer_messages as tm
from daemon.front.child import Child
from daemon.front.text import TokenTable
from daemon.messages import HEADER

log = logging.getLogger("downcore.front")

START_TIMEOUT_S = 120.0  # reading a large vocabulary on a busy machine
RESPAWN_DELAY_S = 0.2


class TokenizerFailed(Exception):
    """The model folder's tokenizer cannot be used."""


class _WorkerDied(Exception):
    """A worker ended in the middle of a question."""


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process and the socket that is its standard input and output."""

    process: Child
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class _Job:
    question: tm.Question
    field: str  # of the request, to be named where the question is at fault
    reply: "asyncio.Future[tm.Reply]"


class TokenizerPool:
    """Answers questions through `num_workers` processes for one model folder."""

    def __init__(self, model_path: str, num_workers: int, queue_size: int, timeout_s: float) -> None:
        self._command = (sys.executable, "-m", "daemon.front.tokenizer_worker", "--model", model_path)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(queue_size)
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self.kills = 0  # workers that had to be killed

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that there are now."""
        return tuple(worker.process.pid for worker in self._workers)

    async def start(self) -> TokenTable:
        """Starts the workers. Returns: the bytes of every token.

        Raises:
            TokenizerFailed: the folder has no tokenizer that works.
        """
        worker = await self._spawn()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await _ask(worker, tm.GetTable())
        except (TimeoutError, _WorkerDied):
            await self._kill(worker)
            raise TokenizerFailed("the tokenizer worker does not start") from None
        if not isinstance(reply, tm.Table):
            await self._kill(worker)
            raise TokenizerFailed(reply.message if isinstance(reply, tm.Failed) else "no token table came")
        self._tasks = [asyncio.create_task(self._work(worker))]
        self._tasks += [asyncio.create_task(self._work(None)) for _ in range(1, self._num_workers)]
        return TokenTable(reply.tokens)

    async def encode(self, question: tm.EncodeText | tm.EncodeChat, field: str) -> bytes:
        """Token ids, little-endian int32.

        Raises:
            RequestError: the queue is full, the time is over, or the question has no answer; it names `field`.
        """
        job = _Job(question, field, asyncio.get_running_loop().create_future())
        try:
            self._jobs.put_nowait(job)
        except asyncio.QueueFull:
            raise RequestError(ErrorReason.QUEUE_FULL, "too many prompts wait for a tokenizer") from None
        reply = await job.reply
        if isinstance(reply, tm.Failed):
            reason = ErrorReason.TOO_LARGE if reply.too_large else ErrorReason.INVALID_ARGUMENT
            raise RequestError(reason, reply.message, field=field)
        assert isinstance(reply, tm.Encoded)
        return reply.ids

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
            job = await self._jobs.get()
            if job.reply.done():  # its caller has gone
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await _ask(worker, job.question)
            except (TimeoutError, _WorkerDied) as error:
                self.kills += 1
                await self._kill(worker)
                worker = None
                if not job.reply.done():
                    job.reply.set_exception(_fault(error, job.field))
                log.warning("tokenizer worker replaced: %s", "time over" if isinstance(error, TimeoutError) else error)
                continue
            if not job.reply.done():
                job.reply.set_result(reply)

    async def _ready_worker(self) -> _Worker:
        """A worker that has loaded its vocabulary, so that this does not count as a question's time."""
        while True:
            worker = await self._spawn()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    reply = await _ask(worker, tm.EncodeText(""))
                if isinstance(reply, tm.Encoded):
                    return worker
                log.error("tokenizer worker refused to start: %s", reply)
            except (TimeoutError, _WorkerDied) as error:
                log.error("tokenizer worker died at its start: %s", error)
            await self._kill(worker)
            await asyncio.sleep(RESPAWN_DELAY_S)

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = Child(self._command, stdio=theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = _Worker(process, reader, writer)
        self._workers.add(worker)
        return worker

    async def _kill(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.writer.close()
        await worker.process.wait()
        self._workers.discard(worker)


def _fault(error: Exception, field: str) -> RequestError:
    if isinstance(error, TimeoutError):
        return RequestError(ErrorReason.TOKENIZER_TIMEOUT, "took too long to render and tokenize", field=field)
    return RequestError(ErrorReason.INTERNAL, "the tokenizer died on this prompt", field=field)


async def _ask(worker: _Worker, question: tm.Question) -> tm.Reply:
    try:
        worker.writer.write(tm.frame(question))
        await worker.writer.drain()
        (size,) = HEADER.unpack(await worker.reader.readexactly(HEADER.size))
        if size > tm.MAX_REPLY_BYTES:
            raise _WorkerDied(f"a reply of {size} bytes")
        return tm.reply_decoder.decode(await worker.reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        raise _WorkerDied(type(error).__name__) from error
