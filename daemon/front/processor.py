"""The front on one processor: its threads take turns in any case, and wake each other several times for every message.

One interpreter's lock keeps the front from using two processors at once. What its threads do in turns (gRPC's input and
output, its completion queue, the event loop) wakes the next one up, on another processor often, which in a virtual
machine is an exit to the host. On one processor it is a switch. Children get back what the front was given.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

GIVEN = frozenset(os.sched_getaffinity(0))  # the processors of this process, before it keeps to one
FEW = 8  # with more processors than this, waking is cheap beside the risk of choosing one that others keep busy


def keep_to_one() -> bool:
    """Keeps this thread, and the threads that it makes from now on, to one of a few processors.

    Returns: whether it does; not where there is only one, or where there are more than a few.
    """
    if not 1 < len(GIVEN) <= FEW:
        return False
    os.sched_setaffinity(0, {sorted(GIVEN)[os.getpid() % len(GIVEN)]})  # daemons side by side: each its own
    return True


@contextmanager
def all_given() -> Generator[None]:
    """Within it this thread, and what it starts, has every processor that the front was given."""
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, GIVEN)
    try:
        yield
    finally:
        os.sched_setaffinity(0, kept)
