"""The engine process: started, watched, started again; and everything the front knows of it.

What must hold: at most one engine lives; the moment its socket closes or its process ends, every request it had fails
with UNAVAILABLE; a quick series of deaths slows the starts down but never ends them, once an engine was ready.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable
from enum import Enum

from downcore.v1 import admin_pb2 as pb

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front.child import Child
from daemon.front.config import FrontConfig
from daemon.front.events import EventLog
from daemon.front.kv_feeds import KvFeeds
from daemon.front.link import EngineLink
from daemon.front.questions import A, Asked, Questions
from daemon.front.requests import RequestTable
from daemon.front.warm import WarmJobs
from daemon.kv_messages import KvBatch, KvSnapshot

log = logging.getLogger("downcore.front")

QUICK_DEATH_S = 30.0  # an engine that was ready for less has died quickly
SHUTDOWN_WAIT_S = 20.0  # for an engine to prove its ledger and leave, beside what it has for writing down
LOAD_PATIENCE_S = 600.0  # an engine that loads and has said nothing for so long is stuck
# How long the engine's compute threads spin for each other before they sleep (GNU OpenMP). The default is five times
# this: as soon as anything else wants their cores, the thread that has work waits for the one that spins, and a forward
# takes ten times as long. Without spinning it takes twice as long on idle cores; at a third of this a decode step's
# small operations let threads fall asleep between two matrices, and it takes a tenth longer.
# And large memory pages where the system offers them, which the C library gives for what lies in its heap alone: a
# decode step reads all weights once, and on small pages takes another tenth.
ENGINE_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "60000",
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.hugetlb=1",
            f"glibc.malloc.mmap_threshold={32 << 20}",  # bytes, the most that it takes
            f"glibc.malloc.trim_threshold={1 << 30}",
        )
    ),
}


TIER_EVENTS = {
    messages.TierEventKind.DEGRADED: pb.EVENT_KIND_TIER_DEGRADED,
    messages.TierEventKind.RECOVERED: pb.EVENT_KIND_TIER_RECOVERED,
    messages.TierEventKind.EVICTED: pb.EVENT_KIND_TIER_EVICTED,
    messages.TierEventKind.QUARANTINED: pb.EVENT_KIND_TIER_QUARANTINED,
    messages.TierEventKind.DROPPED: pb.EVENT_KIND_TIER_DROPPED,
}


class EngineState(Enum):
    """Where the engine is."""

    LOADING = "loading"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


class EngineFailed(Exception):
    """No engine could be started; trying again would not help."""


class Supervisor:
    """Runs the engine. `on_change` is called after every change of state."""

    def __init__(
        self,
        config: FrontConfig,
        table: RequestTable,
        jobs: WarmJobs,
        events: EventLog,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._events = events
        self._table = table
        self._jobs = jobs
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._link: EngineLink | None = None
        self._process: Child | None = None
        self._questions = Questions(self.send)
        self.feeds = KvFeeds(self.send)
        self._load_failure: str | None = None
        self._pulse_s = 0.0
        self._heard_s = self._loop.time()  # the last sign of life: of an engine, or that one is being started
        self._ready_s = 0.0
        self._stopping = False
        self.state = EngineState.DOWN
        self.info: messages.EngineInfo | None = None  # of the last engine that was ready
        self.starts = 0
        self.steps = 0
        self.loaded = 0.0  # fraction of the weights read
        self.ready = asyncio.Event()  # set while an engine is

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def pulse_age_s(self) -> float:
        """Since the step clock was last heard; meaningless before an engine was ready."""
        return self._loop.time() - self._pulse_s

    @property
    def is_serving(self) -> bool:
        """The engine is ready and its step clock turns."""
        return self.state is EngineState.READY and self.pulse_age_s < self._config.pulse_timeout_s

    @property
    def is_alive(self) -> bool:
        """The step clock turns, or an engine is on its way to turn it: nobody has to end this daemon from outside."""
        if self.state is EngineState.READY and not self._stopping:
            return self.is_serving
        return self._loop.time() - self._heard_s < LOAD_PATIENCE_S

    async def run(self) -> None:
        """Keeps an engine running until `stop`.

        Raises:
            EngineFailed: none was ever ready, and the engine says why or has died too often.
        """
        deaths = 0
        while not self._stopping:
            why = await self._run_once()
            if self._stopping:
                return
            was_ready = self._ready_s > 0
            lived_s = self._loop.time() - self._ready_s if was_ready else 0.0
            deaths = 1 if lived_s > QUICK_DEATH_S else deaths + 1
            log.error("engine gone: %s; start %d, quick deaths %d", why, self.starts, deaths)
            self._events.add(pb.EVENT_KIND_ENGINE_GONE, why, count=self.starts)
            if self.info is None:
                if self._load_failure is not None:
                    raise EngineFailed(self._load_failure)
                if deaths >= self._config.max_failed_starts:
                    raise EngineFailed(f"the engine died {deaths} times before it was ready ({why})")
            if deaths > 1 or self._load_failure is not None:
                delay_s = self._config.restart_backoff_s * 2 ** min(deaths - 1, 20)
                await asyncio.sleep(min(delay_s, self._config.restart_backoff_max_s))

    def send(self, message: messages.ToEngine) -> None:
        """Sends to the engine, where there is one."""
        if self._link is not None:
            self._link.send(message)

    def submit(self, message: messages.Submit | cm.Warm) -> None:
        """Sends a request or a prompt to be warmed.

        Raises:
            RequestError: no engine is ready, or it does not take what it is sent.
        """
        self.require_ready()
        assert self._link is not None
        if self._link.is_full:
            raise RequestError(ErrorReason.QUEUE_FULL, "the engine is too busy to take requests")
        self._link.send(message)

    def require_ready(self) -> messages.EngineInfo:
        """The engine's description; raises RequestError while none is ready."""
        if self.state is not EngineState.READY or self.info is None:
            what = "is loading" if self.state is EngineState.LOADING else "is being started again"
            raise RequestError(ErrorReason.ENGINE_UNAVAILABLE, f"the engine {what}")
        return self.info

    async def ask(self, make: Callable[[int], Asked], kind: type[A]) -> A:
        """Asks the engine what it can tell at once.

        Raises:
            RequestError: no engine, no answer in time, too many questions are open, or the engine refuses.
        """
        self.require_ready()
        return await self._questions.ask(make, kind, self._config.query_timeout_s)

    async def query(self, kind: messages.QueryKind, sequence_id: str = "") -> messages.Answer:
        """Asks the engine for a table. Raises: as `ask`."""
        return await self.ask(lambda query_id: messages.Query(query_id, kind, sequence_id), messages.Answer)

    async def flush(self, tier: cm.TierName) -> cm.Flushed:
        """Has a tier written down, however long that takes. Raises: as `ask`."""
        self.require_ready()
        return await self._questions.ask(lambda query_id: cm.Flush(query_id, tier), cm.Flushed, None)

    def verify(self, tier: cm.TierName) -> AsyncGenerator[cm.VerifyProgress | cm.VerifyDone]:
        """Has a tier read and checked: progress, then the report. Closing it stops it. Raises: as `ask`."""
        self.require_ready()
        return self._questions.verify(tier)

    async def stop(self) -> None:
        """Lets the engine release everything and leave; kills it where it does not in time."""
        self._stopping = True
        self.feeds.fail(RequestError(ErrorReason.DRAINING, "the server is stopping"))
        if self.state is EngineState.READY:
            self.send(messages.Shutdown())
        else:
            self.kill()
        if self._process is not None:
            try:
                async with asyncio.timeout(SHUTDOWN_WAIT_S + self._config.engine.flush_window_s):
                    await self._process.wait()
            except TimeoutError:
                log.error("the engine did not leave in time and is killed")
                self.kill()
                await self._process.wait()
        self._set_state(EngineState.STOPPED)

    def kill(self) -> None:
        """Ends the engine process at once."""
        if self._process is not None:
            self._process.kill()

    async def _run_once(self) -> str:
        """One engine from its start to its end. Returns: why it ended."""
        self._load_failure = None
        self._ready_s = 0.0
        self.loaded = 0.0
        self.steps = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.setblocking(False)
            command = (*self._config.engine_command, "--fd", str(theirs.fileno()))
            self._process = process = Child(command, pass_fds=(theirs.fileno(),), environment=ENGINE_ENVIRONMENT)
        except OSError as error:
            ours.close()
            return f"cannot be spawned ({error.strerror})"
        finally:
            theirs.close()
        self.starts += 1
        self._set_state(EngineState.LOADING)
        self._heard_s = self._loop.time()
        log.info("engine started: pid %d, start %d", process.pid, self.starts)
        self._events.add(pb.EVENT_KIND_ENGINE_STARTED, f"engine started: pid {process.pid}", count=self.starts)
        link = await EngineLink.connect(ours, self._receive)
        self._link = link
        link.send(messages.Configure(self._config.engine, self._config.log_format))
        exited = asyncio.ensure_future(process.wait())
        why = ""
        try:
            await asyncio.wait((link.closed, exited), return_when=asyncio.FIRST_COMPLETED)
            # A process that has ended may have said why; its last words are in the socket.
            if exited.done():
                await asyncio.wait((link.closed,), timeout=1.0)
            else:
                why = f" after {link.closed.result()} on its socket"
        finally:
            self._link = None
            link.close()
            self._lost()
            self.kill()
        return self._load_failure or f"exit status {await exited}{why}"

    def _lost(self) -> None:
        """Every request of an engine that is gone fails now."""
        error = RequestError(ErrorReason.ENGINE_UNAVAILABLE, "the engine has died and is being started again")
        num_failed = self._table.fail_submitted(error)
        self._questions.fail(error)
        self.feeds.fail(error)
        self._jobs.lose_engine(error)
        if num_failed:
            log.error("%d requests failed with their engine", num_failed)
        self._set_state(EngineState.DOWN)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        if state is EngineState.READY:
            self.ready.set()
        else:
            self.ready.clear()
        self._on_change()

    def _receive(self, message: messages.ToFront) -> None:
        match message:
            case messages.StepOutput():
                self._step(message)
            case messages.Pulse():
                self._pulse_s = self._loop.time()
                self.steps = message.steps
            case messages.Started():
                self._table.meters.prompt_computed(message.usage)
                request = self._table.find_wire(message.request_id)
                if request is not None:
                    request.start(message.usage)
            case messages.Rejected():
                request = self._table.find_wire(message.request_id)
                if request is not None:
                    request.fail(
                        RequestError(
                            message.reason, message.message, field=message.field, retry_after_s=message.retry_after_s
                        )
                    )
                else:
                    self._jobs.receive(message)
            case cm.WarmProgress() | cm.WarmDone():
                self._jobs.receive(message)
            case KvBatch() | KvSnapshot():
                self.feeds.receive(message)
            case messages.Loading():
                self._heard_s = self._loop.time()
                self.loaded = message.done_bytes / max(message.total_bytes, 1)
            case messages.Ready():
                self.info = message.info
                self.loaded = 1.0
                self._ready_s = self._pulse_s = self._loop.time()
                self._events.add(pb.EVENT_KIND_ENGINE_READY, f"engine ready: {message.info.model}", count=self.starts)
                self._set_state(EngineState.READY)
                log.info("engine ready: %s", message.info.model)
            case messages.TierEvent():
                self._events.add(
                    TIER_EVENTS[message.kind], message.message, tier=message.tier.value, count=message.count
                )
            case messages.LoadFailed():
                self._load_failure = message.message
            case _:
                self._questions.receive(message)

    def _step(self, output: messages.StepOutput) -> None:
        now_s = time.monotonic()
        self._pulse_s = self._loop.time()
        self._table.meters.answer_tokens += len(output.tokens)
        # The token that ended an answer by its id has no text.
        hidden = {(f.request_id, f.index): f.stop_token_id for f in output.finished if f.stop_token_id is not None}
        find = self._table.find_wire
        for token in output.tokens:
            request = find(token.request_id)
            if request is None:
                continue
            hide_text = bool(hidden) and hidden.get((token.request_id, token.index)) == token.token_id
            stop = request.add(token, hide_text, now_s)
            if stop is not None:
                self.send(stop)
        for finished in output.finished:
            request = find(finished.request_id)
            if request is not None:
                request.finish(finished)
