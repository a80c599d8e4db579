"""downcore drain."""

from typing import Annotated

import typer
from downcore.v1 import admin_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.confirm import DryRunOption, YesOption, confirm
from ops.cli.errors import ExitCode
from ops.cli.output import as_dict, counted, print_data

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
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    server: ServerOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Refuse new requests and wait for the open ones. Asks first. Exits 7 when some are still open at the end.

    The daemon goes on, takes nothing any more, and is then to be ended: there is no way back but a restart.
    """
    if dry_run:
        with connect(server) as client:
            asked = admin_pb2.ListSequencesRequest()
            found = client.unary(f"{ADMIN}/ListSequences", asked, admin_pb2.ListSequencesResponse, CALL_MARGIN_S)
        num_open = len({sequence.request_id for sequence in found.sequences})
        print(f"would refuse new requests and wait for {counted(num_open, 'request')}")
        return
    confirm("Refuse all new requests until the daemon is restarted?", yes=yes)
    request = admin_pb2.DrainRequest()
    if wait is not None:
        request.timeout_s = wait
    limit_s = (LONGEST_WAIT_S if wait is None else wait) + CALL_MARGIN_S
    with connect(server) as client:
        answer = client.unary(f"{ADMIN}/Drain", request, admin_pb2.DrainResponse, limit_s)
    if output is not Format.TABLE:
        print_data(as_dict(answer), output)
    else:
        still_open = counted(answer.open_requests, "request is", "requests are")
        print("drained" if answer.drained else f"{still_open} still open")
    if not answer.drained:
        raise typer.Exit(ExitCode.TIMEOUT)
