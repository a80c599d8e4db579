"""Structures as requests carry them, and the grammars that the engine takes: checked in workers, kept for a while.

What must hold: a structure that hangs or kills its worker fails alone, and names its field; what one namespace has had
checked is no quicker for another; nothing is started before the first structure comes.
"""

import asyncio
import sys
from collections import OrderedDict
from hashlib import blake2b

import msgspec
from downcore.v1 import generation_pb2 as pb

from daemon.errors import ErrorReason, RequestError
from daemon.front import grammar_messages as gm
from daemon.front.config import FrontConfig
from daemon.front.worker_pool import (
    PoolFull,
    PoolLimits,
    WorkerDied,
    WorkerKind,
    WorkerPool,
    WorkersFailed,
    WorkerTimeout,
)

FIELD = "structured_output"
QUEUE_SIZE = 256  # structures that wait for a worker
MAX_KEPT = 512  # checked structures
MAX_KEPT_BYTES = 8 << 20

Pool = WorkerPool[gm.Question, gm.Reply]


class Grammars:
    """Checks structures through `grammar_workers` processes."""

    def __init__(self, config: FrontConfig) -> None:
        self._config = config
        self._pool: Pool | None = None
        self._starting: asyncio.Future[gm.Reply] | None = None
        self._kept: OrderedDict[bytes, gm.Checked | gm.Failed] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kills(self) -> int:
        """Workers that had to be killed."""
        return self._pool.kills if self._pool is not None else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that there are now."""
        return self._pool.pids if self._pool is not None else ()

    async def check(self, structured: pb.StructuredOutput, namespace: str, eos_token_ids: tuple[int, ...]) -> str:
        """The grammar of a structure that has one of its forms.

        Raises:
            RequestError: it is wrong, too large or too deep, took too long, or too many wait. It names the field.
        """
        form = structured.WhichOneof("structure")
        assert form is not None
        question = gm.Check(gm.Structure(form), _texts(structured))
        key = blake2b(msgspec.msgpack.encode((namespace, question)), digest_size=32).digest()
        known = self._kept.get(key)
        if known is None:
            known = await self._ask(question, eos_token_ids)
            self._keep(key, known)
        else:
            self._kept.move_to_end(key)
        if isinstance(known, gm.Failed):
            raise RequestError(ErrorReason.INVALID_ARGUMENT, known.message, field=f"{FIELD}.{form}")
        return known.grammar

    def kill(self) -> None:
        """Ends all workers at once."""
        if self._pool is not None:
            self._pool.kill()

    async def stop(self) -> None:
        """Ends the workers; nothing waits for them any more."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        if self._pool is not None:
            await self._pool.stop()

    async def _ask(self, question: gm.Check, eos_token_ids: tuple[int, ...]) -> gm.Checked | gm.Failed:
        field = f"{FIELD}.{question.structure}"
        pool = await self._ready_pool(eos_token_ids)
        try:
            reply = await pool.ask(question)
        except PoolFull:
            raise RequestError(ErrorReason.QUEUE_FULL, "too many structures wait to be checked") from None
        except WorkerTimeout:
            text = f"takes longer than {self._config.grammar_timeout_s:g} s to check: it is too complex"
            raise RequestError(ErrorReason.INVALID_ARGUMENT, text, field=field) from None
        except WorkerDied:
            text = "is nested too deeply, or needs too much memory"
            raise RequestError(ErrorReason.INVALID_ARGUMENT, text, field=field) from None
        except WorkersFailed as error:
            raise RequestError(ErrorReason.INTERNAL, str(error)) from None
        assert isinstance(reply, gm.Checked | gm.Failed)
        return reply

    async def _ready_pool(self, eos_token_ids: tuple[int, ...]) -> Pool:
        if self._pool is None:
            self._pool = self._make_pool(eos_token_ids)
        if self._starting is None:
            self._starting = asyncio.ensure_future(_start(self._pool))
        try:
            reply = await asyncio.shield(self._starting)
        except WorkersFailed as error:
            self._starting = None
            raise RequestError(ErrorReason.INTERNAL, str(error)) from None
        if isinstance(reply, gm.Failed):
            text = f"this server cannot follow structures: {reply.message}"
            raise RequestError(ErrorReason.INVALID_ARGUMENT, text, field=FIELD)
        return self._pool

    def _make_pool(self, eos_token_ids: tuple[int, ...]) -> Pool:
        config = self._config
        kind: WorkerKind[gm.Question, gm.Reply] = WorkerKind(
            name="grammar",
            command=(
                *(sys.executable, "-m", "daemon.front.grammar_worker"),
                *("--model", config.engine.model_path),
                *("--eos", ",".join(map(str, eos_token_ids))),
                *("--timeout-s", str(config.grammar_timeout_s)),
            ),
            frame=gm.frame,
            decode=gm.reply_decoder.decode,
            max_reply_bytes=gm.MAX_REPLY_BYTES,
            hello=gm.Hello(),
            is_ready=lambda reply: isinstance(reply, gm.Loaded),
        )
        return WorkerPool(kind, PoolLimits(config.grammar_workers, QUEUE_SIZE, config.grammar_timeout_s))

    def _keep(self, key: bytes, reply: gm.Checked | gm.Failed) -> None:
        replaced = self._kept.pop(key, None)
        self._kept_bytes += _size(reply) - (_size(replaced) if replaced is not None else 0)
        self._kept[key] = reply
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= _size(oldest)


async def _start(pool: Pool) -> gm.Reply:
    """The first worker's reply; where that has no use for this model, there are no workers after it."""
    reply = await pool.start(gm.Hello())
    if isinstance(reply, gm.Failed):
        await pool.stop()  # else they would be started again and again
    return reply


def _texts(structured: pb.StructuredOutput) -> tuple[str, ...]:
    match structured.WhichOneof("structure"):
        case "json_schema":
            return (structured.json_schema,)
        case "regex":
            return (structured.regex,)
        case "grammar":
            return (structured.grammar,)
        case "choice":
            return tuple(structured.choice.values)
        case _:
            return ()


def _size(reply: gm.Checked | gm.Failed) -> int:
    """Its characters: near enough to what it takes."""
    return len(reply.grammar) if isinstance(reply, gm.Checked) else len(reply.message)
