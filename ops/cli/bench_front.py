"""downcore bench front: the front's cost a message beside a bare gRPC server's."""

import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

import ops.bench
from ops.bench.front_report import FrontReport, as_plain, print_report, write_json
from ops.bench.front_run import EchoSide, FrontSettings, FrontSide, Pings, compare
from ops.bench.report import RESULTS
from ops.child import START_TIMEOUT_S, ChildDaemon, ending_signals
from ops.cli.app import Format, FormatOption
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console, print_data
from ops.cli.token import new
from ops.model.catalog import SMOLLM2
from ops.model.fetch import FetchError, ensure_model

PROGRAM = "daemon.null"


def front(
    streams: Annotated[list[int] | None, typer.Option("--streams", min=1, max=512, help="Numbers of streams.")] = None,
    messages: Annotated[int, typer.Option("--messages", min=1, help="Of all streams together, in a round.")] = 16_000,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Medians are of so many.")] = 5,
    pings: Annotated[int, typer.Option("--pings", min=1, help="Unary calls, one after the other.")] = 500,
    rate: Annotated[
        float, typer.Option("--rate", min=0.0, help="Tokens a second of each stream; 0: as fast as they are taken.")
    ] = 0.0,
    model: Annotated[Path | None, typer.Option("--model", help="Whose tokenizer. Default: the embedded one.")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result.")] = RESULTS,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure the front alone: a null engine behind it, a bare grpc.aio server beside it, one client for both."""
    progress = make_console(stderr=True)
    try:
        folder = model or ensure_model(SMOLLM2, progress)
    except FetchError as error:
        raise CliError(ExitCode.FAILED, str(error)) from None
    settings = FrontSettings(tuple(sorted(set(streams or [1, 16]))), messages, rounds, pings, rate)
    report = measure(folder, settings, progress)
    path = write_json(report, results)
    if output is not Format.TABLE:
        print_data(as_plain(report), output)
    else:
        print_report(report, make_console())
    progress.print(f"\nwritten: {path}", soft_wrap=True)


def measure(model: Path, settings: FrontSettings, progress: Console) -> FrontReport:
    """Starts both servers, measures them, ends both."""
    with tempfile.TemporaryDirectory(prefix="downcore-") as made, ending_signals():
        principals, token_file = Path(made, "principals.toml"), Path(made, "token")
        new("bench", ["generate"], out=token_file, principals=principals)
        flags = ["--principals-file", str(principals), "--local-needs-token", "true", "--coalesce", "false"]
        flags += ["--request-log", "0", "--tokenizer-workers", "1", "--null-rate", str(settings.rate)]
        with ChildDaemon(model, flags, program=PROGRAM) as daemon, _echo(Path(made, "echo.sock")) as echo_pid:
            status = progress.status("measuring")
            with status:
                return uvloop.run(
                    _measure(daemon, token_file.read_text().strip(), (Path(made, "echo.sock"), echo_pid), settings)
                )


async def _measure(daemon: ChildDaemon, token: str, echo_at: tuple[Path, int], settings: FrontSettings) -> FrontReport:
    front = FrontSide(daemon.socket, daemon.process.pid, token)
    await front.wait_serving(START_TIMEOUT_S)
    message = await front.typical_message()
    echo = EchoSide(*echo_at, message, settings.rate)
    rows = tuple([await compare(front, echo, count, settings) for count in settings.streams])
    pings = Pings(await front.ping(settings.pings), await echo.ping(settings.pings))
    daemon.check_alive()
    await front.channel.close()
    await echo.channel.close()
    return FrontReport(settings, len(message), rows, pings)


@contextmanager
def _echo(socket: Path) -> Generator[int]:
    """The bare server, listening. Yields its process id."""
    script = Path(ops.bench.__path__[0]) / "front_echo.py"
    process = subprocess.Popen([sys.executable, str(script), str(socket)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "listening":
            raise CliError(ExitCode.FAILED, "the bare server did not start")
        yield process.pid
    finally:
        process.kill()
        process.communicate()
