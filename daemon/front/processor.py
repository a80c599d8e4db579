"""The front on one processor: its threads take turns in any case, and wake each other several times for every message.

One interpreter's lock keeps the front from using two processors at once. What its threads do in turns (gRPC's input and
output, its completion queue, the event loop) wakes the next one up, on another processor often, which in a virtual
machine is an exit to the host; on one processor it is a switch. And under the batch policy who is woken waits for its
turn: the completion queue's thread comes once for many messages, not in the middle of each. The event loop alone does
not wait: what the engine says is answered at once. Children get back what the front was given.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

GIVEN = frozenset(os.sched_getaffinity(0))  # the processors of this process, before it keeps to one
GIVEN_POLICY = os.sched_getscheduler(0)
FEW = 8  # with more processors than this, waking is cheap beside the risk of choosing one that others keep busy
_NO_PRIORITY = os.sched_param(0)


def keep_to_one() -> bool:
    """Keeps this thread, and the threads that it makes from now on, to one of a few processors, in turns.

    Returns: whether it does; not where there is only one, or where there are more than a few, or another policy than
    the usual one was chosen for it.
    """
    if not 1 < len(GIVEN) <= FEW or GIVEN_POLICY != os.SCHED_OTHER:
        return False
    os.sched_setaffinity(0, {sorted(GIVEN)[os.getpid() % len(GIVEN)]})  # daemons side by side: each its own
    os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)
    return True


def go_first() -> None:
    """This thread, the event loop's, does not wait for its turn; the ones that were made before it go on to."""
    os.sched_setscheduler(0, GIVEN_POLICY, _NO_PRIORITY)


@contextmanager
def as_given() -> Generator[None]:
    """Within it this thread, and what it starts, has the processors and the policy that the front was given."""
    kept, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    if kept == set(GIVEN):
        yield
        return
    os.sched_setaffinity(0, GIVEN)
    os.sched_setscheduler(0, GIVEN_POLICY, _NO_PRIORITY)
    try:
        yield
    finally:
        os.sched_setaffinity(0, kept)
        os.sched_setscheduler(0, policy, _NO_PRIORITY)
