"""downcore doctor: is this machine fit, and what should be changed?"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.app import Format, FormatOption, make_app, run_app
from ops.cli.config import PASSED_ON, settings
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console, make_table, print_data
from ops.doctor.disk import check_disk
from ops.doctor.finding import Finding, Level, fail, ok
from ops.doctor.limits import (
    check_clock,
    check_cores,
    check_files,
    check_locked_memory,
    check_memory,
    check_socket,
)
from ops.doctor.machine import Machine
from ops.doctor.software import check_packages, check_python, check_torch_and_cards, driver_cards

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "doctor", arguments)


@app.command(context_settings=PASSED_ON)
def doctor(
    context: typer.Context,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="DIR", help="Try this directory. Default: disk_path of the settings."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Neither import torch nor try the disk.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check software, disk, accelerator, limits and clock, and say what to change.

    Flags of `downcore serve` may follow. Exits 1 where something fails, 5 where something could be better.
    """
    findings: list[Finding] = []
    console = make_console(stderr=True)
    with console.status("looking") as status:
        for finding in examine(context.args, disk, quick=quick):
            findings.append(finding)
            status.update(f"looking: {finding.name}")
    if output is not Format.TABLE:
        print_data([asdict(finding) for finding in findings], output)
    else:
        _print(findings)
    levels = {finding.level for finding in findings}
    if Level.FAIL in levels:
        raise typer.Exit(ExitCode.FAILED)
    if Level.WARN in levels:
        raise typer.Exit(ExitCode.DEGRADED)


def examine(flags: list[str], disk: Path | None, *, quick: bool) -> Iterator[Finding]:
    """All findings, quick ones first."""
    machine = Machine()
    yield check_python()
    yield check_packages()
    known: dict[str, Any] = {}
    try:
        known = {row["key"]: row["value"] for row in settings(flags)}
        yield ok("settings", "in order")
    except CliError as error:
        yield fail("settings", str(error), "downcore config show --origin says where each comes from")
    pool_bytes, host_bytes = known.get("pool_bytes") or 0, known.get("host_bytes") or 0
    cards = driver_cards()
    yield check_cores(machine)
    yield from check_memory(machine, host_bytes + (0 if isinstance(cards, list) else pool_bytes))
    yield check_files()
    yield check_locked_memory(host_bytes, has_card=isinstance(cards, list))
    yield from check_clock(machine)
    if known.get("listen"):
        yield check_socket(known["listen"])
    if quick:
        return
    yield from check_torch_and_cards()
    directory = disk or (Path(known["disk_path"]) if known.get("disk_path") else None)
    if directory is None:
        yield ok("disk", "no disk tier is set: --disk DIR tries a directory for one")
    else:
        yield from check_disk(directory, known.get("disk_bytes"), machine)


def _print(findings: list[Finding]) -> None:
    table = make_table(("", "check", "found"))
    table.columns[2].no_wrap = False
    for finding in findings:
        style = STYLES[finding.level]
        advice = f"\n-> {finding.advice}" if finding.advice else ""
        table.add_row(f"[{style}]{finding.level}[/]", finding.name, (finding.found + advice).replace("[", "\\["))
    make_console().print(table)
