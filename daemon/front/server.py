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
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from downcore.v1 import admin_pb2 as pb

from daemon import logs, memory
from daemon.errors import ErrorReason, RequestError
from daemon.front import gateway, processor, tracing
from daemon.front.access import ADMIN, CACHE, GENERATION, HEALTH, VLLM_ENGINE
from daemon.front.admin import AdminService
from daemon.front.cache import CacheService
from daemon.front.config import FrontConfig
from daemon.front.ended import Ended
from daemon.front.events import EventLog
from daemon.front.generation import GenerationService
from daemon.front.grammars import Grammars
from daemon.front.health import Health
from daemon.front.http_listener import HttpListener
from daemon.front.listeners import Listeners
from daemon.front.notify import Notifier
from daemon.front.open_work import OpenWork
from daemon.front.prompts import Prompts
from daemon.front.quotas import QuotaKeeper
from daemon.front.request_log import RequestLog
from daemon.front.requests import RequestTable
from daemon.front.scrape import Scrape, Sources
from daemon.front.supervisor import EngineState, Supervisor
from daemon.front.tokenizer_pool import TokenizerPool
from daemon.front.warm import WarmJobs

log = logging.getLogger("downcore.front")

GUARD_TICK_S = 1.0  # files are looked at, and calls of withdrawn credentials ended, this often
TICK_S = 0.1  # health and stalled readers are looked at this often
LAST_WORDS_S = 2.0  # for ended streams to tell their clients
STOP_GRACE_S = 0.5
SAME_SIGNAL_S = 0.05  # who signals a process and its whole group means one signal


async def serve(config: FrontConfig) -> int:
    """Runs the front to its end. Returns: the exit status.

    Raises:
        ListenError, TokenizerFailed, EngineFailed: it cannot serve, and why.
    """
    listeners = Listeners(config)
    try:
        metrics = HttpListener(config.metrics_listen, config.metrics_tcp)
        try:
            return await _Front(config, listeners, metrics).run()
        finally:
            metrics.release()
    finally:
        listeners.release()


class _Front:
    """One front process."""

    def __init__(self, config: FrontConfig, listeners: Listeners, metrics: HttpListener) -> None:
        self._config = config
        self._listeners = listeners
        self._metrics = metrics
        observers: list[Callable[[Ended], None]] = [RequestLog(config.request_log)]
        if config.trace_endpoint is not None:
            observers.append(tracing.load(config.trace_endpoint, config.trace_fraction))
        self._table = RequestTable(config.max_open_requests, observers, coalesces=config.coalesce)
        self._jobs = WarmJobs()
        self._work = OpenWork(self._table, self._jobs)
        self._engine_service = gateway.load() if config.gateway else None
        self._health = Health((GENERATION, CACHE, ADMIN, *((VLLM_ENGINE,) if config.gateway else ())))
        self._events = EventLog()
        self._notifier = Notifier.from_environment(os.environ)
        self._supervisor = Supervisor(config, self._table, self._jobs, self._events, self._update_health)
        self._tokenizers = TokenizerPool(
            config.engine.model_path, config.tokenizer_workers, config.tokenizer_queue, config.tokenizer_timeout_s
        )
        self._grammars = Grammars(config)
        self._signalled = asyncio.Event()
        self._signalled_s = 0.0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._listeners.has_files or self._notifier.is_managed:
            loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        engine = asyncio.create_task(self._supervisor.run())
        try:
            generation, listening = await self._start()
        except BaseException:
            self._supervisor.kill()
            engine.cancel()
            await self._tokenizers.stop()
            raise
        processor.go_first()
        ticking = asyncio.create_task(self._tick(generation))
        guarding = asyncio.create_task(self._guard())
        announcing = asyncio.create_task(self._announce(listening))
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait((engine, signalled, guarding), return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()  # raises EngineFailed
            if guarding.done():
                guarding.result()  # raises: nobody would withdraw a credential any more
            await self._drain(generation)
        finally:
            for task in (announcing, signalled, guarding):
                task.cancel()
            await self._supervisor.stop()
            engine.cancel()
            await self._listeners.stop(STOP_GRACE_S)
            self._metrics.stop()
            ticking.cancel()
            await self._tokenizers.stop()
            await self._grammars.stop()
            await asyncio.gather(engine, ticking, guarding, announcing, signalled, return_exceptions=True)
        log.info("stopped")
        return 0

    async def _start(self) -> tuple[GenerationService, Sequence[str]]:
        tokens = await self._tokenizers.start()
        prompts = Prompts(self._config, self._supervisor, self._tokenizers, self._grammars)
        generation = GenerationService(self._config, self._table, self._supervisor, prompts, tokens)
        cache = CacheService(self._config, self._table, self._jobs, self._supervisor, prompts)
        admin = AdminService(
            self._config, _version(), self._work, self._supervisor, self._events,
            abort=generation.abort, on_drain=self._update_health,
        )  # fmt: skip
        servicers: dict[str, object] = {GENERATION: generation, CACHE: cache, ADMIN: admin, HEALTH: self._health}
        if self._engine_service is not None:
            servicers[VLLM_ENGINE] = self._engine_service(
                self._config, self._work, self._supervisor, generation, self._health
            )
        sources = Sources(
            self._work, self._supervisor, self._health, self._tokenizers, self._grammars, self._listeners.failed,
            self._listeners.uses.held,
        )  # fmt: skip
        for address in await self._metrics.start(Scrape(self._config, _version(), sources)):
            log.info("metrics on %s", address)
        return generation, await self._listeners.start(servicers)

    async def _announce(self, listening: Sequence[str]) -> None:
        await self._supervisor.ready.wait()
        info = self._supervisor.info
        assert info is not None
        memory.settle()
        print(f"downcore ready: {info.model} on {', '.join(listening)}", flush=True)
        self._notifier.ready(f"serving {info.model}")

    async def _tick(self, generation: GenerationService) -> None:
        was_busy = False
        while True:
            self._update_health()
            self._notifier.tick(is_alive=self._supervisor.is_alive)
            if was_busy and not self._work:
                memory.trim()
            was_busy = bool(self._work)
            num_stalled = generation.end_stalled()
            if num_stalled:
                log.warning("%d streams ended: their clients do not read", num_stalled)
                self._events.add(
                    pb.EVENT_KIND_REQUESTS_ENDED, f"{num_stalled} streams whose clients do not read", count=num_stalled
                )
            await asyncio.sleep(TICK_S)

    async def _guard(self) -> None:
        """Certificates, tokens and principals as they are now, not as they were."""
        directory = self._listeners.directory
        keeping = asyncio.create_task(QuotaKeeper(directory, self._supervisor).run()) if directory is not None else None
        try:
            while True:
                self._reload(force=False)
                num_ended = self._listeners.end_unknown(time.time())
                if num_ended:
                    log.warning("%d calls ended: their credential is no longer good", num_ended)
                    told = f"{num_ended} calls whose credential is no longer good"
                    self._events.add(pb.EVENT_KIND_REQUESTS_ENDED, told, count=num_ended)
                num_shed = self._listeners.tell_refused()
                if num_shed:
                    told = f"{num_shed} requests refused for want of room"
                    self._events.add(pb.EVENT_KIND_REQUESTS_SHED, told, count=num_shed)
                await asyncio.sleep(GUARD_TICK_S)
        finally:
            if keeping is not None:
                keeping.cancel()

    def _on_reload(self) -> None:
        was_ready = self._supervisor.info is not None
        if was_ready:
            self._notifier.reloading()
        self._reload(force=True)
        if was_ready:
            self._notifier.ready("certificates and principals read again")

    def _reload(self, *, force: bool) -> None:
        changed = self._listeners.poll(force=force)
        if changed:
            log.info("read again: %s", ", ".join(changed))
            self._events.add(pb.EVENT_KIND_RELOADED, f"read again: {', '.join(changed)}")

    def _update_health(self) -> None:
        serving = self._supervisor.is_serving and not self._table.draining
        if self._health.set(serving=serving, alive=self._supervisor.is_alive):
            log.info("health: %s", "SERVING" if serving else "NOT_SERVING")
            kind = pb.EVENT_KIND_SERVING if serving else pb.EVENT_KIND_NOT_SERVING
            self._events.add(kind, "new work is taken" if serving else "no new work is taken")

    def _on_signal(self, number: int) -> None:
        if not self._signalled.is_set():
            log.info("%s: draining", signal.Signals(number).name)
            self._table.draining = True
            self._events.add(pb.EVENT_KIND_DRAINING, f"{signal.Signals(number).name}: {len(self._work)} still open")
            self._notifier.stopping(f"draining, {len(self._work)} still open")
            self._update_health()
            self._signalled.set()
            self._signalled_s = time.monotonic()
            return
        if time.monotonic() - self._signalled_s < SAME_SIGNAL_S:
            return
        log.warning("second signal: ending at once")
        self._supervisor.kill()
        self._tokenizers.kill()
        self._grammars.kill()
        self._listeners.release()
        self._metrics.release()
        os._exit(128 + number)

    async def _drain(self, generation: GenerationService) -> None:
        """Streams and warming jobs go on for a while; what is left is ended."""
        if self._supervisor.state is EngineState.READY and await self._work.wait_idle(self._config.drain_window_s):
            return
        num_ended = sum(generation.abort(request) for request in self._table)
        num_jobs = self._work.abort_jobs(RequestError(ErrorReason.DRAINING, "the server is draining"))
        log.warning("drain window over: %d answers and %d warming jobs ended", num_ended, num_jobs)
        ended = f"drain window over: {num_ended} answers and {num_jobs} warming jobs"
        self._events.add(pb.EVENT_KIND_REQUESTS_ENDED, ended, count=num_ended + num_jobs)
        await self._work.wait_idle(LAST_WORDS_S)


def _version() -> str:
    try:
        return version("downcore")
    except PackageNotFoundError:
        return "0+uninstalled"
