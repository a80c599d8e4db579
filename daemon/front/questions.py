"""The questions to the engine that are open, and their answers.

What must hold: a question leaves exactly once, with its answer, its refusal, its time limit or the engine's death; an
answer to one that left is dropped; progress never piles up, the latest replaces what was not read.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason, RequestError

MAX_QUESTIONS = 64  # open at a time
MAX_LONG = 4  # of them, those without a time limit: each keeps a tier busy

Asked = (
    messages.Query | cm.Lookup | cm.PinPrefix | cm.UnpinPrefix | cm.EvictPrefix | cm.ListPrefixes
    | cm.Flush | cm.Verify | cm.SetQuota | cm.RemoveQuota | cm.ListQuotas
)  # fmt: skip
Final = (
    messages.Answer | cm.LookupAnswer | cm.PrefixAnswer | cm.Evicted | cm.PrefixList
    | cm.Flushed | cm.VerifyDone | cm.QuotaList
)  # fmt: skip
A = TypeVar("A", bound=Final)


@dataclass(slots=True, eq=False)
class _Open:
    """A question on its way."""

    final: "asyncio.Future[Final]"
    progress: cm.VerifyProgress | None = None  # not read yet
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Questions:
    """Asks through `send`, is told through `receive`."""

    def __init__(self, send: Callable[[messages.ToEngine], None]) -> None:
        self._send = send
        self._open: dict[int, _Open] = {}
        self._num_long = 0
        self._last_id = 0

    async def ask(self, make: Callable[[int], Asked], kind: type[A], timeout_s: float | None) -> A:
        """Sends the question that `make` makes of a fresh id.

        Args:
            kind: of the answer.
            timeout_s: None for what may take long: then it is cancelled in the engine when its caller is.

        Raises:
            RequestError: refused, no answer in time, the engine died, or too many questions are open.
        """
        query_id, asked = self._add(is_long=timeout_s is None)
        try:
            self._send(make(query_id))
            async with asyncio.timeout(timeout_s):
                answer = await asked.final
        except TimeoutError:
            raise RequestError(ErrorReason.ENGINE_UNAVAILABLE, "the engine did not answer in time") from None
        finally:
            self._remove(query_id, is_long=timeout_s is None)
        assert isinstance(answer, kind), f"{type(answer).__name__} instead of {kind.__name__}"
        return answer

    async def verify(self, tier: cm.TierName) -> AsyncGenerator[cm.VerifyProgress | cm.VerifyDone]:
        """Sends a Verify; gives its progress, and in the end its report. Closing the generator cancels it.

        Raises:
            RequestError: as `ask`.
        """
        query_id, asked = self._add(is_long=True)
        try:
            self._send(cm.Verify(query_id, tier))
            while not asked.final.done():
                await asked.changed.wait()
                asked.changed.clear()
                if asked.progress is not None:
                    progress, asked.progress = asked.progress, None
                    yield progress
            done = asked.final.result()
            assert isinstance(done, cm.VerifyDone)
            yield done
        finally:
            self._remove(query_id, is_long=True)

    def receive(self, answer: Final | cm.Refused | cm.VerifyProgress) -> None:
        """Takes what the engine sent."""
        asked = self._open.get(answer.query_id)
        if asked is None or asked.final.done():
            return
        match answer:
            case cm.VerifyProgress():
                asked.progress = answer
            case cm.Refused():
                error = RequestError(
                    answer.reason, answer.message, field=answer.field, retry_after_s=answer.retry_after_s
                )
                asked.final.set_exception(error)
            case _:
                asked.final.set_result(answer)
        asked.changed.set()

    def fail(self, error: RequestError) -> None:
        """The engine is gone: no answer will come."""
        for asked in self._open.values():
            if not asked.final.done():
                asked.final.set_exception(error)
                asked.changed.set()

    def _add(self, *, is_long: bool) -> tuple[int, _Open]:
        if len(self._open) >= MAX_QUESTIONS:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_QUESTIONS} questions to the engine are open")
        if is_long and self._num_long >= MAX_LONG:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_LONG} tiers are being verified or flushed already")
        self._last_id += 1
        self._num_long += is_long
        asked = self._open[self._last_id] = _Open(asyncio.get_running_loop().create_future())
        return self._last_id, asked

    def _remove(self, query_id: int, *, is_long: bool) -> None:
        asked = self._open.pop(query_id)
        self._num_long -= is_long
        if asked.final.cancel() or asked.final.cancelled():  # the latter with whoever awaited it
            if is_long:
                self._send(cm.Cancel(query_id))
        else:
            asked.final.exception()  # asyncio complains of an exception that nobody looked at
