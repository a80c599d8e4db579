"""What tuning found: a choice with its times, and the table while it is made."""

import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from kernels.launch_table import Entry, Table, Timing, read_table

LEAST_GAIN = 0.02  # less is what two runs of the same differ by
WORST_RATIO = 1.03  # at one number of rows, of a choice that gains over all


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice, measured: microseconds by numbers of rows."""

    choice: Any
    us: dict[int, float]

    def ratio(self, default: "Trial") -> float:
        """Geometric mean of the times, of the default's; the worst of them where that is too slow at some number."""
        ratios = [us / default.us[rows] for rows, us in self.us.items()]
        is_whole = self.us.keys() == default.us.keys() and max(ratios) < WORST_RATIO
        return prod(ratios) ** (1 / len(ratios)) if is_whole else max(*ratios, WORST_RATIO)

    def gains(self, default: "Trial") -> bool:
        """Whether it is faster by more than chance."""
        return self.ratio(default) <= 1 - LEAST_GAIN

    def entry(self, kernel: str, shape: dict[str, int], most_rows: int | None, default: "Trial") -> Entry:
        """As a row of the table."""
        timings = tuple(Timing(rows, round(us, 2), round(default.us[rows], 2)) for rows, us in self.us.items())
        return Entry(kernel, shape, most_rows, asdict(self.choice), timings)


class Record:
    """The table's file: read where it is there and of this device and these versions, written after every case."""

    def __init__(self, path: Path, device: str, versions: dict[str, str], *, again: bool) -> None:
        self.path = path
        self.table = Table(device, time.strftime("%Y-%m-%d", time.gmtime()), versions)
        old = read_table(path)
        if old is not None and (old.device, old.versions) == (device, versions):
            self.table = msgspec.structs.replace(self.table, entries=old.entries)
        self._known = {_key(entry) for entry in self.table.entries if not again}

    def lacks(self, kernel: str, shape: dict[str, int]) -> bool:
        """Whether a shape is still to be measured."""
        return (kernel, *shape.values()) not in self._known

    def add(self, entries: list[Entry]) -> None:
        """Takes what was found of one shape in the place of what was there, and writes the file."""
        new = {_key(entry) for entry in entries}
        kept = [entry for entry in self.table.entries if _key(entry) not in new]
        in_order = sorted([*kept, *entries], key=_key)  # a stable sort: buckets of a shape stay in their order
        self.table = msgspec.structs.replace(self.table, entries=tuple(in_order))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(msgspec.json.format(msgspec.json.encode(self.table), indent=1) + b"\n")


def _key(entry: Entry) -> tuple[str | int, ...]:
    return (entry.kernel, *entry.shape.values())


def line(entry: Entry) -> str:
    """One row of the table as text."""
    name = f"{entry.kernel} {'x'.join(map(str, entry.shape.values()))}"
    rows = "any rows" if entry.most_rows is None else f"to {entry.most_rows}"
    times = ", ".join(
        f"{one.num_rows}: {one.us:.1f} us of {one.default_us:.1f} ({one.us / one.default_us - 1:+.1%})"
        for one in entry.timings
    )
    return f"{name:<31} {rows:<9} {as_text(entry.choice):<52} {times}"


def as_text(choice: dict[str, Any]) -> str:
    """Fields of a choice, side by side."""
    parts: list[str] = []
    for name, value in choice.items():
        parts.append(f"{name} {value}" if isinstance(value, int) else f"{name} ({as_text(value)})")
    return " ".join(parts)
