"""downcore events: what has happened to the daemon, and with -f what happens."""

import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from downcore.v1 import admin_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import Lines, as_dict, counted, enum_name, make_console, make_table, print_data

RECONNECT_S = 1.0
KINDS = admin_pb2.EventKind.DESCRIPTOR

app = make_app()


class About(StrEnum):
    """Kinds of events by what they are about."""

    ENGINE = "engine"
    HEALTH = "health"
    REQUESTS = "requests"
    TIER = "tier"

    @property
    def kinds(self) -> list[str]:
        """As the protocol names them."""
        beginnings = {
            About.ENGINE: ("ENGINE_", "RELOADED"),
            About.HEALTH: ("SERVING", "NOT_SERVING", "DRAIN"),
            About.REQUESTS: ("REQUESTS_",),
            About.TIER: ("TIER_",),
        }[self]
        return [kind.name for kind in KINDS.values if enum_name(KINDS, kind.number).startswith(beginnings)]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "events", arguments)


@app.command(context_settings=HELP_NAMES)
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, over restarts too.")] = False,
    about: Annotated[list[About] | None, typer.Option("--about", help="Only these; may be given again.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many; 0: all.")] = 0,
    server: ServerOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """What has happened to the daemon since its start: engine, health, tiers, requests that were ended or refused."""
    kinds = [kind for one in about or [] for kind in one.kinds]
    if follow:
        _follow(server, kinds, count, output)
        return
    with connect(server) as client:
        request = admin_pb2.WatchEventsRequest(kinds=kinds)
        answers = list(client.stream(f"{ADMIN}/WatchEvents", request, admin_pb2.WatchEventsResponse, 10.0))
    answers = answers[-count:] if count else answers
    if output is not Format.TABLE:
        print_data([_row(answer) for answer in answers], output)
        return
    table = make_table(("time", "event", "tier", "what"))
    for answer in answers:
        table.add_row(_when(answer.event), _kind(answer.event), answer.event.tier or "-", answer.event.message)
    make_console().print(table, markup=False)


def _follow(server: str | None, kinds: list[str], count: int, output: Format) -> None:
    lines = Lines(output) if output is not Format.TABLE else None
    for number, answer in enumerate(_read_on(server, kinds), start=1):
        if lines is not None:
            lines.add(_row(answer))
        else:
            if answer.missed:
                print(f"... {counted(answer.missed, 'event is', 'events are')} missing here", flush=True)
            event = answer.event
            print(f"{_when(event)}  {_kind(event):<18} {event.tier or '-':<6}  {event.message}", flush=True)
        if number == count:
            return


def _read_on(server: str | None, kinds: list[str]) -> Iterator[admin_pb2.WatchEventsResponse]:
    """Events without end. A daemon that goes away is waited for, once it has answered; nothing is told twice."""
    request = admin_pb2.WatchEventsRequest(kinds=kinds, follow=True)
    while True:
        with connect(server) as client:
            try:
                for answer in client.stream(f"{ADMIN}/WatchEvents", request, admin_pb2.WatchEventsResponse, None):
                    request.log_id, request.after_sequence = answer.log_id, answer.event.sequence
                    yield answer
            except CliError as error:
                if error.code not in (ExitCode.UNREACHABLE, ExitCode.DEGRADED) or not request.log_id:
                    raise
        time.sleep(RECONNECT_S)


def _row(answer: admin_pb2.WatchEventsResponse) -> dict[str, Any]:
    return {**as_dict(answer.event), "missed": answer.missed, "log_id": answer.log_id}


def _when(event: admin_pb2.Event) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))


def _kind(event: admin_pb2.Event) -> str:
    return enum_name(KINDS, event.kind).lower().replace("_", "-")
