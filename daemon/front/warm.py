"""Warming jobs: the prompts of WarmPrefix calls, from the first call to the receipt.

Who touches what: the job's own task puts prompts in, the engine's link brings progress and ends, the calls that listen
read; all on the event loop, so there is no lock. What must hold: a job is driven by one task however many calls listen;
progress never piles up, since a listener reads what is so now;
what arrives for a job that has ended is dropped.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason, RequestError
from daemon.front.held import Holding
from daemon.front.limits import QueuedTokens
from daemon.front.wire_ids import warm_wire_id

MAX_JOBS = 64  # running at a time
MAX_RECEIPTS = 1024
RECEIPT_KEPT_S = 3600.0


@dataclass(slots=True, eq=False)
class WarmPart:
    """One prompt of a job. `version` grows with each change, so that a listener knows what it has seen."""

    num_tokens: int
    stage: cm.WarmStage = cm.WarmStage.QUEUED
    done_tokens: int = 0
    total_tokens: int = 0
    version: int = 0
    is_done: bool = False
    ended: "asyncio.Future[cm.WarmDone] | None" = None  # set while the engine has it, and after


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of each prompt, in order, and how long each was."""

    prompt_tokens: tuple[int, ...]
    done: tuple[cm.WarmDone, ...]
    time_s: float  # Unix


@dataclass(slots=True, eq=False)
class WarmJob:
    """One job. It is over once it has a receipt or an error."""

    key: str
    owner: str  # the namespace of its caller, which alone knows it by its key
    serial: int
    digest: bytes  # of the content
    is_detached: bool
    parts: list[WarmPart] = field(default_factory=list[WarmPart])  # empty until all prompts are tokenized
    receipt: Receipt | None = None
    error: RequestError | None = None
    num_listeners: int = 0
    task: "asyncio.Task[None] | None" = None  # drives it
    queued: QueuedTokens | None = None  # of its caller's limit, until it is over
    held: Holding | None = None  # its prompts' bytes, as long as it may outlive its call
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # is set at the next change, and replaced

    @property
    def is_over(self) -> bool:
        return self.receipt is not None or self.error is not None

    def wire_id(self, index: int) -> str:
        """What the engine knows a prompt by."""
        return warm_wire_id(self.key, self.serial, index)

    def wake(self) -> None:
        """Tells the listeners."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def begin(self, prompt_tokens: tuple[int, ...]) -> None:
        """All prompts are tokenized."""
        self.parts = [WarmPart(num_tokens) for num_tokens in prompt_tokens]
        self.wake()

    def end(self, ended: Receipt | RequestError) -> None:
        """The job is over; the first end counts."""
        if not self.is_over:
            if isinstance(ended, Receipt):
                self.receipt = ended
            else:
                self.error = ended
            self.wake()

    def cancel(self, error: RequestError) -> None:
        """Ends it, and what drives it."""
        self.end(error)
        if self.task is not None:
            # Not before its first step: a task that never began would not clean up either.
            self.task.get_loop().call_soon(self.task.cancel)


@dataclass(frozen=True, slots=True)
class _Kept:
    digest: bytes
    receipt: Receipt
    until_s: float


class WarmJobs:
    """The jobs that run, by owner and key, and the receipts of those that ended. Bounded both."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], WarmJob] = {}
        self._parts: dict[str, tuple[WarmJob, WarmPart]] = {}  # those that the engine has, by wire id
        self._receipts: OrderedDict[tuple[str, str], _Kept] = OrderedDict()  # oldest first
        self._serial = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[WarmJob]:
        """Over those running now; ending them on the way is allowed."""
        return iter(tuple(self._jobs.values()))

    def find_all(self, key: str) -> list[WarmJob]:
        """The running jobs of this key, whoever owns them: for operators."""
        return [job for job in self._jobs.values() if job.key == key]

    def join(self, key: str, owner: str, digest: bytes, now_s: float) -> WarmJob | Receipt | None:
        """What a call with this key and content joins: a running job, or the receipt of one.

        Raises:
            RequestError: the key names a job of other content.
        """
        job, kept = self._jobs.get((owner, key)), self._receipts.get((owner, key))
        if kept is not None and kept.until_s <= now_s:
            del self._receipts[owner, key]
            kept = None
        known = job or kept
        if known is not None and known.digest != digest:
            text = "names a job of other prompts or settings"
            raise RequestError(ErrorReason.ALREADY_EXISTS, text, field="key")
        return job or (kept.receipt if kept is not None else None)

    def open(self, key: str, owner: str, digest: bytes, *, is_detached: bool) -> WarmJob:
        """Adds a job; an empty key is given a fresh one.

        Raises:
            RequestError: too many run.
        """
        assert (owner, key) not in self._jobs
        if len(self._jobs) >= MAX_JOBS:
            raise RequestError(ErrorReason.QUEUE_FULL, f"{MAX_JOBS} warming jobs run, which is the limit")
        self._serial += 1
        name = key or f"w-{self._serial}"
        while (owner, name) in self._jobs or (not key and (owner, name) in self._receipts):
            self._serial += 1
            name = f"w-{self._serial}"
        job = self._jobs[owner, name] = WarmJob(name, owner, self._serial, digest, is_detached)
        self._idle.clear()
        return job

    def close(self, job: WarmJob, *, keep_until_s: float | None) -> None:
        """Removes a job that is over; its receipt is kept where it has one and a time is given."""
        assert job.is_over
        del self._jobs[job.owner, job.key]
        if job.receipt is not None and keep_until_s is not None:
            self._receipts[job.owner, job.key] = _Kept(job.digest, job.receipt, keep_until_s)
            self._receipts.move_to_end((job.owner, job.key))
            if len(self._receipts) > MAX_RECEIPTS:
                self._receipts.popitem(last=False)
        if not self._jobs:
            self._idle.set()

    def submit(self, job: WarmJob, index: int) -> "asyncio.Future[cm.WarmDone]":
        """The engine is about to be sent this prompt. Returns: its end, which may be a RequestError."""
        part = job.parts[index]
        part.ended = asyncio.get_running_loop().create_future()
        self._parts[job.wire_id(index)] = (job, part)
        return part.ended

    def withdraw(self, job: WarmJob) -> list[messages.Abort]:
        """Nothing more of this job is waited for. Returns: what ends each prompt that the engine still has."""
        wire_ids = [job.wire_id(index) for index in range(len(job.parts))]
        still_there = [wire_id for wire_id in wire_ids if self._parts.pop(wire_id, None) is not None]
        for part in job.parts:
            if part.ended is not None and not part.ended.cancel() and not part.ended.cancelled():
                part.ended.exception()  # asyncio complains of an exception that nobody looked at
        return [messages.Abort(wire_id) for wire_id in still_there]

    def receive(self, message: cm.WarmProgress | cm.WarmDone | messages.Rejected) -> None:
        """Takes what the engine sent of a prompt."""
        job, part = self._parts.get(message.request_id, (None, None))
        if job is None or part is None or part.ended is None or part.ended.done():
            return
        part.version += 1
        match message:
            case cm.WarmProgress():
                part.stage = message.stage
                part.done_tokens, part.total_tokens = message.done_tokens, message.total_tokens
            case cm.WarmDone():
                del self._parts[message.request_id]
                part.done_tokens = part.total_tokens = message.tokens
                part.is_done = True
                part.ended.set_result(message)
            case messages.Rejected():
                del self._parts[message.request_id]
                part.ended.set_exception(
                    RequestError(
                        message.reason, message.message, field=message.field, retry_after_s=message.retry_after_s
                    )
                )
        job.wake()

    def lose_engine(self, error: RequestError) -> None:
        """The engine is gone, and with it what it had of every job; what receipts said may be so no longer."""
        self._receipts.clear()
        for _, part in self._parts.values():
            if part.ended is not None and not part.ended.done():
                part.ended.set_exception(error)
        self._parts.clear()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no job runs. Returns: whether that is so."""
        if self._jobs and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                pass
        return not self._jobs

    def check(self) -> None:
        """Raises AssertionError where a bound is passed or the indexes differ."""
        assert len(self._jobs) <= MAX_JOBS
        assert len(self._receipts) <= MAX_RECEIPTS
        for job, part in self._parts.values():
            assert self._jobs.get((job.owner, job.key)) is job
            assert part in job.parts
