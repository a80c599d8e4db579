"""The open requests: what the engine made for each and its client has not been sent yet.

Who touches what: the engine's link puts tokens in, the call's handler takes messages out; both run on the event loop,
so there is no lock. What must hold: a request's buffer never exceeds its bound; a request leaves the table exactly
once; what arrives for a request that left is dropped.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from downcore.v1 import generation_pb2 as pb

from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front import chunk_wire
from daemon.front.ended import End, Ended
from daemon.front.limits import QueuedTokens
from daemon.front.metrics import RequestMeters
from daemon.front.text import TextStream, TokenTable
from daemon.front.trace_context import TraceContext
from daemon.front.wire_ids import wire_id

MAX_BUFFERED_BYTES = 1 << 20  # of one request, over its choices: far more than a client that reads lets pile up
ID_BYTES = 8  # what a token id counts for
_ENDS = {
    pb.FINISH_REASON_STOP: End.STOP, pb.FINISH_REASON_LENGTH: End.LENGTH, pb.FINISH_REASON_ABORTED: End.ABORTED
}  # fmt: skip


@dataclass(slots=True)
class Choice:
    """One answer: its text so far, and what is not sent yet."""

    index: int
    text: TextStream
    num_tokens: int = 0
    last_token_s: float | None = None
    new_text: list[str] = field(default_factory=list[str])
    new_ids: list[int] = field(default_factory=list[int])
    new_logprobs: list[bytes] = field(default_factory=list[bytes])  # serialised PositionLogprobs: small
    finished: pb.GenerateFinished | None = None
    finish_sent: bool = False


class OpenRequest:
    """One Generate call from its validation to its last message."""

    def __init__(self, request_id: str, owner: str, serial: int, arrived_s: float, meters: RequestMeters) -> None:
        self.request_id = request_id
        self.owner = owner  # the namespace of its caller, which alone knows it by its id
        # What the engine knows it by. A client may use an id again at once, and must not see the earlier one's tokens.
        self.wire_id = wire_id(request_id, serial)
        self.arrived_s = arrived_s  # these four by time.monotonic: the loop's own clock has whole milliseconds
        self.submitted_s = arrived_s
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.usage: messages.Usage | None = None
        self.error: RequestError | None = None
        self.write_began_s: float | None = None  # set while the client's transport takes a message
        self.handler: asyncio.Task[object] | None = None  # cancelled where its client does not read
        self.preparing: asyncio.Future[Any] | None = None  # set while workers have the prompt or the structure
        self.submitted = False
        self.queued: QueuedTokens | None = None  # of its caller's limit, until the prompt is computed
        self.principal = owner  # as the log names its caller
        self.trace: TraceContext | None = None
        self._meters = meters
        self.coalesces = True  # tokens that wait for the client go in one message
        self._whole: list[bytes] = []  # chunks that wait, where they do not
        self._loop = asyncio.get_running_loop()
        self._table = TokenTable(())
        self._min_tokens = 0
        self._choices: list[Choice] = []
        self._buffered_bytes = 0
        self._started_sent = False
        self._num_finish_sent = 0
        self._has_news = False  # something to send
        self._chunk_prefix = chunk_wire.request_id_field(request_id)
        self._waiter: asyncio.Future[None] | None = None

    def expect(self, n: int, stops: Sequence[str], min_tokens: int, table: TokenTable) -> None:
        """Says what the engine will send: `n` answers, whose text ends at any of `stops`."""
        self._table = table
        self._min_tokens = min_tokens
        self._choices = [Choice(i, TextStream(stops)) for i in range(n)]

    @property
    def num_unfinished(self) -> int:
        return sum(choice.finished is None for choice in self._choices)

    @property
    def is_waiting(self) -> bool:
        """Its handler is in `wait`, so that an error reaches it."""
        return self._waiter is not None

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def buffered_bytes(self) -> int:
        return self._buffered_bytes

    def start(self, usage: messages.Usage) -> None:
        """The prompt is computed."""
        self.usage = usage
        self._leave_queue()
        self._wake()

    def add(self, token: messages.Token, hide_text: bool, now_s: float) -> messages.StopSequence | None:
        """Takes one token. `hide_text` for the stop token that ends the answer.

        Returns: what to tell the engine, where the text has just reached a stop string.
        """
        choice = self._choices[token.index]
        if choice.finished is not None or self.error is not None:
            return None
        if choice.last_token_s is not None:
            self._meters.token_gap_s.observe(now_s - choice.last_token_s)
        elif self.first_token_s is None:
            self.first_token_s = now_s
            self._meters.first_token_s.observe(now_s - self.arrived_s)
        self.last_token_s = choice.last_token_s = now_s
        choice.num_tokens += 1
        if choice.new_ids and not self.coalesces:
            self._whole.append(self._chunk(choice))
        choice.new_ids.append(token.token_id)
        size = ID_BYTES
        if token.chosen is not None:
            position = self._position(token, token.chosen).SerializeToString()
            choice.new_logprobs.append(position)
            size += len(position)
        if not hide_text:
            text = choice.text.add(self._table[token.token_id], may_stop=choice.num_tokens >= self._min_tokens)
            if text:
                choice.new_text.append(text)
                size += len(text)
        self._buffered_bytes += size
        self._wake()
        if self._buffered_bytes > MAX_BUFFERED_BYTES:
            self.fail(RequestError(ErrorReason.READER_STALLED, "the client reads too slowly"))
            return None
        if choice.text.stop is None:
            return None
        self._end(choice, pb.FINISH_REASON_STOP, stop_string=choice.text.stop)
        return self._stop(choice)

    def finish(self, finished: messages.Finished) -> None:
        """The engine ended one choice."""
        choice = self._choices[finished.index]
        if choice.finished is not None:
            return
        if finished.reason is messages.StopReason.STOP_TOKEN:
            self._end(choice, pb.FINISH_REASON_STOP, stop_token_id=finished.stop_token_id)
        elif finished.reason is messages.StopReason.LENGTH:
            self._end(choice, pb.FINISH_REASON_LENGTH)
        else:
            self._end(choice, pb.FINISH_REASON_ABORTED)

    def abort(self, indexes: Iterable[int] | None = None) -> list[messages.StopSequence]:
        """Ends these choices, or all, as aborted. Returns: what ends each of them in an engine that has the request."""
        ended: list[messages.StopSequence] = []
        chosen = set(indexes) if indexes is not None else None
        for choice in self._choices:
            if choice.finished is None and (chosen is None or choice.index in chosen):
                self._end(choice, pb.FINISH_REASON_ABORTED)
                ended.append(self._stop(choice))
        if self.preparing is not None and not self.num_unfinished:
            self.preparing.cancel()
        return ended

    def stops(self) -> list[messages.StopSequence]:
        """What ends, in an engine that has just been given the request, the choices that have ended already."""
        return [self._stop(choice) for choice in self._choices if choice.finished is not None]

    def fail(self, error: RequestError) -> None:
        """The whole request failed. The first error counts, and what was not sent yet is dropped."""
        if self.error is None:
            self.error = error
            self._drop()
        self._wake()

    async def wait(self) -> None:
        """Returns once there is something to send, or nothing more will come.

        Raises:
            RequestError: the request failed.
        """
        if self.error is None and not self._has_news:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None:
            raise self.error

    def take(self, model: str, seed: int) -> list[pb.GenerateResponse | bytes]:
        """What is to be sent now, at most one chunk for each choice, in the order that the protocol promises.

        A chunk, the commonest message by far, comes as the bytes of its GenerateResponse.
        """
        responses: list[pb.GenerateResponse | bytes] = []
        if self.usage is not None and not self._started_sent:
            self._started_sent = True
            started = pb.GenerateStarted(
                prompt_tokens=self.usage.prompt_tokens, cached_tokens=cached_tokens(self.usage), seed=seed, model=model
            )
            responses.append(pb.GenerateResponse(request_id=self.request_id, started=started))
        if self._whole:
            responses += self._whole
            self._whole.clear()
        for choice in self._choices:
            if choice.new_ids or choice.new_text:
                responses.append(self._chunk(choice))
            if choice.finished is not None and not choice.finish_sent:
                choice.finish_sent = True
                self._num_finish_sent += 1
                responses.append(pb.GenerateResponse(request_id=self.request_id, finished=choice.finished))
        self._buffered_bytes = 0
        self._has_news = False
        return responses

    @property
    def all_sent(self) -> bool:
        """Every choice has ended and the client has been told."""
        return self._num_finish_sent == len(self._choices)

    def ended(self, now_s: float) -> Ended:
        """What became of it, for those who keep count. It is over, and nothing of it is given back yet."""
        other = End.CANCELLED if self.error is None else End.FAILED
        ends = tuple(_ENDS[c.finished.reason] if c.finished is not None else other for c in self._choices)
        return Ended(
            self.request_id, self.principal, self.trace, ends, self.error.reason if self.error is not None else None,
            self.usage, self.completion_tokens, self.arrived_s, self.submitted_s if self.submitted else None,
            self.first_token_s, self.last_token_s, now_s,
        )  # fmt: skip

    def close(self) -> None:
        """Gives back what the request holds. The table calls it once."""
        self._leave_queue()
        self._drop()
        self._choices = []
        self.handler = None

    def _stop(self, choice: Choice) -> messages.StopSequence:
        return messages.StopSequence(self.wire_id, choice.index, choice.num_tokens)

    def _chunk(self, choice: Choice) -> bytes:
        """The bytes of a GenerateResponse."""
        texts = choice.new_text
        text = texts[0] if len(texts) == 1 else "".join(texts)
        body = chunk_wire.chunk_field(choice.index, text, choice.new_ids, choice.new_logprobs)
        texts.clear()
        choice.new_ids.clear()
        choice.new_logprobs.clear()
        return self._chunk_prefix + body

    def _position(self, token: messages.Token, chosen: float) -> pb.PositionLogprobs:
        return pb.PositionLogprobs(
            chosen=self._logprob(token.token_id, chosen),
            top=[self._logprob(top.token_id, top.logprob) for top in token.top],
        )

    def _logprob(self, token_id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, token=self._table[token_id])

    def _end(
        self,
        choice: Choice,
        reason: pb.FinishReason,
        *,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        rest = choice.text.finish()
        if rest:
            choice.new_text.append(rest)
        choice.finished = pb.GenerateFinished(
            index=choice.index, reason=reason, completion_tokens=choice.num_tokens,
            stop_string=stop_string, stop_token_id=stop_token_id,
        )  # fmt: skip
        self._wake()

    def _wake(self) -> None:
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave_queue(self) -> None:
        if self.queued is not None:
            self.queued.release()
            self.queued = None

    def _drop(self) -> None:
        for choice in self._choices:
            choice.new_ids.clear()
            choice.new_text.clear()
            choice.new_logprobs.clear()
        self._whole.clear()
        self._buffered_bytes = 0


def cached_tokens(usage: messages.Usage) -> pb.CachedTokens:
    """How many prompt tokens each tier gave."""
    return pb.CachedTokens(device=usage.cached_device, host=usage.cached_host, disk=usage.cached_disk)


class RequestTable:
    """The open requests by owner and id, so that no caller meets another's. At most `max_open`; none while draining."""

    def __init__(
        self, max_open: int, observers: Sequence[Callable[[Ended], None]] = (), *, coalesces: bool = True
    ) -> None:
        assert max_open > 0
        self._max_open = max_open
        self._coalesces = coalesces
        self.meters = RequestMeters()
        self._observers = (self.meters.request_ended, *observers)  # told of each that has left
        self._by_id: dict[tuple[str, str], OpenRequest] = {}
        self._by_wire_id: dict[str, OpenRequest] = {}
        self.find_wire: Callable[[str], OpenRequest | None] = self._by_wire_id.get  # once a token: found at once
        self._serial = 0
        self._idle_waiters: deque[asyncio.Future[None]] = deque()
        self.draining = False

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Over those open now; ending them on the way is allowed."""
        return iter(tuple(self._by_id.values()))

    def check_open(self) -> None:
        """Raises RequestError where new work is refused."""
        if self.draining:
            raise RequestError(ErrorReason.DRAINING, "the server is draining and takes no new work")

    def open(self, request_id: str, owner: str, arrived_s: float) -> OpenRequest:
        """Adds a request; an empty id is given a fresh one.

        Raises:
            RequestError: draining, too many are open, or the owner has one of this id.
        """
        self.check_open()
        if len(self._by_id) >= self._max_open:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{self._max_open} requests are open, which is the limit")
        if (owner, request_id) in self._by_id:
            raise RequestError(ErrorReason.DUPLICATE_REQUEST_ID, "a request of this id is open", field="request_id")
        self._serial += 1
        name = request_id or f"r-{self._serial}"
        while (owner, name) in self._by_id:
            self._serial += 1
            name = f"r-{self._serial}"
        request = OpenRequest(name, owner, self._serial, arrived_s, self.meters)
        request.coalesces = self._coalesces
        self._by_id[owner, name] = request
        self._by_wire_id[request.wire_id] = request
        return request

    def close(self, request: OpenRequest) -> None:
        """Removes a request that `open` gave."""
        del self._by_id[request.owner, request.request_id]
        del self._by_wire_id[request.wire_id]
        ended = request.ended(time.monotonic())
        request.close()
        for observe in self._observers:
            observe(ended)
        if not self._by_id:
            while self._idle_waiters:
                waiter = self._idle_waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)

    def find(self, request_id: str, owner: str) -> OpenRequest | None:
        return self._by_id.get((owner, request_id))

    def find_all(self, request_id: str) -> list[OpenRequest]:
        """Those of this id, whoever owns them: for operators."""
        return [request for request in self._by_id.values() if request.request_id == request_id]

    def fail_submitted(self, error: RequestError) -> int:
        """Fails every request that the engine has. Returns: how many."""
        failed = [request for request in self._by_id.values() if request.submitted]
        for request in failed:
            request.fail(error)
        return len(failed)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open. Returns: whether that is so."""
        if self._by_id and timeout_s > 0:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait((waiter,), timeout=timeout_s)
            waiter.cancel()
        return not self._by_id

    def check(self) -> None:
        """Raises AssertionError where the two indexes differ or a buffer is over its bound."""
        assert len(self._by_id) == len(self._by_wire_id)
        for request in self._by_id.values():
            assert self._by_wire_id[request.wire_id] is request
            assert request.buffered_bytes <= MAX_BUFFERED_BYTES
