"""downcore drain."""

from typing import Annotated

import typer
from downcore.v1 import admin_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.errors import ExitCode
from ops.cli.output import as_dict, print_json

CALL_MARGIN_S = 10.0  # beyond the wait itself
LONGEST_WAIT_S = 3600.0

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "drain", arguments)


@app.command(context_settings=HELP_NAMES)
def drain(
    wait: Annotated[
        float | None,
        typer.Option("--wait", min=0.0, max=LONGEST_WAIT_S, metavar="SECONDS", help="Default: the daemon's window."),
    ] = None,
    server: ServerOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Refuse new requests and wait for the open ones. Exits 7 when some are still open at the end."""
    request = admin_pb2.DrainRequest()
    if wait is not None:
        request.timeout_s = wait
    limit_s = (LONGEST_WAIT_S if wait is None else wait) + CALL_MARGIN_S
    with connect(server) as client:
        answer = client.unary(f"{ADMIN}/Drain", request, admin_pb2.DrainResponse, limit_s)
    if output is Format.JSON:
        print_json(as_dict(answer))
    else:
        print("drained" if answer.drained else f"{answer.open_requests} requests are still open")
    if not answer.drained:
        raise typer.Exit(ExitCode.TIMEOUT)
