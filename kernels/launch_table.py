"""How kernels are launched, by shape: the table that `downcore bench tune` made, and defaults where it says nothing.

A wrapper's `Tunable` names what may be chosen (tiles, warps, stages), by which constants of a model, and a default. A
look-up takes the choice from `tables/sm_NN.json` of the card's kind, or the default; it never measures anything.

A row's bytes must not depend on the rows beside it. So a choice that can reach a byte, because it changes the order of
a sum, is made by shape constants alone: heads, widths, dimensions. Only a neutral one, which reaches none, may follow
the number of rows, and how long a history is chooses nothing at all. `buckets` refuses a table or a default that breaks
this, `downcore bench tune` compares the bytes of what is called neutral, and the numerics profile covers the tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

TABLES = Path(__file__).parent / "tables"

Choice = TypeVar("Choice")


class TableError(Exception):
    """A table, or a default, that breaks a rule; the text says which entry and which rule."""


@dataclass(frozen=True, slots=True)
class Bucket(Generic[Choice]):
    """What to choose for launches of at most so many rows."""

    most_rows: int | None  # None: any number
    choice: Choice


@dataclass(frozen=True, slots=True)
class Tunable(Generic[Choice]):
    """What of one kernel's launch may be chosen: the fields of `Choice`, a frozen dataclass of whole numbers."""

    kernel: str
    shape: tuple[str, ...]  # constants of a model by which it is chosen
    default: Callable[..., tuple[Bucket[Choice], ...]]  # of these constants, in order
    neutral: bool  # no byte of any result depends on the choice

    def look_up(self, device: torch.device, *, num_rows: int = 1, **shape: int) -> Choice:
        """The choice for a launch of so many rows; `num_rows` counts where the tunable is neutral.

        Raises TableError where the table of this kind of card breaks a rule.
        """
        of_shape = _shipped_buckets(self, arch_of(device), tuple(shape[name] for name in self.shape))
        return next(one.choice for one in of_shape if one.most_rows is None or num_rows <= one.most_rows)


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Medians of one launch, as they were measured beside each other."""

    num_rows: int
    us: float
    default_us: float


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a table."""

    kernel: str
    shape: dict[str, int]
    most_rows: int | None
    choice: dict[str, Any]
    timings: tuple[Timing, ...]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found on one kind of card."""

    device: str
    date: str
    versions: dict[str, str]
    entries: tuple[Entry, ...] = ()


def one_bucket(choice: Choice) -> tuple[Bucket[Choice], ...]:
    """One choice for any number of rows."""
    return (Bucket(None, choice),)


def table_path(arch: str) -> Path:
    """Where the table of a kind of card is, such as sm_90."""
    return TABLES / f"{arch}.json"


@cache
def arch_of(device: torch.device) -> str | None:
    """The kind of card that a device is; None: no card."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def read_table(path: Path) -> Table | None:
    """A table; None where there is none. Raises TableError where it is not one."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except msgspec.MsgspecError as error:
        raise TableError(f"{path.name}: {error}") from None


def buckets(tunable: Tunable[Choice], table: Table | None, shape: tuple[int, ...]) -> tuple[Bucket[Choice], ...]:
    """The choices of a shape by rising numbers of rows, of the table or by default; raises TableError."""
    found = tunable.default(*shape)
    entries = () if table is None else table.entries
    wanted = dict(zip(tunable.shape, shape, strict=True))
    of_kernel = [entry for entry in entries if entry.kernel == tunable.kernel]
    for entry in of_kernel:
        if entry.shape.keys() != wanted.keys():
            raise TableError(f"{tunable.kernel}: chosen by {', '.join(tunable.shape)}, not by {', '.join(entry.shape)}")
    of_shape = [entry for entry in of_kernel if entry.shape == wanted]
    if of_shape:
        kind = type(found[0].choice)
        found = tuple(Bucket(entry.most_rows, _as_choice(tunable.kernel, entry.choice, kind)) for entry in of_shape)
    _check_rows(tunable, found)
    return found


@cache
def shipped_table(arch: str) -> Table | None:
    """The table of a kind of card, read once a process."""
    return read_table(table_path(arch))


@cache
def _shipped_buckets(tunable: Tunable[Any], arch: str | None, shape: tuple[int, ...]) -> tuple[Bucket[Any], ...]:
    return buckets(tunable, None if arch is None else shipped_table(arch), shape)


def _as_choice(kernel: str, given: Mapping[str, Any], kind: type[Choice]) -> Choice:
    try:
        choice = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise TableError(f"{kernel}: {error}") from None
    if asdict(choice) != given:  # pyright: ignore[reportArgumentType]
        raise TableError(f"{kernel}: {given} has fields that {kind.__name__} lacks, or lacks some of its own")
    return choice


def _check_rows(tunable: Tunable[Choice], found: tuple[Bucket[Choice], ...]) -> None:
    """Any number of rows has a choice, and what reaches bytes has one for all."""
    bounds = [one.most_rows for one in found]
    limits = [bound for bound in bounds if bound is not None]
    if bounds[-1] is not None or len(limits) != len(bounds) - 1 or limits != sorted(set(limits)):
        raise TableError(f"{tunable.kernel}: rows up to {bounds}: bounds rise, and the last entry has none")
    if limits and not tunable.neutral:
        raise TableError(f"{tunable.kernel}: its choice reaches bytes, and may not depend on the number of rows")
