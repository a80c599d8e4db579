"""CacheService: prefixes ahead of their use, and what became of them.

All but WarmPrefix are a question to the engine and its answer. A WarmPrefix call begins or joins a job (warm.py), which
a task of its own carries out: tokenized whole, then sent to the engine a few prompts at a time. Whatever ends the job,
what the engine still has of it is given back by one Abort for each prompt.
"""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from downcore.v1 import cache_pb2 as pb

from daemon import cache_messages as cm
from daemon.errors import ErrorReason, RequestError
from daemon.front import cache_wire, validate
from daemon.front.caller import namespace_of, owner_of, readable_namespace_of
from daemon.front.config import FrontConfig
from daemon.front.limits import QueuedTokens
from daemon.front.paging import read_token, token_after
from daemon.front.prompts import ID_BYTES, Prompts
from daemon.front.requests import RequestTable
from daemon.front.service import write
from daemon.front.supervisor import Supervisor
from daemon.front.warm import RECEIPT_KEPT_S, Receipt, WarmJob, WarmJobs

log = logging.getLogger("downcore.front")

WINDOW = 4  # prompts of one job that the engine has at a time, so that a large job leaves its queue to others
DEFAULT_PAGE = 100


class CacheService:
    """The methods of downcore.v1.CacheService."""

    def __init__(
        self, config: FrontConfig, table: RequestTable, jobs: WarmJobs, supervisor: Supervisor, prompts: Prompts
    ) -> None:
        self._config = config
        self._table = table
        self._jobs = jobs
        self._supervisor = supervisor
        self._prompts = prompts

    async def WarmPrefix(self, request: pb.WarmPrefixRequest, context: Any) -> None:
        validate.check(request, validate.WARM_PREFIX, validate.NO_LIMITS)
        limits = self._prompts.limits()
        for index, prompt in enumerate(request.prompts):
            validate.check(prompt, validate.PROMPT, limits, within=f"prompts[{index}]")
        tier = cache_wire.TIERS.get(request.tier, cm.TierName.DEVICE)
        if tier not in self._supervisor.require_ready().tiers:
            raise RequestError(ErrorReason.TIER_UNAVAILABLE, f"this daemon has no {tier} tier", field="tier")
        namespace, owner = namespace_of(context, request.namespace), owner_of(context)
        found = await self._find(request.key, owner, _digest(request, namespace))
        if isinstance(found, Receipt):
            for response in cache_wire.repeated(request.key, found):
                await self._write(context, response)
            return
        if found is None:
            self._table.check_open()
            self._check_jobs(context)
            found = self._jobs.open(request.key, owner, _digest(request, namespace), is_detached=request.detached)
            found.held = context.held.move()
            found.task = asyncio.create_task(self._carry_out(found, request, namespace, context.queue))
        await self._listen(found, context)

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Any) -> pb.LookupPrefixResponse:
        validate.check(request, validate.LOOKUP_PREFIX, validate.NO_LIMITS)
        namespace = readable_namespace_of(context, request.namespace)
        ids = await self._encode(request.prompt, "prompt")
        found = await self._supervisor.ask(lambda query_id: cm.Lookup(query_id, namespace, ids), cm.LookupAnswer)
        return cache_wire.lookup(found)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        validate.check(request, validate.PIN_PREFIX, validate.NO_LIMITS)
        namespace = readable_namespace_of(context, request.namespace)
        prefix = await self._select(request.prefix)
        ttl_s = request.ttl_s if request.HasField("ttl_s") else None
        answer = await self._supervisor.ask(
            lambda query_id: cm.PinPrefix(query_id, namespace, prefix, ttl_s), cm.PrefixAnswer
        )
        return pb.PinPrefixResponse(prefix=cache_wire.prefix(answer.prefix))

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        validate.check(request, validate.SELECTED_PREFIX, validate.NO_LIMITS)
        namespace = readable_namespace_of(context, request.namespace)
        prefix = await self._select(request.prefix)
        answer = await self._supervisor.ask(
            lambda query_id: cm.UnpinPrefix(query_id, namespace, prefix), cm.PrefixAnswer
        )
        return pb.UnpinPrefixResponse(prefix=cache_wire.prefix(answer.prefix))

    async def EvictPrefix(self, request: pb.EvictPrefixRequest, context: Any) -> pb.EvictPrefixResponse:
        validate.check(request, validate.SELECTED_PREFIX, validate.NO_LIMITS)
        namespace = readable_namespace_of(context, request.namespace)
        prefix = await self._select(request.prefix)
        answer = await self._supervisor.ask(lambda query_id: cm.EvictPrefix(query_id, namespace, prefix), cm.Evicted)
        return cache_wire.evicted(answer)

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: Any) -> pb.ListPrefixesResponse:
        validate.check(request, validate.LIST_PREFIXES, validate.NO_LIMITS)
        namespace = readable_namespace_of(context, request.namespace)
        order, key_prefix = cache_wire.ORDERS[request.order], request.key_prefix
        limit = request.page_size or DEFAULT_PAGE
        after = read_token(request.page_token, order, key_prefix) if request.page_token else None
        value, key = (after.value, after.key) if after is not None else (None, "")
        answer = await self._supervisor.ask(
            lambda query_id: cm.ListPrefixes(query_id, namespace, key_prefix, order, limit, value, key), cm.PrefixList
        )
        return pb.ListPrefixesResponse(
            prefixes=[cache_wire.prefix(row) for row in answer.rows],
            next_page_token=token_after(answer.rows[-1], order, key_prefix) if answer.more else "",
            total=answer.total,
        )

    async def _encode(self, prompt: pb.Prompt, within: str) -> bytes:
        """Token ids of a prompt that is not checked yet."""
        validate.check(prompt, validate.PROMPT, self._prompts.limits(), within=within)
        return await self._prompts.encode_whole(prompt, within)

    async def _select(self, selector: pb.PrefixSelector) -> cm.Selector:
        if selector.WhichOneof("prefix") == "key":
            return cm.Selector(key=selector.key)
        return cm.Selector(prompt_ids=await self._encode(selector.prompt, "prefix.prompt"))

    def _check_jobs(self, context: Any) -> None:
        """Raises RequestError where as many of the caller's jobs run as it may have calls: some outlive theirs."""
        limit, owner = context.principal.max_requests, owner_of(context)
        if limit is not None and sum(job.owner == owner for job in self._jobs) >= limit:
            raise RequestError(
                ErrorReason.LIMIT_EXCEEDED, f"{limit} warming jobs of this caller run, which is its limit"
            )

    async def _find(self, key: str, owner: str, digest: bytes) -> WarmJob | Receipt | None:
        """What a call joins; never a job that is over but still gives things back."""
        while key:
            found = self._jobs.join(key, owner, digest, time.monotonic())
            if not isinstance(found, WarmJob) or not found.is_over:
                return found
            assert found.task is not None
            await asyncio.wait((found.task,))
        return None

    async def _listen(self, job: WarmJob, context: Any) -> None:
        """Sends what is new until the job is over. The last to leave a job that is not detached ends it."""
        job.num_listeners += 1
        try:
            seen: list[int] = []  # versions of the parts
            while not job.is_over:
                changed = job.changed
                await self._send_news(job, seen, context)
                await changed.wait()
            if job.error is not None:
                raise job.error
            assert job.receipt is not None
            await self._send_news(job, seen, context)
            await self._write(context, cache_wire.receipt(job.key, job.receipt, is_repeated=False))
        finally:
            job.num_listeners -= 1
            if not job.num_listeners and not job.is_detached and not job.is_over:
                job.cancel(RequestError(ErrorReason.ABORTED, "nobody listens to this job any more"))

    async def _send_news(self, job: WarmJob, seen: list[int], context: Any) -> None:
        if job.parts and not seen:
            seen.extend(0 for _ in job.parts)
            await self._write(context, cache_wire.started(job))
        for index, part in enumerate(job.parts):
            if part.version != seen[index]:
                seen[index] = part.version
                await self._write(context, cache_wire.progress(index, part))

    async def _write(self, context: Any, response: pb.WarmPrefixResponse) -> None:
        await write(context, response, self._config.stall_timeout_s)

    async def _carry_out(
        self, job: WarmJob, request: pb.WarmPrefixRequest, namespace: str, queue: Callable[[int], QueuedTokens]
    ) -> None:
        """The job's task: ends with the job over, and with nothing of it left in the engine."""
        try:
            job.end(await self._warm(job, request, namespace, queue))
        except RequestError as error:
            job.end(error)
        except asyncio.CancelledError:
            job.end(RequestError(ErrorReason.ABORTED, "the job was cancelled"))
        except Exception:
            log.exception("a warming job failed")
            job.end(RequestError(ErrorReason.INTERNAL, "the server has failed; its log says how"))
        finally:
            for taken in (job.queued, job.held):
                if taken is not None:
                    taken.release()
            for abort in self._jobs.withdraw(job):
                self._supervisor.send(abort)
            self._jobs.close(job, keep_until_s=time.monotonic() + RECEIPT_KEPT_S if request.key else None)

    async def _warm(
        self, job: WarmJob, request: pb.WarmPrefixRequest, namespace: str, queue: Callable[[int], QueuedTokens]
    ) -> Receipt:
        prompts: list[bytes] = []
        for index, prompt in enumerate(request.prompts):
            prompts.append(await self._prefix_ids(prompt, f"prompts[{index}]"))
            assert job.held is not None
            job.held.add(len(prompts[-1]))
        prompt_tokens = tuple(len(ids) // ID_BYTES for ids in prompts)
        job.queued = queue(sum(prompt_tokens))
        job.begin(prompt_tokens)
        waiting = deque(range(len(prompts)))
        running: dict[asyncio.Future[cm.WarmDone], int] = {}
        done: dict[int, cm.WarmDone] = {}
        while waiting or running:
            while waiting and len(running) < WINDOW:
                index = waiting.popleft()
                running[self._jobs.submit(job, index)] = index
                self._supervisor.submit(
                    cm.Warm(
                        job.wire_id(index),
                        prompts[index],
                        namespace,
                        cache_wire.TIERS.get(request.tier, cm.TierName.DEVICE),
                        request.pin,
                        request.durable,
                        request.ttl_s if request.HasField("ttl_s") else None,
                    )
                )
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in ended:
                index = running.pop(future)
                try:
                    done[index] = future.result()
                except RequestError as error:
                    raise _of_prompt(error, index) from None
        return Receipt(prompt_tokens, tuple(done[index] for index in range(len(prompts))), time.time())

    async def _prefix_ids(self, prompt: pb.Prompt, within: str) -> bytes:
        """Token ids of a prompt with a prefix that can be kept."""
        ids = await self._prompts.encode_whole(prompt, within)
        info = self._supervisor.require_ready()
        least = info.grid
        if len(ids) < least * ID_BYTES:
            text = f"has {len(ids) // ID_BYTES} tokens; the shortest prefix that can be kept has {least}"
            raise RequestError(ErrorReason.INVALID_ARGUMENT, text, field=within)
        return ids


def _digest(request: pb.WarmPrefixRequest, namespace: str) -> bytes:
    """Of all that a job is: equal ones are the same job."""
    content = request.SerializeToString(deterministic=True)
    return hashlib.blake2b(content, digest_size=32, key=namespace.encode()[:64]).digest()


def _of_prompt(error: RequestError, index: int) -> RequestError:
    """The engine's complaint about one prompt, with the name that the client gave it."""
    if error.reason is ErrorReason.ENGINE_UNAVAILABLE:  # no prompt's fault
        return error
    field = validate.dotted(f"prompts[{index}]", error.field)
    return RequestError(error.reason, error.message, field=field, retry_after_s=error.retry_after_s)
