"""One tunable kernel at one shape: what may be tried, on which inputs, and what is right (for ops/bench/tune.py)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch

from kernels.launch_table import Tunable

Tensors = tuple[torch.Tensor, ...]
Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Rows:
    """A bucket of numbers of rows, and those of them that stand for it."""

    most: int | None  # as in the table; None: any number
    measured: tuple[int, ...]
    candidates: tuple[Any, ...]  # beside the default


@dataclass(frozen=True, slots=True)
class Case:
    """One tunable at one shape. Where it is not neutral there is one bucket, whose choice must do for all its rows."""

    tunable: Tunable[Any]
    shape: dict[str, int]
    buckets: tuple[Rows, ...]
    make: Callable[[int, int], Any]  # inputs from a number of rows and a seed
    run: Callable[[Any, Any], Tensors]  # launches once with a choice; all that it wrote
    reference: Callable[[Any], Tensors]  # the same by torch's form, or as `run` of that
    input_bytes: Callable[[int], float]  # of one set, from a number of rows
    few_rows: int = 64  # enough to compile the very kernels that are measured
    load: Callable[[int], int] = int  # of a number of rows, what the table's buckets go by
    capture: bool = True

    @property
    def name(self) -> str:
        return f"{self.tunable.kernel} {'x'.join(map(str, self.shape.values()))}".strip()

    def default(self, num_rows: int) -> Any:
        """What is chosen for so many rows where there is no table."""
        load = self.load(num_rows)
        of_shape = self.tunable.default(*self.shape.values())
        return next(one.choice for one in of_shape if one.most_rows is None or load <= one.most_rows)


def choices(kind: Callable[..., Choice], **fields: Iterable[object]) -> tuple[Choice, ...]:
    """Every combination of some fields' values."""
    return tuple(kind(**dict(zip(fields, values, strict=True))) for values in product(*fields.values()))
