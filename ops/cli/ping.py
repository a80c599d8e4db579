"""downcore ping."""

import time
from typing import Annotated

import typer
from grpc_health.v1 import health_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import connect
from ops.cli.errors import ExitCode
from ops.cli.output import Lines, enum_name

LIVE = "live"  # the name that the daemon's health has for this

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "ping", arguments)


@app.command(context_settings=HELP_NAMES)
def ping(
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="Number of pings.")] = 1,
    interval: Annotated[float, typer.Option("--interval", min=0.0, metavar="SECONDS", help="Time between two.")] = 1.0,
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it is alive, though it may load or drain, and not serve.")
    ] = False,
    server: ServerOption = None,
    timeout: TimeoutOption = 5.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Health and round-trip time. Exits 5 when the daemon is not SERVING."""
    serving = True
    lines = Lines(output) if output is not Format.TABLE else None
    with connect(server) as client:
        for number in range(count):
            if number:
                time.sleep(interval)
            started = time.perf_counter()
            answer = client.unary(
                "grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest(service=LIVE if live else ""),
                health_pb2.HealthCheckResponse,
                timeout,
            )
            round_trip_ms = (time.perf_counter() - started) * 1000
            state = enum_name(health_pb2.HealthCheckResponse.ServingStatus.DESCRIPTOR, answer.status)
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            if lines is not None:
                lines.add({"status": state, "round_trip_ms": round(round_trip_ms, 3)})
            else:
                print(f"{state} in {round_trip_ms:.1f} ms", flush=True)
    if not serving:
        raise typer.Exit(ExitCode.DEGRADED)
