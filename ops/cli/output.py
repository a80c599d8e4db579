"""How results look: tables for people, JSON and CSV for programs. Works with and without a terminal."""

import base64
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ops.cli.app import Format

PLAIN_WIDTH = 200  # columns where there is no terminal to ask
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; wide and without colour where that is not a terminal."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def make_table(columns: Sequence[str], *, numeric: Sequence[str] = ()) -> Table:
    """A table with the given columns, those in `numeric` to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", no_wrap=True)
    return table


def make_wide_table(columns: Sequence[str], *, numeric: Sequence[str] = ()) -> Table:
    """As `make_table`, with its columns closer together, for those that would not fit otherwise."""
    table = make_table(columns, numeric=numeric)
    table.padding = (0, 1, 0, 0)
    return table


def make_facts(facts: Sequence[tuple[str, str]]) -> Table:
    """Name and value, one a line; values may fold."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def human_bytes(num_bytes: int) -> str:
    """1536 is "1.5 KiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def human_count(count: float) -> str:
    """134515008 is "134.5 M"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,.0f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """1 and "block" is "1 block", 2 is "2 blocks"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def brief_seconds(seconds: float) -> str:
    """An age or a time left, by its two largest units: "12s", "59m 3s", "3h 5m", "12d 4h", "3y"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60}m"
    if whole < 365 * 86_400:
        return f"{whole // 86_400}d {whole % 86_400 // 3600}h"
    return f"{whole // (365 * 86_400)}y"


def human_seconds(seconds: float) -> str:
    """3725 is "1h 2m 5s", 0.25 is "250 ms"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    while parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{value}{unit}" for value, unit in parts)


def enum_name(descriptor: EnumDescriptor, value: int) -> str:
    """SEQUENCE_STATE_DECODING of SequenceState is "DECODING"; a value of a newer daemon is its number."""
    known = descriptor.values_by_number.get(value)
    if known is None:
        return str(value)
    names = [name for name in descriptor.values_by_name if name.endswith("_UNSPECIFIED")]
    return known.name.removeprefix(names[0].removesuffix("UNSPECIFIED")) if names else known.name


def as_dict(message: Message) -> dict[str, Any]:
    """The message as plain values: numbers stay numbers, enums are their short names, bytes are base64."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        result[field.name] = [_plain(field, item) for item in value] if field.is_repeated else _plain(field, value)
    return result


def print_json(value: Any, *, one_line: bool = False) -> None:
    """JSON on stdout; `one_line` for streams of values."""
    text = json.dumps(value, ensure_ascii=False, indent=None if one_line else 2)
    print(text, flush=True, file=sys.stdout)


def print_data(value: Any, output: Format, *, rows: str | None = None) -> None:
    """An answer for programs: as JSON all of it, else its rows, a line each.

    Args:
        rows: the field of `value` that holds them; without it `value` itself is a list of rows, or one row.
    """
    assert output is not Format.TABLE, "a table is drawn by who knows what it shows"
    if output is Format.JSON:
        print_json(value)
        return
    found: Any = value[rows] if rows is not None else value
    Lines(output).add_all(cast("list[Any]", found) if isinstance(found, list) else [found])


class Lines:
    """Rows that come one after the other: a line of JSON each, or CSV below one header, that of the first rows."""

    def __init__(self, output: Format) -> None:
        assert output is not Format.TABLE
        self._output = output
        self._columns: list[str] | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Prints a row that comes alone."""
        self.add_all([row])

    def add_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints rows that come together. CSV has the columns that any of the first ones has; nested ones are
        `outer.inner`.
        """
        if self._output is not Format.CSV:
            for row in rows:
                print_json(dict(row), one_line=True)
            return
        flat = [_flat(row) for row in rows]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        if self._columns is None and flat:
            self._columns = list(dict.fromkeys(column for row in flat for column in row))
            writer.writerow(self._columns)
        for row in flat:
            writer.writerow([row.get(column, "") for column in self._columns or ()])
        sys.stdout.flush()

    def add_look(self, name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        """Prints one look at several things: in JSON a line with all of them, in CSV a row each; `more` is of all."""
        if self._output is not Format.CSV:
            self.add({**more, name: list(rows)})
            return
        self.add_all([{**more, **row} for row in rows])


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            flat[prefix + name] = json.dumps(value, ensure_ascii=False)
        elif isinstance(value, bool):
            flat[prefix + name] = "true" if value else "false"  # as in JSON
        else:
            flat[prefix + name] = "" if value is None else value
    return flat


def _plain(field: Any, value: Any) -> Any:  # the descriptor is one of two classes, by protobuf's implementation
    if isinstance(value, Message):
        return as_dict(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
