"""The order in which jobs are done, which the tiers' books rely on."""

import select
import threading

from tiers.mover import Job, Priority, ThreadMover


def test_writes_are_done_one_after_another_the_urgent_first_and_else_as_they_came() -> None:
    mover = ThreadMover(num_readers=2)
    may_begin, order, ended, at_once = threading.Event(), list[str](), list[str](), list[int]()
    running = threading.Semaphore(1)

    def job(name: str, priority: Priority) -> Job:
        def work() -> None:
            may_begin.wait(10)
            at_once.append(running.acquire(blocking=False))
            order.append(name)
            running.release()

        return Job(priority, work, lambda error: ended.append(name))

    mover.submit(job("first", Priority.WRITE_DOWN))
    while mover._writes:  # the thread has taken it
        threading.Event().wait(0.001)
    names = ["first"]
    for priority in (Priority.CLEAN_UP, Priority.WRITE_DOWN):
        for number in range(10):
            mover.submit(job(f"{priority.name} {number}", priority))
    for priority in sorted((Priority.CLEAN_UP, Priority.WRITE_DOWN)):
        names += [f"{priority.name} {number}" for number in range(10)]
    may_begin.set()
    while mover.num_pending:
        select.select([mover], [], [], 10)
        mover.poll()
    assert order == ended == names
    assert all(at_once), "two at once"
    mover.close()


def test_a_wake_from_any_thread_lasts_until_the_next_poll() -> None:
    mover = ThreadMover(1)
    waker = threading.Thread(target=mover.wake)
    waker.start()
    assert select.select([mover], [], [], 60)[0]
    waker.join()
    mover.poll()
    assert not select.select([mover], [], [], 0)[0]
    mover.close()


def test_an_event_that_comes_after_the_poll_that_told_of_its_job_keeps_nobody_awake() -> None:
    mover, told = ThreadMover(1), threading.Event()
    mover._ended.append((Job(Priority.RESTORE, lambda: None, lambda error: told.set()), None))
    mover._num_pending += 1
    mover.poll()
    assert told.is_set()
    mover.wake()  # as the job's thread does, a moment later
    mover.poll()
    assert not select.select([mover], [], [], 0)[0], "whoever waits for it would never sleep again"
    mover.close()
