"""What the commands made with typer share: their options, and how an app is run for an exit code."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ops.cli.errors import CliError, ExitCode


class Format(StrEnum):
    """How a command prints its result."""

    TABLE = "table"  # for people
    JSON = "json"  # the whole answer
    JSONL = "jsonl"  # a row a line
    CSV = "csv"  # a header, and a row a line


ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="DOWNCORE_SERVER",
        metavar="ADDRESS",
        help="A Unix socket's path, unix:PATH, or HOST:PORT. Default: the daemon's own socket.",
    ),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait.")]
FormatOption = Annotated[Format, typer.Option("--output", "-o", help="For people, or for programs.")]


HELP_NAMES = {"help_option_names": ["-h", "--help"]}  # context settings of a command


def make_app(summary: str = "") -> typer.Typer:
    """An app of one command, or with a summary of several; its errors are left to the dispatcher."""
    return typer.Typer(
        help=summary,
        add_completion=False,
        no_args_is_help=bool(summary),
        pretty_exceptions_enable=False,
        context_settings=HELP_NAMES,
    )


def run_app(app: typer.Typer, name: str, arguments: list[str]) -> int:
    """Parses the arguments and runs the command; the exit code it ended with."""
    try:
        app(args=arguments, prog_name=f"downcore {name}")
    except SystemExit as exit_request:  # how typer ends, also after help and usage errors
        return exit_request.code if isinstance(exit_request.code, int) else ExitCode.FAILED
    return ExitCode.OK


def default_socket() -> Path:
    """Where a daemon of this user listens unless told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "downcore" if os.path.isabs(runtime) else Path(f"/tmp/downcore-{os.getuid()}")
    return folder / "downcore.sock"


def server_target(server: str | None) -> str:
    """The address as gRPC writes it.

    Raises:
        CliError: it is neither a path nor HOST:PORT.
    """
    if not server:
        return f"unix:{default_socket()}"
    if server.startswith("unix:") and server != "unix:":
        return server
    if "://" in server:
        raise CliError(ExitCode.USAGE, f"--server {server!r} is a URL: give HOST:PORT, or a socket's path")
    if "/" in server:
        return f"unix:{Path(server).absolute()}"
    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise CliError(ExitCode.USAGE, f"--server {server!r} is neither a socket's path nor HOST:PORT")
    return server
