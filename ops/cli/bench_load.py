"""downcore bench load: load for a running daemon, in a closed or an open loop."""

import ipaddress
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from downcore.v1 import admin_pb2

from ops.bench.load_report import as_plain, make_report, print_report, result_name, write_json
from ops.bench.load_run import MAX_REQUESTS, Load, LoadSettings, Run
from ops.bench.report import draw
from ops.cli.app import Format, FormatOption, ServerOption, server_target
from ops.cli.client import ADMIN, connect, connect_async
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console, print_data

LONGEST_S = 3600.0
MOST_OPEN = 4096


def load(
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, max=MOST_OPEN, help="Closed loop: so many at a time.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "-r", min=0.001, max=100_000, help="Open loop: so many a second, at random."),
    ] = None,
    duration: Annotated[float, typer.Option("--duration", "-d", min=0.1, max=LONGEST_S, metavar="SECONDS")] = 10.0,
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=MAX_REQUESTS, help="At most so many.")
    ] = MAX_REQUESTS,
    max_open: Annotated[
        int, typer.Option("--max-open", min=1, max=MOST_OPEN, help="Open loop: beyond it requests are not sent.")
    ] = 512,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of each prompt.")] = 256,
    shared_tokens: Annotated[
        int, typer.Option("--shared-tokens", min=0, help="The same in all, at the beginning.")
    ] = 0,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Of each answer, exactly.")] = 64,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of prompts and arrivals. Default: another each time, so none is cached."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Of one request.")] = 120.0,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Load another machine than this one: one that is yours to load.")
    ] = False,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the figures as JSON.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw a PNG; beside --save, or in this folder.")] = False,
    admin: Annotated[
        str | None, typer.Option("--admin", metavar="ADDRESS", help="AdminService, where it listens apart.")
    ] = None,
    server: ServerOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Load for a running daemon: times to first token, between tokens, to the end. Exits 1 when requests fail."""
    if (concurrency is None) == (rate is None):
        raise CliError(ExitCode.USAGE, "give --concurrency for a closed loop or --rate for an open one")
    if shared_tokens > prompt_tokens:
        raise CliError(ExitCode.USAGE, "--shared-tokens is more than --prompt-tokens")
    if not allow_remote and not is_local(server_target(server)):
        raise CliError(ExitCode.USAGE, "this is another machine: --allow-remote loads it, where it is yours to load")
    if plot and find_spec("matplotlib") is None:
        raise CliError(ExitCode.FAILED, "matplotlib is not installed; make bench installs it")
    settings = LoadSettings(
        concurrency,
        rate,
        duration,
        requests,
        max_open,
        prompt_tokens,
        shared_tokens,
        answer_tokens,
        timeout,
        seed if seed is not None else secrets.randbelow(1 << 31),
    )
    with connect(admin or server) as client:
        info = client.unary(
            f"{ADMIN}/GetServerInfo", admin_pb2.GetServerInfoRequest(), admin_pb2.GetServerInfoResponse, 10.0
        )
    if prompt_tokens + answer_tokens > info.max_context_tokens:
        raise CliError(ExitCode.USAGE, f"this model's context is {info.max_context_tokens:,} tokens")
    progress = make_console(stderr=True)
    with progress.status(f"loading {info.model} for {duration:g} s"):
        run = uvloop.run(_run(server, settings, info.vocab_size))
    report = make_report(info.model, server_target(server), settings, run)
    path = save
    if plot or path is not None:
        path = path or Path(result_name(report)).with_suffix(".json")
        write_json(report, run, path)
    if plot and path is not None:
        draw("load_plot.py", path)
    if output is not Format.TABLE:
        print_data(as_plain(report), output)
    else:
        print_report(report, make_console())
    if path is not None:
        progress.print(f"\nwritten: {path}" + (" and the .png beside it" if plot else ""), soft_wrap=True)
    if report.completed < report.requests:
        raise typer.Exit(ExitCode.FAILED)


async def _run(server: str | None, settings: LoadSettings, vocab_size: int) -> Run:
    async with connect_async(server) as channel:
        return await Load(channel, settings, vocab_size).run()


def is_local(target: str) -> bool:
    """A Unix socket, or an address of the loopback interface."""
    if target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
