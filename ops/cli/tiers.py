"""downcore tiers ls, show, stat, watch, verify, flush."""

from collections.abc import Iterator
from typing import Annotated

import typer
from downcore.v1 import admin_pb2
from rich.live import Live

from ops.cli.app import Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.cache_options import TierChoice
from ops.cli.client import ADMIN, Client, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import (
    Lines,
    as_dict,
    counted,
    human_bytes,
    human_seconds,
    make_console,
    make_facts,
    make_table,
    print_data,
)
from ops.cli.progress import bars
from ops.cli.tiers_view import stat_header, stat_line, tier_facts, tier_rates, tier_table

HEADER_EVERY = 20  # lines of stat
LONGEST_FLUSH_S = 86_400.0

app = make_app("Tiers of the cache.")
TierArgument = Annotated[TierChoice, typer.Argument(metavar="TIER", help="device, host or disk.")]
IntervalOption = Annotated[
    float, typer.Option("--interval", "-w", min=0.1, metavar="SECONDS", help="Time between two.")
]
CountOption = Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many; 0: until interrupted.")]
LongTimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait. Default: none.")
]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "tiers", arguments)


@app.command("ls")
def list_tiers(server: ServerOption = None, timeout: TimeoutOption = 10.0, output: FormatOption = Format.TABLE) -> None:
    """Sizes, use and state of each tier now."""
    with connect(server) as client:
        tiers = _fetch(client, timeout)
    if output is not Format.TABLE:
        print_data([as_dict(tier) for tier in tiers], output)
        return
    console = make_console()
    console.print(tier_table(tiers))
    for tier in tiers:
        if tier.state_reason:
            console.print(f"{tier.name}: {tier.state_reason}", markup=False)


@app.command("show")
def show_tier(
    tier: Annotated[TierChoice | None, typer.Argument(metavar="[TIER]", help="Only this one.")] = None,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """A tier in full, or all of them. Exits 6 when the daemon has no such tier."""
    with connect(server) as client:
        found = [row for row in _fetch(client, timeout) if tier is None or row.name == tier]
    if tier is not None and not found:
        raise CliError(ExitCode.NOT_FOUND, f"the daemon has no {tier} tier")
    if output is not Format.TABLE:
        print_data([as_dict(row) for row in found], output)
        return
    console = make_console()
    for number, row in enumerate(found):
        if number:
            console.print()
        console.print(make_facts(tier_facts(row)))


@app.command("stat")
def stat(
    interval: IntervalOption = 1.0,
    count: CountOption = 0,
    server: ServerOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """What each tier reads, writes, hits and drops each second; with -o json one line each time."""
    num_lines = 0
    lines = Lines(output) if output is not Format.TABLE else None
    for before, after in _pairs(server, interval, count):
        seconds = max(after.time_s - before.time_s, 1e-3)
        known = {tier.name: tier for tier in before.tiers}
        rates = [tier_rates(known.get(tier.name, admin_pb2.Tier()), tier, seconds) for tier in after.tiers]
        if lines is not None:
            rows = [tier.as_dict() for tier in rates]
            lines.add_look("tiers", rows, time_s=after.time_s, interval_s=seconds)
            continue
        for tier in rates:
            if num_lines % HEADER_EVERY == 0:
                print(stat_header(), flush=True)
            print(stat_line(tier), flush=True)
            num_lines += 1


@app.command("watch")
def watch_tiers(
    server: ServerOption = None,
    interval: IntervalOption = 1.0,
    count: CountOption = 0,
    output: FormatOption = Format.TABLE,
) -> None:
    """The same as ls, again and again; with -o json one line each time."""
    console = make_console()
    lines = Lines(output) if output is not Format.TABLE else None
    with connect(server) as client, Live(console=console, auto_refresh=False, transient=False) as live:
        for number, answer in enumerate(_watch(client, interval), start=1):
            if lines is not None:
                lines.add_look("tiers", [as_dict(tier) for tier in answer.tiers], time_s=answer.time_s)
            elif console.is_terminal:
                live.update(tier_table(answer.tiers), refresh=True)
            else:
                console.print(tier_table(answer.tiers))
            if number == count:
                break


@app.command("verify")
def verify_tier(
    tier: TierArgument,
    server: ServerOption = None,
    timeout: LongTimeoutOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Read every record of a tier and check it. Damaged ones are set aside. Exits 1 when there is damage."""
    request = admin_pb2.VerifyTierRequest(tier=tier.wire_name)
    report: admin_pb2.VerifyReport | None = None
    with connect(server) as client, bars() as shown:
        for event in client.stream(f"{ADMIN}/VerifyTier", request, admin_pb2.VerifyTierResponse, timeout):
            if event.WhichOneof("event") == "report":
                report = event.report
                continue
            progress = event.progress
            text = f"{progress.done_records:,}/{progress.total_records:,} records"
            shown.show(f"verifying {tier}", progress.done_bytes, progress.total_bytes, text)
    if report is None:
        raise CliError(ExitCode.FAILED, "the daemon ended the call without a report")
    if output is not Format.TABLE:
        print_data(as_dict(report), output, rows="damage")
    else:
        _print_report(report)
    if report.damaged:
        raise typer.Exit(ExitCode.FAILED)


@app.command("flush")
def flush_tier(
    tier: TierArgument,
    server: ServerOption = None,
    timeout: LongTimeoutOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write down all that a tier has and the tiers below it lack. Forgets nothing. Ctrl-C stops it."""
    request = admin_pb2.FlushTierRequest(tier=tier.wire_name)
    limit_s = timeout if timeout is not None else LONGEST_FLUSH_S
    with connect(server) as client:
        done = client.unary(f"{ADMIN}/FlushTier", request, admin_pb2.FlushTierResponse, limit_s)
    if output is not Format.TABLE:
        print_data(as_dict(done), output)
        return
    synced = ", synced: it survives a power cut" if done.durable else ""
    print(
        f"wrote {counted(done.records, 'record')}, {human_bytes(done.bytes)} in {human_seconds(done.seconds)}{synced}"
    )


def _fetch(client: Client, timeout_s: float) -> list[admin_pb2.Tier]:
    answer = client.unary(f"{ADMIN}/ListTiers", admin_pb2.ListTiersRequest(), admin_pb2.ListTiersResponse, timeout_s)
    return list(answer.tiers)


def _watch(client: Client, interval_s: float) -> Iterator[admin_pb2.WatchTiersResponse]:
    request = admin_pb2.WatchTiersRequest(interval_s=interval_s)
    return client.stream(f"{ADMIN}/WatchTiers", request, admin_pb2.WatchTiersResponse, None)


def _pairs(
    server: str | None, interval_s: float, count: int
) -> Iterator[tuple[admin_pb2.WatchTiersResponse, admin_pb2.WatchTiersResponse]]:
    """Each look with the one before it, `count` times; 0: without end."""
    with connect(server) as client:
        before: admin_pb2.WatchTiersResponse | None = None
        for number, after in enumerate(_watch(client, interval_s)):
            if before is not None:
                yield before, after
            before = after
            if number and number == count:
                return


def _print_report(report: admin_pb2.VerifyReport) -> None:
    console = make_console()
    if report.damage:
        table = make_table(("record", "bytes", "what is wrong", "key"), numeric=("bytes",))
        for record in report.damage:
            table.add_row(record.name, f"{record.bytes:,}", record.what, record.key)
        console.print(table)
        untold = report.damaged - len(report.damage)
        if untold:
            console.print(f"and {untold:,} more")
    speed = f" in {human_seconds(report.seconds)}" if report.seconds else ""
    verdict = f"{report.damaged:,} damaged, set aside" if report.damaged else "none damaged"
    console.print(f"{counted(report.records, 'record')}, {human_bytes(report.bytes)}{speed}: {verdict}")
