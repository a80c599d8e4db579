"""downcore ledger."""

import typer
from downcore.v1 import admin_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.errors import ExitCode
from ops.cli.output import as_dict, human_bytes, make_console, make_table, print_data

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "ledger", arguments)


@app.command(context_settings=HELP_NAMES)
def ledger(server: ServerOption = None, timeout: TimeoutOption = 10.0, output: FormatOption = Format.TABLE) -> None:
    """Every byte of every tier by owner and kind. Exits 1 when something is astray."""
    with connect(server) as client:
        answer = client.unary(f"{ADMIN}/GetLedger", admin_pb2.GetLedgerRequest(), admin_pb2.GetLedgerResponse, timeout)
    if output is not Format.TABLE:
        print_data(as_dict(answer), output, rows="entries")
    else:
        _print_table(answer)
    if not answer.balanced:
        raise typer.Exit(ExitCode.FAILED)


def _print_table(answer: admin_pb2.GetLedgerResponse) -> None:
    table = make_table(("tier", "kind", "owner", "count", "size", "bytes"), numeric=("count", "size", "bytes"))
    for entry in answer.entries:
        size = human_bytes(entry.bytes)
        table.add_row(entry.tier, entry.kind, entry.owner, f"{entry.count:,}", size, f"{entry.bytes:,}")
    console = make_console()
    console.print(table)
    console.print("balanced: free + cached + held = pool" if answer.balanced else "NOT BALANCED")
    for finding in answer.findings:
        console.print(f"  {finding}", markup=False)
