"""downcore status."""

import typer
from downcore.v1 import admin_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.errors import ExitCode
from ops.cli.output import (
    as_dict,
    counted,
    enum_name,
    human_bytes,
    human_count,
    human_seconds,
    make_console,
    make_facts,
    print_data,
)

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "status", arguments)


@app.command(context_settings=HELP_NAMES)
def status(server: ServerOption = None, timeout: TimeoutOption = 10.0, output: FormatOption = Format.TABLE) -> None:
    """What the daemon serves, and whether it does. Exits 5 when it is not SERVING."""
    with connect(server) as client:
        info = client.unary(
            f"{ADMIN}/GetServerInfo", admin_pb2.GetServerInfoRequest(), admin_pb2.GetServerInfoResponse, timeout
        )
    if output is not Format.TABLE:
        print_data(as_dict(info), output)
    else:
        make_console().print(make_facts(server_facts(info)))
    if info.state != admin_pb2.ENGINE_STATE_SERVING:
        raise typer.Exit(ExitCode.DEGRADED)


def state_name(info: admin_pb2.GetServerInfoResponse) -> str:
    """SERVING, LOADING, DRAINING or DOWN."""
    return enum_name(admin_pb2.EngineState.DESCRIPTOR, info.state)


def server_facts(info: admin_pb2.GetServerInfoResponse) -> list[tuple[str, str]]:
    """What an operator wants to see first, first."""
    state = state_name(info)
    if info.state == admin_pb2.ENGINE_STATE_LOADING:
        state += f", {info.loaded:.0%} of the weights read"
    facts = [("state", state)]
    if info.model:
        facts += [
            ("model", f"{info.model} ({info.family}, {human_count(info.parameters)} parameters, {info.dtype})"),
            ("device", info.device),
            ("context", f"{info.max_context_tokens:,} tokens, {human_bytes(info.bytes_per_token)} each"),
            ("slot", human_bytes(info.slot_bytes) if info.slot_bytes else "none: this family keeps no recurrent state"),
            ("block, grid", f"{info.block_size} tokens, {info.grid:,} tokens"),
            ("fingerprint", info.state_fingerprint),
            ("numerics", info.numerics_profile),
        ]
    restarts = f", {counted(info.engine_starts - 1, 'restart')}" if info.engine_starts > 1 else ""
    return [
        *facts,
        ("engine", f"pid {info.engine_pid}, {counted(info.steps, 'step')}{restarts}"),
        ("up", human_seconds(info.uptime_s)),
        ("version", info.version),
    ]
