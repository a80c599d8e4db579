"""How much of a campaign this run does, and with which seeds.

Unset, a test runs its fraction with seeds that rotate by the day; DOWNCORE_CAMPAIGN=full runs all seeds from
DOWNCORE_SEED (0) on. Every seed is in the test's id, so that a failure names the run that repeats it.
"""

import os
import time


def is_full() -> bool:
    """A whole campaign is wanted."""
    return os.environ.get("DOWNCORE_CAMPAIGN") == "full"


def first_seed() -> int:
    """Where this run's seeds begin."""
    return int(os.environ.get("DOWNCORE_SEED") or (0 if is_full() else int(time.time()) // 86_400 * 1_000))


def seeds(*, fraction: int, full: int) -> list[int]:
    """`full` seeds in a whole campaign, else `fraction` of them."""
    return list(range(first_seed(), first_seed() + (full if is_full() else fraction)))
