"""downcore tiers ls, downcore tiers watch."""

from collections.abc import Iterable
from typing import Annotated

import typer
from downcore.v1 import admin_pb2
from rich.live import Live
from rich.table import Table

from ops.cli.app import Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.output import as_dict, human_bytes, make_console, make_table, print_json

app = make_app("Tiers of the cache.")


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "tiers", arguments)


@app.command("ls")
def list_tiers(server: ServerOption = None, timeout: TimeoutOption = 10.0, output: FormatOption = Format.TABLE) -> None:
    """Sizes and use of each tier now."""
    with connect(server) as client:
        answer = client.unary(f"{ADMIN}/ListTiers", admin_pb2.ListTiersRequest(), admin_pb2.ListTiersResponse, timeout)
    if output is Format.JSON:
        print_json(as_dict(answer)["tiers"])
    else:
        make_console().print(tier_table(answer.tiers))


@app.command("watch")
def watch_tiers(
    server: ServerOption = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Time between two.")] = 1.0,
    count: Annotated[int, typer.Option("--count", min=0, help="End after so many; 0: until interrupted.")] = 0,
    output: FormatOption = Format.TABLE,
) -> None:
    """The same, again and again; with -o json one line each time."""
    console = make_console()
    request = admin_pb2.WatchTiersRequest(interval_s=interval)
    with connect(server) as client, Live(console=console, auto_refresh=False, transient=False) as live:
        answers = client.stream(f"{ADMIN}/WatchTiers", request, admin_pb2.WatchTiersResponse, None)
        for number, answer in enumerate(answers, start=1):
            if output is Format.JSON:
                print_json(as_dict(answer), one_line=True)
            elif console.is_terminal:
                live.update(tier_table(answer.tiers), refresh=True)
            else:
                console.print(tier_table(answer.tiers))
            if number == count:
                break


def tier_table(tiers: Iterable[admin_pb2.Tier]) -> Table:
    """One row a tier. held + cached + free = capacity; hit is the share of looked-up prompt tokens found there."""
    numeric = ("capacity", "held", "cached", "free", "pinned", "blocks", "slots", "hit tokens", "hit", "evicted")
    table = make_table(("tier", "medium", *numeric), numeric=numeric)
    for tier in tiers:
        looked_up = tier.hit_tokens + tier.miss_tokens
        table.add_row(
            tier.name,
            tier.medium,
            human_bytes(tier.capacity_bytes),
            human_bytes(tier.held_bytes),
            human_bytes(tier.cached_bytes),
            human_bytes(tier.free_bytes),
            human_bytes(tier.pinned_bytes),
            f"{tier.blocks - tier.free_blocks:,}/{tier.blocks:,}",
            f"{tier.slots - tier.free_slots:,}/{tier.slots:,}",
            f"{tier.hit_tokens:,}",
            f"{tier.hit_tokens / looked_up:.0%}" if looked_up else "-",
            f"{tier.evicted_blocks:,}",
        )
    return table
