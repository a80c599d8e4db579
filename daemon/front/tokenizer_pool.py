"""Tokenizer workers: what a model folder brings, its vocabulary and its chat template, runs in them alone.

What must hold: a prompt is tokenized within its time or fails, whatever the template does with it.
"""

import sys

from daemon.errors import ErrorReason, RequestError
from daemon.front import tokenizer_messages as tm
from daemon.front.text import TokenTable
from daemon.front.worker_pool import (
    PoolFull,
    PoolLimits,
    WorkerDied,
    WorkerKind,
    WorkerPool,
    WorkersFailed,
    WorkerTimeout,
)


class TokenizerFailed(Exception):
    """The model folder's tokenizer cannot be used."""


class TokenizerPool:
    """Answers questions through `num_workers` processes for one model folder."""

    def __init__(self, model_path: str, num_workers: int, queue_size: int, timeout_s: float) -> None:
        kind: WorkerKind[tm.Question, tm.Reply] = WorkerKind(
            name="tokenizer",
            command=(sys.executable, "-m", "daemon.front.tokenizer_worker", "--model", model_path),
            frame=tm.frame,
            decode=tm.reply_decoder.decode,
            max_reply_bytes=tm.MAX_REPLY_BYTES,
            hello=tm.EncodeText(""),
            is_ready=lambda reply: isinstance(reply, tm.Encoded),
        )
        self._pool = WorkerPool(kind, PoolLimits(num_workers, queue_size, timeout_s))

    @property
    def kills(self) -> int:
        """Workers that had to be killed."""
        return self._pool.kills

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that there are now."""
        return self._pool.pids

    async def start(self) -> TokenTable:
        """Starts the workers. Returns: the bytes of every token.

        Raises:
            TokenizerFailed: the folder has no tokenizer that works.
        """
        try:
            reply = await self._pool.start(tm.GetTable())
        except WorkersFailed as error:
            raise TokenizerFailed(str(error)) from None
        if not isinstance(reply, tm.Table):
            await self._pool.stop()
            raise TokenizerFailed(reply.message if isinstance(reply, tm.Failed) else "no token table came")
        return TokenTable(reply.tokens)

    async def encode(self, question: tm.EncodeText | tm.EncodeChat, field: str) -> bytes:
        """Token ids, little-endian int32.

        Raises:
            RequestError: the queue is full, the time is over, or the question has no answer; it names `field`.
        """
        try:
            reply = await self._pool.ask(question)
        except PoolFull:
            raise RequestError(ErrorReason.QUEUE_FULL, "too many prompts wait for a tokenizer") from None
        except WorkerTimeout:
            text = "took too long to render and tokenize"
            raise RequestError(ErrorReason.TOKENIZER_TIMEOUT, text, field=field) from None
        except WorkerDied:
            raise RequestError(ErrorReason.INTERNAL, "the tokenizer died on this prompt", field=field) from None
        except WorkersFailed as error:
            raise RequestError(ErrorReason.INTERNAL, str(error)) from None
        if isinstance(reply, tm.Failed):
            reason = ErrorReason.TOO_LARGE if reply.too_large else ErrorReason.INVALID_ARGUMENT
            raise RequestError(reason, reply.message, field=field)
        assert isinstance(reply, tm.Encoded)
        return reply.ids

    def kill(self) -> None:
        """Ends all workers at once."""
        self._pool.kill()

    async def stop(self) -> None:
        """Ends the workers; nothing waits for them any more."""
        await self._pool.stop()
