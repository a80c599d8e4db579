"""The engine: plan what runs, run it, commit what came of it. One thread touches everything here.

It speaks through `send` and is told through `handle`; `step` does one turn. Whatever a sequence holds is in its
Resources, and `_end` is the one way out for a choice: finish, cancel, deadline, error and shutdown all take it.
"""

import logging
from collections.abc import Callable
from functools import partial, singledispatchmethod
from pathlib import Path

import torch

from daemon.cache_messages import Warm
from daemon.config import EngineConfig
from daemon.engine.answers import answer
from daemon.engine.decode_step import Decoded
from daemon.engine.faults import end_if_sticky
from daemon.engine.flight import Flights
from daemon.engine.grammar_builder import GrammarBuilder
from daemon.engine.prefill import Prefill
from daemon.engine.questions import Question, Questions
from daemon.engine.quotas import Quotas
from daemon.engine.rate import PrefillRate
from daemon.engine.refusals import Asked, refusal
from daemon.engine.runner import Runner
from daemon.engine.sampler import Drawn, Sampler
from daemon.engine.scheduler import Scheduler
from daemon.engine.sequence import Request, Sequence, SequenceState
from daemon.engine.tiers import make_sources, make_tuner, may_stream
from daemon.engine.warming import Warming
from daemon.errors import ErrorReason
from daemon.grammar import load_tokenizer
from daemon.layers.steps import HostStageError
from daemon.messages import (
    Abort,
    Configure,
    Finished,
    Query,
    Rejected,
    Shutdown,
    Started,
    StepOutput,
    StopReason,
    StopSequence,
    Submit,
    ToEngine,
    ToFront,
    Token,
)
from daemon.models.base import Model
from tiers.cache import TieredCache
from tiers.match import Match
from tiers.pools import DevicePools
from tiers.prefixes import Prefixes
from tiers.resources import ReleaseError, Resources

log = logging.getLogger("downcore.engine")


class Engine:
    """Owns the pools, the books, the scheduler and every request.

    Args:
        send: takes each message for the front.
        clock: seconds that only grow.
        unix_clock: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: Model,
        pools: DevicePools,
        cache: TieredCache,
        send: Callable[[ToFront], None],
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.model = model
        self.pools = pools
        self.cache = cache
        self.device = device = cache.device
        self.rate = PrefillRate()
        self.tuning = make_tuner(config, cache)
        self.scheduler = Scheduler(cache, config, streams=may_stream(config, model))
        (shadow_slot,) = device.slots.take(1)
        device.reserved_slots.append(shadow_slot)
        self.runner = Runner(model, pools, shadow_slot, make_sources(cache, pools), replays=config.replay)
        self.prefill = Prefill(
            pools=pools, cache=cache, scheduler=self.scheduler, runner=self.runner, rate=self.rate,
            tuning=self.tuning, slice_s=config.slice_ms / 1000,
        )  # fmt: skip
        self.prefixes = Prefixes(cache)
        quotas = Quotas(self.prefixes)
        self.questions = Questions(self.prefixes, quotas, self.rate, send)
        self.warming = Warming(cache, self.prefixes, quotas.pin_refusal, send)
        self.sampler = Sampler(model.facts.eos_token_ids)
        self.flights = Flights(self.runner, self.sampler, self.scheduler)
        load = partial(load_tokenizer, Path(config.model_path), model.facts.eos_token_ids)
        self.grammars = GrammarBuilder(load, cache.mover.wake)
        self.send = send
        self.clock = clock
        self.unix_clock = unix_clock
        self.max_context_tokens = min(
            config.max_context_tokens or model.facts.max_context_tokens, model.facts.max_context_tokens
        )
        self.requests: dict[str, list[Sequence]] = {}  # choices that have not ended, by request id
        self.steps = 0
        self.is_stopping = False
        self._arrivals = 0
        self._tokens: list[Token] = []
        self._finished: list[Finished] = []

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def step(self) -> None:
        """One turn: decode rows for everyone past the prompt, then a slice of one prompt's chunk."""
        landed = self.flights.land()
        if landed is not None:
            self._commit_decode(landed.sequences, landed.decoded)
            self.flights.settle()
        now, unix_s = self.clock(), self.unix_clock()
        is_busy = bool(self.scheduler.running) and not self.warming.writing and not self.questions.flushes
        self.cache.poll(now, unix_s, is_busy=is_busy)
        self.warming.poll(now, unix_s)
        self.questions.poll(unix_s)
        self._expire(now)
        for admitted in self.scheduler.admit(now):
            if admitted.match is not None and admitted.sequence.is_running:  # not if a choice before it ended both
                self._begin(admitted.sequence, admitted.match, now)
        self._refuse_stuck()
        chunk = self.prefill.chunk
        plan, preempted = self.scheduler.plan(chunk.sequence if chunk else None, decodes=not self.flights.is_flying)
        for sequence in preempted:
            log.info("preempted %s after %d tokens", sequence.id, len(sequence.token_ids))
        if plan.decode:
            run = self.flights.start if self.flights.takes else self._decode
            run(plan.decode)
        if plan.prefill is not None and plan.prefill.is_running:
            self._advance_prefill(plan.prefill)
        self._flush()
        self.steps += 1

    @singledispatchmethod
    def handle(self, message: ToEngine) -> None:
        """Takes one message from the front."""
        raise AssertionError(f"unexpected message {type(message).__name__}")

    @handle.register
    def _(self, message: Submit) -> None:
        self._take(message, None)

    @handle.register
    def _(self, message: Warm) -> None:
        refusal = self.warming.refusal(message)
        if refusal is not None:
            self.send(refusal)
        else:
            self._take(self.warming.submit_for(message), message)

    def _take(self, message: Submit, warm: Warm | None) -> None:
        """Queues a request, or says why it can never run or not now."""
        prompt_ids = list(memoryview(message.prompt_ids).cast("i"))
        max_len = min(len(prompt_ids) + message.max_tokens, self.max_context_tokens)
        asked = Asked(len(prompt_ids), max_len, self.max_context_tokens, message.n, warm is not None)
        request_id = message.request_id
        if refused := refusal(self.scheduler, asked):
            self.send(Rejected(request_id, refused.reason, refused.message, retry_after_s=refused.retry_after_s))
        elif request_id in self.requests or request_id in self.warming.writing:
            self.send(Rejected(request_id, ErrorReason.DUPLICATE_REQUEST_ID, "a request with this id is open"))
        else:
            now = self.clock()
            text = message.grammar
            request = Request(
                submit=message, prompt_ids=prompt_ids, order=self._arrivals, arrived=now, max_len=max_len, warm=warm,
                deadline=None if message.deadline_s is None else now + message.deadline_s,
                grammar=None if text is None else self.grammars.build(text, message.namespace),
            )  # fmt: skip
            self._arrivals += 1
            lead = self.scheduler.enqueue(request)
            self.requests[request.id] = [lead, *lead.siblings]

    @handle.register
    def _(self, message: Abort) -> None:
        if self.warming.abort(message.request_id):
            return
        for sequence in list(self.requests.get(message.request_id, ())):
            if sequence.request.warm is not None:
                self._end(sequence)
            elif message.index is None:
                self._finish(sequence, StopReason.ABORTED)
            elif sequence.index == message.index:
                self._stop_choice(sequence, StopReason.ABORTED, sequence.num_generated)
        self._flush()

    @handle.register
    def _(self, message: StopSequence) -> None:
        for sequence in list(self.requests.get(message.request_id, ())):
            if sequence.index == message.index:
                self._stop_choice(sequence, StopReason.STOP_STRING, message.num_tokens)
        self._flush()

    @handle.register(Question)
    def _(self, message: Question) -> None:
        self.questions.ask(message, self.unix_clock())

    @handle.register
    def _(self, message: Query) -> None:
        self.send(answer(self, message))

    @handle.register
    def _(self, message: Shutdown) -> None:
        for request_id in list(self.requests):
            self.handle(Abort(request_id))
        self.is_stopping = True

    @handle.register
    def _(self, message: Configure) -> None:
        raise AssertionError("an engine is configured once")

    @property
    def has_work(self) -> bool:
        """A step would do something, or somebody waits for what transfers lead to."""
        is_awaited = bool(self.warming.writing) or self.questions.is_awaited
        return not self.is_idle or self.flights.is_flying or not self.cache.is_settled or is_awaited

    def keep_time(self) -> None:
        """Ends what has a time to end. Called now and then, also while nothing else happens."""
        self.questions.poll(self.unix_clock())

    def close(self) -> None:
        """Ends all transfers. What the lower tiers have committed stays; nothing is computed after this."""
        self.flights.close()
        self.questions.close()
        self.grammars.close()
        self.cache.close()

    @property
    def only_waits(self) -> bool:
        """Nothing can be computed until a transfer ends or a grammar is built: whoever turns the loop may sleep."""
        return self.scheduler.only_waits and (self.cache.holds_device or self.scheduler.awaits_grammar)

    def owners(self) -> list[Resources]:
        """Everyone who may hold something in some tier."""
        return [s.resources for s in self.scheduler.sequences()] + self.scheduler.swapped() + self.cache.owners()

    def astray(self) -> list[str]:
        """What nobody of them has, by name."""
        owners = self.owners()
        return self.cache.astray(owners) + self.prefixes.astray() + self.sampler.matchers.astray(owners)

    def check(self) -> None:
        """Raises AssertionError where the books do not add up; `astray` of the device says what by name."""
        self.cache.check()
        self.scheduler.check()
        findings = self.astray()
        assert not findings, "; ".join(findings)

    def _decode(self, sequences: tuple[Sequence, ...]) -> None:
        """One row each. Where the host cannot fetch what the rows need, each runs alone, and fails alone."""
        try:
            decoded = self.runner.decode(sequences)
        except HostStageError as error:
            if len(sequences) == 1:
                log.error("a row of %s cannot be computed: %s", sequences[0].id, error)
                self._fail(sequences[0].request, ErrorReason.INTERNAL, "part of the model could not be read")
                return
            for sequence in sequences:
                if sequence.is_running:
                    self._decode((sequence,))
            return
        self._commit_decode(sequences, decoded)

    def _begin(self, sequence: Sequence, match: Match, now: float) -> None:
        request = sequence.request
        self.prefill.begin(sequence, match, now)
        needed_s = self.rate.seconds(sequence.computed_len, request.prompt_len)
        if request.deadline is not None and now + needed_s > request.deadline:
            left = f"{request.deadline - now:.2f} s are left"
            message = f"computing the prompt takes {needed_s:.2f} s at the best rate seen here, and {left}"
            self._fail(request, ErrorReason.DEADLINE_EXCEEDED, message)

    def _advance_prefill(self, sequence: Sequence) -> None:
        try:
            logits = self.prefill.advance(sequence)
        except (RuntimeError, HostStageError) as error:
            end_if_sticky(error, self.pools.blocks.device)
            log.exception("the forward of %s failed", sequence.id)
            self._fail(sequence.request, ErrorReason.INTERNAL, "the prompt's forward failed")
            return
        if sequence.request.warm is not None and self.prefill.chunk is None:
            self.warming.progressed(sequence)
        if logits is not None and sequence.state is SequenceState.DECODING:  # a row, larger than the device
            self._commit_decode((sequence,), Decoded(logits, (None,)))
        elif logits is not None:
            self._commit_prompt(sequence, logits)

    def _commit_prompt(self, lead: Sequence, logits: torch.Tensor) -> None:
        """The prompt's last row is computed: forks, then each choice draws its first token (none in a replay)."""
        request = lead.request
        if request.warm is not None:
            self._end(lead)
            self.warming.computed(lead, self.clock())
            return
        lead.state = SequenceState.DECODING
        if lead.num_generated:
            return
        request.prefilled = self.clock()
        choices = [lead, *self.scheduler.fork(lead)]
        unfinished = request.prompt_len // self.device.layout.block_size
        for sibling in choices[1:]:
            assert lead.slot is not None
            assert sibling.slot is not None
            self.pools.copy_slot(lead.slot, sibling.slot)
            if request.prompt_len % self.device.layout.block_size:
                self.pools.copy_block(lead.block_table[unfinished], sibling.block_table[unfinished])
        self.send(Started(request.id, request.usage(self.clock())))
        drawn = self.sampler.sample(logits.expand(len(choices), -1), choices)
        for sequence, token in zip(choices, drawn, strict=True):
            if sequence.is_running:
                self._commit_token(sequence, token)
            if sequence.is_running and sequence.index in request.unwanted:
                self._finish(sequence, request.unwanted[sequence.index], num_tokens=0)

    def _commit_decode(self, sequences: tuple[Sequence, ...], decoded: Decoded) -> None:
        """Each row is computed; those that caught up draw a token, those that replay go on. Who has ended is past."""
        rows: list[int] = []
        for row, sequence in enumerate(sequences):
            if not sequence.is_running:
                continue
            sequence.computed_len += 1
            if sequence.computed_len == len(sequence.token_ids):
                rows.append(row)
        if not rows:
            return
        drawing = [sequences[row] for row in rows]
        for sequence, token in zip(drawing, self.sampler.sample_decoded(decoded, rows, drawing), strict=True):
            if sequence.is_running:
                self._commit_token(sequence, token)

    def _commit_token(self, sequence: Sequence, drawn: Drawn) -> None:
        request = sequence.request
        if drawn.token_id is None:
            assert drawn.fault is not None
            log.error("%s ends after %d tokens: %s", sequence.id, len(sequence.token_ids), drawn.fault.message)
            self._fail(request, drawn.fault.reason, drawn.fault.message)
            return
        if request.first_token is None:
            request.first_token = self.clock()
        sequence.token_ids.append(drawn.token_id)
        self._tokens.append(Token(request.id, sequence.index, drawn.token_id, drawn.chosen, drawn.top))
        submit = request.submit
        is_stop = drawn.token_id in submit.stop_token_ids and sequence.num_generated >= submit.min_tokens
        if is_stop or drawn.ends:
            self._finish(sequence, StopReason.STOP_TOKEN, stop_token_id=drawn.token_id)
        elif len(sequence.token_ids) >= request.max_len:
            self._finish(sequence, StopReason.LENGTH)

    def _finish(
        self,
        sequence: Sequence,
        reason: StopReason,
        *,
        stop_token_id: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        made = sequence.num_generated if num_tokens is None else num_tokens
        self._finished.append(Finished(sequence.request.id, sequence.index, reason, made, stop_token_id))
        self._end(sequence)

    def _fail(self, request: Request, reason: ErrorReason, message: str, retry_after_s: float | None = None) -> None:
        """The whole request ends with an error; nothing of it is held any more."""
        for sequence in list(self.requests.get(request.id, ())):
            self._end(sequence)
        self._flush()
        self.send(Rejected(request.id, reason, message, retry_after_s=retry_after_s))

    def _stop_choice(self, sequence: Sequence, reason: StopReason, num_tokens: int) -> None:
        """Ends one choice; before the fork, together with the others or at the fork, whichever comes first."""
        if sequence.num_generated:
            self._finish(sequence, reason, num_tokens=num_tokens)
            return
        unwanted, choices = sequence.request.unwanted, self.requests[sequence.request.id]
        unwanted[sequence.index] = reason
        if len(unwanted) == len(choices):
            for choice in list(choices):
                self._finish(choice, unwanted[choice.index], num_tokens=0)

    def _end(self, sequence: Sequence) -> None:
        choices = self.requests[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self.requests[sequence.request.id]
        try:
            self.scheduler.remove(sequence)
        except ReleaseError:
            log.exception("%s could not return everything", sequence.id)

    def _expire(self, now: float) -> None:
        for choices in list(self.requests.values()):
            request = choices[0].request
            if request.deadline is not None and now >= request.deadline:
                self._fail(request, ErrorReason.DEADLINE_EXCEEDED, "the deadline has passed")

    def _refuse_stuck(self) -> None:
        sequence = self.scheduler.stuck()
        if sequence is not None:
            reason = "there is no room for it"
            self._fail(sequence.request, ErrorReason.NO_CAPACITY, reason, retry_after_s=5.0)

    def _flush(self) -> None:
        if self._tokens or self._finished:
            self.send(StepOutput(tuple(self._tokens), tuple(self._finished)))
            self._tokens.clear()
            self._finished.clear()
