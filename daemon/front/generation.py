"""GenerationService: from a request to its stream.

A Generate call goes through these steps: checked, put on the table, tokenized, submitted to the engine, streamed, taken
off the table. Whatever ends it, what the engine holds for it is given back by one Abort.
"""

import asyncio
import random
import time
from typing import Any

from downcore.v1 import generation_pb2 as pb

from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front import validate
from daemon.front.caller import namespace_of, owner_of
from daemon.front.config import FrontConfig
from daemon.front.prompts import Prepared, Prompts, from_little_endian, to_little_endian
from daemon.front.requests import OpenRequest, RequestTable, cached_tokens
from daemon.front.supervisor import Supervisor
from daemon.front.text import TokenTable
from daemon.front.trace_context import trace_of

MAX_SEED = (1 << 63) - 1


class GenerationService:
    """The methods of downcore.v1.GenerationService."""

    def __init__(
        self,
        config: FrontConfig,
        table: RequestTable,
        supervisor: Supervisor,
        prompts: Prompts,
        tokens: TokenTable,
    ) -> None:
        self._config = config
        self._table = table
        self._supervisor = supervisor
        self._prompts = prompts
        self._tokens = tokens
        self._loop = asyncio.get_running_loop()
        self._random = random.SystemRandom()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        arrived_s = time.monotonic()
        self._table.check_open()
        validate.check(request, validate.GENERATE, self._prompts.limits())
        namespace = namespace_of(context, request.namespace)
        open_request = self._table.open(request.request_id, owner_of(context), arrived_s)
        open_request.handler = asyncio.current_task()
        open_request.principal = context.principal.name
        open_request.trace = trace_of(context.invocation_metadata())
        deadline = self._enforce_deadline(open_request, context)
        try:
            await self._answer(request, open_request, context, namespace)
        except asyncio.CancelledError:
            # By the client, or here, since it does not read or has lost its credential: then the error says so.
            open_request.error = open_request.error or context.ended
            if open_request.error is None:
                raise
            raise open_request.error from None
        except Exception as error:
            unforeseen = RequestError(ErrorReason.INTERNAL, "the server has failed")
            failure = error if isinstance(error, RequestError) else unforeseen
            open_request.error = open_request.error or failure
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
            if open_request.submitted and (open_request.num_unfinished or open_request.error is not None):
                self._supervisor.send(messages.Abort(open_request.wire_id))
            self._table.close(open_request)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._table.check_open()
        validate.check(request, validate.TOKENIZE, self._prompts.limits())
        ids = from_little_endian(await self._prompts.encode(request))
        return pb.TokenizeResponse(token_ids=ids, tokens=[self._tokens[token_id] for token_id in ids])

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        validate.check(request, validate.ABORT, validate.NO_LIMITS)
        found = self._table.find(request.request_id, owner_of(context))
        if found is None:
            return pb.AbortResponse(found=False)
        self.abort(found)
        return pb.AbortResponse(found=True)

    def abort(self, request: OpenRequest) -> int:
        """Ends all answers of a request as aborted. Returns: how many were unfinished."""
        num_ended = len(request.abort())
        if num_ended and request.submitted:
            self._supervisor.send(messages.Abort(request.wire_id))
        return num_ended

    def _enforce_deadline(self, request: OpenRequest, context: Any) -> asyncio.TimerHandle | None:
        remaining_s = context.time_remaining()
        if remaining_s is None:
            return None
        error = RequestError(ErrorReason.DEADLINE_EXCEEDED, "the deadline is over")
        return self._loop.call_later(max(remaining_s, 0.0), self._end, request, error)

    def _end(self, request: OpenRequest, error: RequestError) -> None:
        request.fail(error)
        # Not waiting for the engine but for a tokenizer or for its client: only cancelling gets through.
        if request.handler is not None and not request.is_waiting:
            request.handler.cancel()

    def end_stalled(self) -> int:
        """Ends the requests whose client has taken no message for too long. Returns: how many.

        One that has failed while its client takes a message ends as well, for its own reason.
        """
        oldest_s = self._loop.time() - self._config.stall_timeout_s
        num_stalled = 0
        for request in self._table:
            if request.write_began_s is not None and (request.write_began_s < oldest_s or request.error is not None):
                self._end(request, RequestError(ErrorReason.READER_STALLED, "the client reads too slowly"))
                num_stalled += request.error is not None and request.error.reason is ErrorReason.READER_STALLED
        return num_stalled

    async def _answer(
        self, request: pb.GenerateRequest, open_request: OpenRequest, context: Any, namespace: str
    ) -> None:
        stopping = request.stopping
        n = request.n if request.HasField("n") else 1
        open_request.expect(n, tuple(stopping.stop), stopping.min_tokens, self._tokens)
        prepared = await self._prepare(request, open_request, namespace)
        sampling = _sampling(request.sampling, self._random)
        if open_request.num_unfinished:  # not aborted meanwhile
            context.held.add(len(prepared.prompt_ids))
            open_request.queued = context.queue(prepared.prompt_len)
            submit = self._submission(request, open_request, prepared, sampling, namespace, context.time_remaining())
            open_request.submitted_s = time.monotonic()
            self._supervisor.submit(submit)
            open_request.submitted = True
            for stop in open_request.stops():  # aborted meanwhile, some of them
                self._supervisor.send(stop)
        await self._stream(open_request, context, sampling.seed)
        usage = open_request.usage
        summary = pb.GenerateSummary(
            usage=pb.Usage(
                prompt_tokens=prepared.prompt_len,
                cached_tokens=cached_tokens(usage) if usage is not None else None,
                completion_tokens=open_request.completion_tokens,
            ),
            timings=_timings(open_request),
        )
        response = pb.GenerateResponse(request_id=open_request.request_id, summary=summary)
        await self._write(open_request, context, response)

    async def _stream(self, request: OpenRequest, context: Any, seed: int) -> None:
        info = self._supervisor.info
        model = info.model if info is not None else ""
        write, clock = context.write, self._loop.time
        while not request.all_sent:
            await request.wait()
            for response in request.take(model, seed):
                request.write_began_s = clock()
                await write(response)
            request.write_began_s = None

    async def _write(self, request: OpenRequest, context: Any, response: pb.GenerateResponse) -> None:
        request.write_began_s = self._loop.time()
        await context.write(response)
        request.write_began_s = None

    async def _prepare(self, request: pb.GenerateRequest, open_request: OpenRequest, namespace: str) -> Prepared:
        """What the engine takes; without a token where the request was aborted before it had any."""
        if request.WhichOneof("prompt") == "token_ids" and not request.HasField("structured_output"):
            return Prepared(to_little_endian(request.token_ids.ids))
        open_request.preparing = preparing = asyncio.ensure_future(self._prompts.prepare(request, namespace))
        try:
            await asyncio.wait((preparing,))
        finally:
            open_request.preparing = None
            preparing.cancel()
        return Prepared(b"") if preparing.cancelled() else preparing.result()

    def _submission(
        self,
        request: pb.GenerateRequest,
        open_request: OpenRequest,
        prepared: Prepared,
        sampling: messages.SamplingParams,
        namespace: str,
        deadline_s: float | None,
    ) -> messages.Submit:
        info = self._supervisor.require_ready()
        prompt_len = prepared.prompt_len
        field = request.WhichOneof("prompt") or "prompt"
        if prompt_len == 0:
            raise RequestError(ErrorReason.INVALID_ARGUMENT, "has no token", field=field)
        room = info.max_context_tokens - prompt_len
        if room < 1:
            message = f"has {prompt_len} tokens; the context takes {info.max_context_tokens - 1} and an answer"
            raise RequestError(ErrorReason.CONTEXT_TOO_LONG, message, field=field)
        stopping = request.stopping
        if stopping.HasField("max_tokens"):
            max_tokens = stopping.max_tokens
            if max_tokens > room:
                message = f"{max_tokens} do not fit: the context leaves {room} after a prompt of {prompt_len} tokens"
                raise RequestError(ErrorReason.CONTEXT_TOO_LONG, message, field="stopping.max_tokens")
        else:
            n = request.n if request.HasField("n") else 1
            max_tokens = min(room, self._config.max_tokens_limit or room, _pool_room(info, prompt_len, n))
            if stopping.min_tokens > max_tokens:
                message = f"{stopping.min_tokens} do not fit: there is room for {max_tokens}"
                raise RequestError(ErrorReason.CONTEXT_TOO_LONG, message, field="stopping.min_tokens")
        ends = () if stopping.ignore_eos else info.eos_token_ids
        return messages.Submit(
            request_id=open_request.wire_id,
            prompt_ids=prepared.prompt_ids,
            n=request.n if request.HasField("n") else 1,
            max_tokens=max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=(*stopping.stop_token_ids, *ends),
            sampling=sampling,
            namespace=namespace,
            deadline_s=deadline_s,
            grammar=prepared.grammar,
        )


def _pool_room(info: messages.EngineInfo, prompt_len: int, n: int) -> int:
    """Tokens that each of n answers can have in the engine's blocks; the prompt's full blocks are shared."""
    full_blocks, rest = divmod(prompt_len, info.block_size)
    return max((info.num_blocks - full_blocks) // n * info.block_size - rest, 1)


def _sampling(given: pb.SamplingParams, source: random.Random) -> messages.SamplingParams:
    """Checked parameters as the engine takes them; an absent field has its default there."""
    values: dict[str, Any] = {
        name: getattr(given, name)
        for name in (
            "temperature", "top_k", "top_p", "min_p", "typical_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        )
        if given.HasField(name)
    }  # fmt: skip
    values.setdefault("seed", source.randint(0, MAX_SEED))
    return messages.SamplingParams(
        **values, logit_bias=dict(given.logit_bias), logprobs=given.logprobs, top_logprobs=given.top_logprobs
    )


def _timings(request: OpenRequest) -> pb.Timings:
    """The engine's times are from its own arrival; the front adds what came before, and reads the rest itself."""
    usage = request.usage
    before_s = request.submitted_s - request.arrived_s
    first_s, last_s = request.first_token_s, request.last_token_s
    return pb.Timings(
        queue_s=before_s + usage.queue_s if usage is not None else before_s,
        prefill_s=usage.prefill_s if usage is not None else 0.0,
        first_token_s=first_s - request.arrived_s if first_s is not None else 0.0,
        total_s=last_s - request.arrived_s if last_s is not None else before_s,
    )
