"""Which of many cases a run takes: all on a card and in a whole campaign, elsewhere a few, others from day to day."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

import torch

from tests.campaigns.budget import first_seed, is_full

Case = TypeVar("Case")


def some(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases where the run is a short one, by the day or by DOWNCORE_SEED."""
    if is_full() or torch.cuda.is_available():
        return list(cases)
    return Random(first_seed()).sample(cases, count)
