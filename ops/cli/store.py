"""downcore store fsck, downcore store dump: the disk tier's directory, without a daemon."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ops.cli.app import Format, FormatOption, make_app, run_app
from ops.cli.confirm import DryRunOption, YesOption, confirm
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import human_bytes, make_console, make_table, print_data
from tiers.audit import Listed, Report, examine, listing, repair
from tiers.errors import StoreError

app = make_app("The disk tier's directory, while no daemon has it open.")

DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The disk tier's directory.")
]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "store", arguments)


@app.command("fsck")
def fsck(
    directory: DirectoryArgument,
    fix: Annotated[
        bool, typer.Option("--repair", help="Rebuild what can be rebuilt, and delete the damaged records.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check every record against index, header and checksum. Exits 5 when damage was found, repaired or not."""
    with _store_errors():
        with _progress("checking") as advance:
            report = examine(directory, advance)
        fix = fix and bool(report.damages) and not dry_run
        if fix:
            confirm(f"Repair {_count(len(report.damages), 'damage')}, deleting the damaged records?", yes=yes)
            repair(directory, report)
    if output is not Format.TABLE:
        print_data(_as_json(report, is_repaired=fix), output, rows="damages")
    else:
        _print_report(report, is_repaired=fix)
    if report.damages:
        raise typer.Exit(ExitCode.DEGRADED)


@app.command("dump")
def dump(
    directory: DirectoryArgument,
    limit: Annotated[int, typer.Option("--limit", min=0, help="End after so many; 0: all.")] = 0,
    output: FormatOption = Format.TABLE,
) -> None:
    """List what the segments hold, by the records' own headers."""
    with _store_errors():
        entries = list(islice(listing(directory), limit or None))
    rows = [_row(entry) for entry in entries]
    if output is not Format.TABLE:
        print_data(rows, output)
        return
    numeric = ("segment", "offset", "stored", "depth")
    table = make_table(
        ("segment", "offset", "stored", "kind", "depth", "key", "namespace", "provenance", "state"), numeric=numeric
    )
    for row in rows:
        table.add_row(
            str(row["segment"]),
            f"{row['offset']:,}",
            human_bytes(row["stored_bytes"]),
            *(str(row.get(name, "-")) for name in ("kind", "depth")),
            str(row.get("key", "-"))[:16],
            *(str(row.get(name, "-")) for name in ("namespace", "provenance")),
            row["state"],
        )
    console = make_console()
    console.print(table)
    kinds = Counter(str(row.get("kind", "unreadable")) for row in rows)
    total = human_bytes(sum(row["stored_bytes"] for row in rows))
    console.print(
        f"\n{_count(len(rows), 'record')}, {total}: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    )


def _row(entry: Listed) -> dict[str, Any]:
    found = entry.found
    place = {"segment": found.segment, "offset": found.offset, "stored_bytes": found.stored_bytes}
    if found.header is None:
        return {**place, "state": str(found.flaw)}
    header = found.header
    return {
        **place,
        "kind": header.head.kind.name.lower(),
        "depth": header.head.depth,
        "key": header.head.key.hex(),
        "parent": header.head.parent.hex(),
        "namespace": header.head.namespace,
        "provenance": header.head.provenance.value,
        "generation": header.ref.generation,
        "fingerprint": header.fingerprint.hex(),
        "profile": header.profile.hex(),
        "tokens": len(header.head.tokens) // 4,
        "state": "committed" if entry.is_indexed else "not in the index",
    }


def _print_report(report: Report, *, is_repaired: bool) -> None:
    console = make_console()
    if report.damages:
        table = make_table(("damage", "where", "detail"))
        for damage in report.damages:
            table.add_row(damage.kind.value, damage.where, damage.detail)
        console.print(table)
        console.print()
    size = human_bytes(report.stored_bytes)
    console.print(
        f"{_count(report.num_records, 'committed record')}, {size}, in {_count(report.num_segments, 'segment')}"
    )
    if not report.damages:
        console.print("no damage")
    else:
        what = "repaired" if is_repaired else "downcore store fsck --repair makes it whole"
        console.print(f"{_count(len(report.damages), 'damage')} found; {what}")


def _as_json(report: Report, *, is_repaired: bool) -> dict[str, Any]:
    return {
        "segments": report.num_segments,
        "records": report.num_records,
        "stored_bytes": report.stored_bytes,
        "repaired": is_repaired and bool(report.damages),
        "damages": [
            {"kind": damage.kind.value, "where": damage.where, "detail": damage.detail} for damage in report.damages
        ],
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def _store_errors() -> Generator[None]:
    try:
        yield
    except StoreError as error:
        raise CliError(ExitCode.FAILED, str(error)) from None


@contextmanager
def _progress(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    console = make_console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
