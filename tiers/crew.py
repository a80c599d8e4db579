"""Threads that do blocking file work for callers who will not wait for ever.

A caller waits for its job with a deadline. When it leaves, the job must have no effect that the caller would not
expect: work asks `commit()` before its point of no return, and is told whether anybody still wants the effect. A thread
stuck in the kernel keeps its job and its buffers until the kernel lets go.
"""

import threading
import time
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class _State(Enum):
    OPEN = "open"  # queued or running, without effect so far
    COMMITTED = "committed"  # past its point of no return
    LEFT = "left"  # the caller has gone, before that


class Job(Generic[T]):
    """One piece of work, its result, and who leaves whom."""

    def __init__(self, work: Callable[["Job[T]"], T]) -> None:
        self.is_started = False
        self._work = work
        self._state = _State.OPEN
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def commit(self) -> bool:
        """Called by the work: from here on the caller waits. False where the caller has left: then do nothing more."""
        with self._lock:
            if self._state is _State.LEFT:
                return False
            self._state = _State.COMMITTED
            return True

    @property
    def is_left(self) -> bool:
        """Whether the caller has gone already: work that begins so late need not."""
        return self._state is _State.LEFT

    def leave(self) -> bool:
        """Called by the caller: True where the job will have no effect; False where it is past that point."""
        with self._lock:
            if self._state is _State.COMMITTED:
                return False
            self._state = _State.LEFT
            return True

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the job is finished."""
        return self._done.wait(timeout_s)

    def result(self) -> T:
        """What the work returned, or its exception. Only after `wait` said True."""
        assert self._done.is_set()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever there is no error

    def run(self) -> None:
        """Does the work, and keeps its result or exception."""
        self.is_started = True
        try:
            self._result = self._work(self)
        except BaseException as error:  # it is raised where the result is asked for
            self._error = error
        self._done.set()


class Crew:
    """A fixed number of threads and one queue, first in first out. They are daemons: none keeps a process alive."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.finished = 0  # jobs; a caller sees by it whether anything moves at all
        self._queue: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Job[T]], T]) -> Job[T]:
        """Queues work."""
        job = Job(work)
        self._queue.put(job)  # type: ignore[arg-type]  # the queue's threads do not look at results
        return job

    def close(self, timeout_s: float) -> bool:
        """Lets the queue run dry and ends the threads; False where one did not end in time."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            self.finished += 1  # approximately, with several threads: only whether it moves matters
            del job  # what the work closed over goes with it, not with the next job
