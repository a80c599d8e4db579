"""Threads that move bytes: work goes in by priority, and what it led to is told to the engine's thread.

A job has two halves. `work` runs on an I/O thread and touches bytes only, which its owner's resources keep in place;
`done` runs later on the thread that owns the books, when it polls, with the exception that `work` raised, if any.
Reads have threads of their own, so that a slow write never keeps a restore waiting; there is one writer.
"""

import contextlib
import heapq
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Priority(IntEnum):
    """Lower goes first."""

    RESTORE = 0
    WRITE_DOWN = 1
    CLEAN_UP = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer."""

    priority: Priority
    work: Callable[[], None]
    done: Callable[[Exception | None], None]


class Mover(Protocol):
    """Runs jobs somewhere, and `done` of each on the thread that polls."""

    def submit(self, job: Job) -> None: ...

    def poll(self) -> None:
        """Calls `done` of every job whose work has ended since the last poll."""
        ...

    @property
    def num_pending(self) -> int:
        """Jobs whose `done` has not been called."""
        ...

    def fileno(self) -> int:
        """Readable when a poll has something to do, or somebody was to be woken."""
        ...

    def wake(self) -> None:
        """Makes it readable until the next poll. Any thread may call it, until it is closed."""
        ...

    def close(self) -> None:
        """Ends what has begun, drops the rest, and calls `done` of all."""
        ...


class ThreadMover:
    """`num_readers` threads for restores and one for everything else. `fileno` is readable when a poll has work."""

    def __init__(self, num_readers: int) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reads: list[tuple[int, int, Job]] = []
        self._writes: list[tuple[int, int, Job]] = []
        self._ended: deque[tuple[Job, Exception | None]] = deque()
        self._submitted = 0
        self._num_pending = 0
        self._is_closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        queues = [self._reads] * num_readers + [self._writes]
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"mover-{i}", daemon=True)
            for i, queue in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def fileno(self) -> int:
        return self._event

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def submit(self, job: Job) -> None:
        queue = self._reads if job.priority is Priority.RESTORE else self._writes
        with self._changed:
            assert not self._is_closed
            self._submitted += 1
            self._num_pending += 1
            heapq.heappush(queue, (job.priority, self._submitted, job))
            self._changed.notify_all()

    def poll(self) -> None:
        with contextlib.suppress(BlockingIOError):  # that of a job may come after the poll that told of it
            os.eventfd_read(self._event)
        while self._ended:
            job, error = self._ended.popleft()
            self._num_pending -= 1
            job.done(error)

    def close(self) -> None:
        """What is dropped ends with InterruptedError."""
        with self._changed:
            self._is_closed = True
            for queue in (self._reads, self._writes):
                self._ended.extend((job, InterruptedError("closing")) for _, _, job in queue)
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.poll()
        os.close(self._event)

    def _run(self, queue: list[tuple[int, int, Job]]) -> None:
        while True:
            with self._changed:
                while not queue and not self._is_closed:
                    self._changed.wait()
                if not queue:
                    return
                _, _, job = heapq.heappop(queue)
            error: Exception | None = None
            try:
                job.work()
            except Exception as caught:  # told to the owner of the job, on its own thread
                error = caught
            self._ended.append((job, error))
            os.eventfd_write(self._event, 1)
