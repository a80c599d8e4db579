"""Who sleeps until a poll has something to do."""

import select
import threading

from tiers.mover import ThreadMover


def test_a_wake_from_any_thread_lasts_until_the_next_poll() -> None:
    mover = ThreadMover(1)
    waker = threading.Thread(target=mover.wake)
    waker.start()
    assert select.select([mover], [], [], 60)[0]
    waker.join()
    mover.poll()
    assert not select.select([mover], [], [], 0)[0]
    mover.close()
