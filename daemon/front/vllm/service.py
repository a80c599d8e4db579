"""The methods of vllm.grpc.engine.VllmEngine, as PyPI's smg-grpc-proto defines it.

Each is a translation: of GenerationService, of a table that the engine answers, or of a feed (kv_feeds.py). What has no
counterpart here is UNIMPLEMENTED, and says so.
"""

import asyncio
import time
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from downcore.v1 import generation_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common  # pyright: ignore[reportMissingTypeStubs]
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm  # pyright: ignore[reportMissingTypeStubs]

from daemon import messages
from daemon.cache_messages import TierName
from daemon.errors import ErrorReason, RequestError
from daemon.front.caller import namespace_of
from daemon.front.config import FrontConfig
from daemon.front.generation import GenerationService
from daemon.front.health import Health
from daemon.front.kv_feeds import KvFeeds
from daemon.front.open_work import OpenWork
from daemon.front.service import write
from daemon.front.supervisor import Supervisor
from daemon.front.vllm import kv
from daemon.front.vllm.folder import Archive, NoTokenizer, archive_of, facts_of
from daemon.front.vllm.translate import Answer, AnswerContext, renamed, to_generate

SERVER_TYPE = "downcore"
# A gateway without a tokenizer of its own looks for this on a public hub before it asks GetTokenizer. Under the model's
# name the hub may well have another one, under a path it has none.
TOKENIZER_PATH = "/nowhere/ask-GetTokenizer"
CHUNK_BYTES = 64 << 10  # of an archive; gateways are used to this
MAX_ABORTS = 1024  # ids in one call
RUNNING = {"prefilling", "decoding"}  # sequence states; the others wait
PADDING_BLOCKS = 1  # of the device, which nobody has


class VllmEngine:
    """Translates for one gateway or several."""

    def __init__(
        self,
        config: FrontConfig,
        work: OpenWork,
        supervisor: Supervisor,
        generation: GenerationService,
        health: Health,
    ) -> None:
        self._config = config
        self._work = work
        self._supervisor = supervisor
        self._generation = generation
        self._health = health
        self._feeds: KvFeeds = supervisor.feeds
        self._folder = Path(config.engine.model_path)
        self._facts = facts_of(self._folder)
        self._archiving = asyncio.Lock()  # one archive in the making at a time, whoever asks
        self._started_s = time.monotonic()
        self._last_request_s = 0.0

    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> None:
        self._last_request_s = time.time()
        translated = to_generate(request)
        answer = Answer(is_stream=request.stream, eos_token_ids=self._supervisor.require_ready().eos_token_ids)
        try:
            await self._generation.Generate(translated, AnswerContext(context, answer))
        except RequestError as error:
            raise renamed(error) from None

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        if len(request.request_ids) > MAX_ABORTS:
            why = f"has {len(request.request_ids)} entries, at most {MAX_ABORTS} are allowed"
            raise RequestError(ErrorReason.TOO_LARGE, why, field="request_ids")
        for request_id in request.request_ids:
            try:
                await self._generation.Abort(pb.AbortRequest(request_id=request_id), context)
            except RequestError as error:
                raise RequestError(error.reason, error.message, field="request_ids") from None
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        is_serving = self._health.is_serving
        told = "serving" if is_serving else "no new work is taken now"
        return vllm.HealthCheckResponse(healthy=is_serving, message=told)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Any) -> vllm.GetModelInfoResponse:
        info = self._supervisor.require_ready()
        return vllm.GetModelInfoResponse(
            model_path=info.model,  # a name: where the folder lies is nobody's business
            is_generation=True,
            max_context_length=info.max_context_tokens,
            vocab_size=info.vocab_size,
            served_model_name=info.model,
            tokenizer_path=TOKENIZER_PATH,
            model_type=info.family,
            architectures=self._facts.architectures,
            eos_token_ids=info.eos_token_ids,
            pad_token_id=self._facts.pad_token_id,
            bos_token_id=self._facts.bos_token_id,
            max_req_input_len=info.max_context_tokens - 1,
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Any) -> vllm.GetServerInfoResponse:
        info = self._supervisor.require_ready()
        return vllm.GetServerInfoResponse(
            active_requests=len(self._work.requests),
            is_paused=self._work.requests.draining,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=info.dtype,
            model_dtype=info.dtype,
            block_size=info.block_size,
            max_num_seqs=self._config.engine.max_sequences,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        info = self._supervisor.require_ready()
        tiers = (await self._supervisor.query(messages.QueryKind.TIERS)).tiers
        rows = (await self._supervisor.query(messages.QueryKind.SEQUENCES)).sequences
        device = next(row for row in tiers if row.name == TierName.DEVICE)
        running = {row.request_id for row in rows if row.state in RUNNING}
        waiting = {row.request_id: row.prompt_tokens for row in rows if row.request_id not in running}
        num_blocks = device.blocks - PADDING_BLOCKS
        num_held = num_blocks - device.free_blocks - device.cached_blocks  # what could be evicted is no load
        load = vllm.SchedulerLoad(
            num_running_reqs=len(running),
            num_waiting_reqs=len(waiting),
            num_total_reqs=len(running) + len(waiting),
            num_used_tokens=num_held * info.block_size,
            max_total_num_tokens=num_blocks * info.block_size,
            token_usage=num_held / num_blocks,
            utilization=min(len(running) / self._config.engine.max_sequences, 1.0),
            max_running_requests=self._config.engine.max_sequences,
            num_waiting_uncached_tokens=sum(waiting.values()),  # at most; what is cached is known when admitted
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=SERVER_TYPE, dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Any) -> None:
        archive = await self._archive()
        for begin in range(0, len(archive.data), CHUNK_BYTES):
            end = begin + CHUNK_BYTES
            is_last = end >= len(archive.data)
            chunk = common.GetTokenizerChunk(data=archive.data[begin:end], sha256=archive.sha256 if is_last else "")
            await write(context, chunk, self._config.stall_timeout_s)

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Any) -> None:
        namespace = namespace_of(context)
        self._supervisor.require_ready()
        await context.send_initial_metadata(())  # a subscriber that has everything may wait long for a message
        async with aclosing(self._feeds.read(namespace, request.start_sequence_number)) as feed:
            async for told in feed:
                await write(context, kv.message_of(told), self._config.stall_timeout_s)

    async def Embed(self, request: vllm.EmbedRequest, context: Any) -> vllm.EmbedResponse:
        raise _absent("embeddings are not computed here")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Any) -> common.FlushCacheResponse:
        raise _absent("a cache is emptied by CacheService.EvictPrefix, prefix by prefix")

    async def StartProfile(self, request: common.StartProfileRequest, context: Any) -> common.ProfileResponse:
        raise _absent("there is no profiler")

    async def StopProfile(self, request: common.StopProfileRequest, context: Any) -> common.ProfileResponse:
        raise _absent("there is no profiler")

    async def _archive(self) -> Archive:
        async with self._archiving:
            try:
                return await asyncio.to_thread(archive_of, self._folder)
            except NoTokenizer as error:
                raise RequestError(ErrorReason.NOT_FOUND, str(error)) from None
            except OSError as error:
                raise RequestError(ErrorReason.NOT_FOUND, f"the tokenizer cannot be read: {error.strerror}") from None


def _absent(why: str) -> RequestError:
    return RequestError(ErrorReason.UNIMPLEMENTED, why)
