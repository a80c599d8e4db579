"""The front put together: listeners, services, the engine's supervisor, signals, and the way out.

A life: claim the socket, start tokenizers and engine, listen, say so once the engine is ready; on the first SIGTERM or
SIGINT refuse new work, let streams end within the drain window, end the rest, let the engine leave, exit 0; on the
second end at once.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from daemon.errors import ErrorReason, RequestError
from daemon.front import memory
from daemon.front.admin import AdminService
from daemon.front.cache import CacheService
from daemon.front.config import FrontConfig
from daemon.front.generation import GenerationService
from daemon.front.health import SERVICE_NAME as HEALTH
from daemon.front.health import Health
from daemon.front.open_work import OpenWork
from daemon.front.prompts import Prompts
from daemon.front.requests import RequestTable
from daemon.front.service import handler_of
from daemon.front.sockets import Claim, claim_socket, loopback_target
from daemon.front.supervisor import EngineState, Supervisor
from daemon.front.tokenizer_pool import TokenizerPool
from daemon.front.warm import WarmJobs

log = logging.getLogger("downcore.front")

GENERATION = "downcore.v1.GenerationService"
CACHE = "downcore.v1.CacheService"
ADMIN = "downcore.v1.AdminService"
MAX_REQUEST_BYTES = 16 << 20
MAX_RESPONSE_BYTES = 128 << 20  # Tokenize of the largest prompt
SPARE_CALLS = 512  # besides Generate: health, admin, reflection
TICK_S = 0.1  # health and stalled readers are looked at this often
LAST_WORDS_S = 2.0  # for ended streams to tell their clients
STOP_GRACE_S = 0.5
SAME_SIGNAL_S = 0.05  # who signals a process and its whole group means one signal
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_channelz", 0),  # nobody reads its traces, which are kept for every channel and socket
    # A peer that has gone without a word is found out, so that its streams do not stay for ever.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


async def serve(config: FrontConfig) -> int:
    """Runs the front to its end. Returns: the exit status.

    Raises:
        ListenError, TokenizerFailed, EngineFailed: it cannot serve, and why.
    """
    tcp_target = loopback_target(config.tcp) if config.tcp is not None else None
    claim = claim_socket(config.listen)
    try:
        return await _Front(config, claim, tcp_target).run()
    finally:
        claim.release()


class _Front:
    """One front process."""

    def __init__(self, config: FrontConfig, claim: Claim, tcp_target: str | None) -> None:
        self._config = config
        self._claim = claim
        self._tcp_target = tcp_target
        self._table = RequestTable(config.max_open_requests)
        self._jobs = WarmJobs()
        self._work = OpenWork(self._table, self._jobs)
        self._health = Health((GENERATION, CACHE, ADMIN))
        self._supervisor = Supervisor(config, self._table, self._jobs, self._update_health)
        self._tokenizers = TokenizerPool(
            config.engine.model_path, config.tokenizer_workers, config.tokenizer_queue, config.tokenizer_timeout_s
        )
        self._signalled = asyncio.Event()
        self._signalled_s = 0.0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        engine = asyncio.create_task(self._supervisor.run())
        try:
            server, generation, listening = await self._start()
        except BaseException:
            self._supervisor.kill()
            engine.cancel()
            await self._tokenizers.stop()
            raise
        ticking = asyncio.create_task(self._tick(generation))
        announcing = asyncio.create_task(self._announce(listening))
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait((engine, signalled), return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()  # raises EngineFailed
            await self._drain(generation)
        finally:
            for task in (announcing, signalled):
                task.cancel()
            await self._supervisor.stop()
            engine.cancel()
            await server.stop(STOP_GRACE_S)
            ticking.cancel()
            await self._tokenizers.stop()
            await asyncio.gather(engine, ticking, announcing, signalled, return_exceptions=True)
        log.info("stopped")
        return 0

    async def _start(self) -> "tuple[grpc.aio.Server, GenerationService, Sequence[str]]":
        tokens = await self._tokenizers.start()
        prompts = Prompts(self._config, self._supervisor, self._tokenizers)
        generation = GenerationService(self._config, self._table, self._supervisor, prompts, tokens)
        cache = CacheService(self._config, self._table, self._jobs, self._supervisor, prompts)
        admin = AdminService(
            self._config, _version(), self._work, self._supervisor,
            abort=generation.abort, on_drain=self._update_health,
        )  # fmt: skip
        server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=self._config.max_open_requests + SPARE_CALLS)
        server.add_generic_rpc_handlers(
            (
                handler_of(GENERATION, generation),
                handler_of(CACHE, cache),
                handler_of(ADMIN, admin),
                handler_of(HEALTH, self._health),
            )
        )
        reflection.enable_server_reflection((GENERATION, CACHE, ADMIN, HEALTH, reflection.SERVICE_NAME), server)
        listening = [self._claim.target]
        server.add_insecure_port(self._claim.target)
        if self._tcp_target is not None:
            port = server.add_insecure_port(self._tcp_target)
            listening.append(f"{self._tcp_target.rpartition(':')[0]}:{port}")
        await server.start()
        os.chmod(self._claim.path, 0o600)
        return server, generation, listening

    async def _announce(self, listening: Sequence[str]) -> None:
        await self._supervisor.ready.wait()
        info = self._supervisor.info
        assert info is not None
        memory.settle()
        print(f"downcore ready: {info.model} on {', '.join(listening)}", flush=True)

    async def _tick(self, generation: GenerationService) -> None:
        was_busy = False
        while True:
            self._update_health()
            if was_busy and not self._work:
                memory.trim()
            was_busy = bool(self._work)
            num_stalled = generation.end_stalled()
            if num_stalled:
                log.warning("%d streams ended: their clients do not read", num_stalled)
            await asyncio.sleep(TICK_S)

    def _update_health(self) -> None:
        serving = self._supervisor.is_serving and not self._table.draining
        if self._health.set(serving):
            log.info("health: %s", "SERVING" if serving else "NOT_SERVING")

    def _on_signal(self, number: int) -> None:
        if not self._signalled.is_set():
            log.info("%s: draining", signal.Signals(number).name)
            self._table.draining = True
            self._update_health()
            self._signalled.set()
            self._signalled_s = time.monotonic()
            return
        if time.monotonic() - self._signalled_s < SAME_SIGNAL_S:
            return
        log.warning("second signal: ending at once")
        self._supervisor.kill()
        self._tokenizers.kill()
        self._claim.release()
        os._exit(128 + number)

    async def _drain(self, generation: GenerationService) -> None:
        """Streams and warming jobs go on for a while; what is left is ended."""
        if self._supervisor.state is EngineState.READY and await self._work.wait_idle(self._config.drain_window_s):
            return
        num_ended = sum(generation.abort(request) for request in self._table)
        num_jobs = self._work.abort_jobs(RequestError(ErrorReason.DRAINING, "the server is draining"))
        log.warning("drain window over: %d answers and %d warming jobs ended", num_ended, num_jobs)
        await self._work.wait_idle(LAST_WORDS_S)


def _version() -> str:
    try:
        return version("downcore")
    except PackageNotFoundError:
        return "0+uninstalled"
