"""downcore bench: starts a daemon of its own, measures it beside transformers, writes what it found.

`downcore bench load` puts a running daemon under load.
`downcore bench front` measures the front alone, with a null engine, beside a bare gRPC server.
`downcore bench longctx` shows what a context costs that is larger than the device.
`downcore bench replay` needs no daemon: it shows recorded requests to the policies of the prefix cache.
"""

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from downcore.v1 import admin_pb2
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ops.bench.load import Prompts
from ops.bench.measure import Measurement, Reference, Settings
from ops.bench.replay import HYBRID, HYBRID_BYTES_PER_TOKEN, HYBRID_CHECKPOINT_BYTES, Replay, decision_times
from ops.bench.replay_report import ReplayReport
from ops.bench.replay_report import as_plain as replay_as_plain
from ops.bench.replay_report import print_report as print_replay
from ops.bench.replay_report import write_json as write_replay
from ops.bench.replay_trace import TraceError, read_traces, trace_files
from ops.bench.report import RESULTS, Report, as_plain, draw, print_report, write_json
from ops.child import ChildDaemon, ending_signals
from ops.cli.app import HELP_NAMES, Format, FormatOption, make_app, run_app
from ops.cli.bench_front import front
from ops.cli.bench_load import load
from ops.cli.bench_longctx import longctx
from ops.cli.client import connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console, print_data
from ops.model.catalog import SMOLLM2
from ops.model.fetch import FetchError, ensure_model
from tiers.flops import ComputeCost
from tiers.shadow import CacheShape

ROOM_TOKENS = 64  # for the answer, beside a context
DEFAULT_CONTEXTS = [512, 2048, 6000]
DEFAULT_STREAMS = [1, 16]
DEFAULT_BUDGETS = [0.05, 0.1, 0.2]

app = make_app()
app.command("load", context_settings=HELP_NAMES)(load)
app.command("front", context_settings=HELP_NAMES)(front)
app.command("longctx", context_settings=HELP_NAMES)(longctx)


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "bench", arguments)


@app.callback(invoke_without_command=True, context_settings=HELP_NAMES)
def bench(
    context_: typer.Context,
    model: Annotated[Path | None, typer.Option("--model", help="Default: the embedded model.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="First part of the result's file name.")] = None,
    context: Annotated[list[int] | None, typer.Option("--context", min=64, help="Context lengths, tokens.")] = None,
    streams: Annotated[list[int] | None, typer.Option("--streams", min=1, max=64, help="Numbers of streams.")] = None,
    long_prompt: Annotated[int, typer.Option("--long-prompt", min=0, help="Loads beside a stream; 0: none.")] = 6000,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=50, help="Medians are of so many.")] = 3,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Of either side; 0: all cores.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    reference: Annotated[bool, typer.Option("--reference/--no-reference", help="Measure transformers too.")] = True,
    plot: Annotated[bool, typer.Option("--plot", help="Draw a PNG beside the JSON.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result.")] = RESULTS,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure the served model beside transformers on the same weights; writes a JSON file and prints tables."""
    if context_.invoked_subcommand is not None:
        return
    for needed, wanted in (("transformers", reference), ("matplotlib", plot)):
        if wanted and find_spec(needed) is None:
            raise CliError(ExitCode.FAILED, f"{needed} is not installed; make bench installs it")
    progress = make_console(stderr=True)
    try:
        folder = model or ensure_model(SMOLLM2, progress)
    except FetchError as error:
        raise CliError(ExitCode.FAILED, str(error)) from None
    settings = Settings(
        contexts=tuple(sorted(set(context or DEFAULT_CONTEXTS))),
        streams=tuple(sorted(set(streams or DEFAULT_STREAMS))),
        long_prompt_tokens=long_prompt,
        rounds=rounds,
        seed=seed,
    )
    used_threads = threads or len(os.sched_getaffinity(0))
    report = _measure(folder, name or folder.name, settings, used_threads, reference, progress)
    path = write_json(report, results)
    if plot:
        draw("plot.py", path)
    if output is not Format.TABLE:
        print_data(as_plain(report), output)
    else:
        print_report(report, make_console())
    progress.print(f"\nwritten: {path}" + (" and the .png beside it" if plot else ""), soft_wrap=True)


@app.command(context_settings=HELP_NAMES)
def kernels(
    parts: Annotated[str | None, typer.Option("--parts", help="Some of them, by commas; `checks` for parity.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Other tiles too.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result.")] = RESULTS,
) -> None:
    """Measure every Triton kernel on the card here, beside its floor and its peers; prints a table, writes a JSON."""
    command = [sys.executable, "-m", "ops.bench.kernels_bench", "--out", str(results)]
    command += (["--parts", parts] if parts else []) + (["--sweep"] if sweep else [])
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command(context_settings=HELP_NAMES)
def tune(
    kernels: Annotated[str | None, typer.Option("--kernels", help="Some of them, by commas, parts of names.")] = None,
    again: Annotated[bool, typer.Option("--again", help="What is in the table already, too.")] = False,
    table: Annotated[Path | None, typer.Option("--table", help="Its file; default: the one that kernels read.")] = None,
) -> None:
    """Find the fastest launch choices on the card here and write the table of them; goes on where it was stopped."""
    command = [sys.executable, "-m", "ops.bench.tune"]
    command += (["--kernels", kernels] if kernels else []) + (["--again"] if again else [])
    raise typer.Exit(subprocess.run(command + (["--table", str(table)] if table else []), check=False).returncode)


@app.command("model", context_settings=HELP_NAMES)
def whole_models(
    models: Annotated[str | None, typer.Option("--models", help="Some of them, by commas, parts of names.")] = None,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Measure transformers too.")] = True,
    again: Annotated[bool, typer.Option("--again", help="What is in today's record already, too.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result.")] = RESULTS,
) -> None:
    """Measure whole models at their real shapes on the card here, weights made up; goes on where it was stopped."""
    command = [sys.executable, "-m", "ops.bench.model_bench", "--out", str(results)]
    command += (["--models", models] if models else []) + ([] if peer else ["--no-peer"])
    raise typer.Exit(subprocess.run(command + (["--again"] if again else []), check=False).returncode)


@app.command(context_settings=HELP_NAMES)
def replay(
    traces: Annotated[list[Path], typer.Argument(help="Session files, Mooncake traces, folders of them.")],
    budget: Annotated[
        list[float] | None, typer.Option("--budget", min=0.001, max=1, help="Of the working set.")
    ] = None,
    grid: Annotated[int, typer.Option("--grid", min=512, help="Tokens of a chunk; a multiple of 512.")] = 4096,
    bytes_per_token: Annotated[int, typer.Option("--bytes-per-token", min=1)] = HYBRID_BYTES_PER_TOKEN,
    checkpoint_bytes: Annotated[
        int, typer.Option("--checkpoint-bytes", min=0, help="0: attention alone.")
    ] = HYBRID_CHECKPOINT_BYTES,
    matmul_params: Annotated[int, typer.Option("--params", min=1, help="Active ones.")] = HYBRID.matmul_params,
    pair_flops: Annotated[int, typer.Option("--pair-flops", min=0)] = HYBRID.pair_flops,
    state_flops: Annotated[int, typer.Option("--state-flops", min=0)] = HYBRID.state_flops,
    decisions: Annotated[
        int, typer.Option("--decisions", min=0, help="Time decisions among so many items; 0: do not.")
    ] = 100_000,
    name: Annotated[str | None, typer.Option("--name", help="Part of the result's file name.")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result.")] = RESULTS,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show recorded requests to the cache's policies, without a model; writes a JSON file and prints tables."""
    if grid % 512:
        raise CliError(ExitCode.USAGE, f"--grid {grid} is not a multiple of 512")
    cost = ComputeCost(matmul_params, pair_flops, state_flops)
    shape = CacheShape(grid, grid * bytes_per_token, checkpoint_bytes, cost)
    budgets = sorted(set(budget or DEFAULT_BUDGETS))
    stderr = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    before = time.process_time()
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        try:
            files = trace_files(traces)
            reading = progress.add_task("reading", total=len(files))
            requests = read_traces(files, lambda _: progress.advance(reading))
        except TraceError as error:
            raise CliError(ExitCode.FAILED, str(error)) from None
        replaying = progress.add_task("replaying")
        shown = Replay(requests, shape, lambda: progress.advance(replaying))
        progress.update(replaying, total=shown.num_steps(len(budgets)))
        replayed = shown.measure(budgets)
        cpu_s = time.process_time() - before
        progress.add_task("timing decisions", total=None)
        times = decision_times(decisions) if decisions else None
    file_names = tuple(file.name for file in files)
    report = ReplayReport(name or "-".join(path.stem for path in traces), file_names, replayed, times, cpu_s)
    path = write_replay(report, results)
    if output is not Format.TABLE:
        print_data(replay_as_plain(report), output)
    else:
        print_replay(report, make_console())
    stderr.print(f"\nwritten: {path}", soft_wrap=True)


def _measure(
    folder: Path, name: str, settings: Settings, threads: int, with_reference: bool, progress: Console
) -> Report:
    with ending_signals(), ChildDaemon(folder, ["--threads", str(threads)]) as daemon:
        with progress.status("loading") as status, connect(str(daemon.socket)) as client:
            info = daemon.wait_serving(lambda loaded: status.update(f"loading {loaded:.0%}"))
            _check_room(info, settings)
            measurement = Measurement(
                client, daemon.process.pid, Prompts(settings.seed, info.vocab_size), lambda text: status.update(text)
            )
            measurement.warm_up()
            if with_reference:
                with Reference(folder, threads) as reference:
                    ours, theirs = measurement.compare(reference, settings.rounds)
            else:
                ours, theirs = measurement.compare(None, settings.rounds)
            contexts = tuple(measurement.context(length, settings.rounds) for length in settings.contexts)
            streams = tuple(measurement.streams(count, settings.rounds) for count in settings.streams)
            long = settings.long_prompt_tokens
            stall = measurement.stall(long) if long else None
        daemon.stop()
    return Report(name, info.model, info.dtype, info.device, threads, settings, ours, theirs, contexts, streams, stall)


def _check_room(info: admin_pb2.GetServerInfoResponse, settings: Settings) -> None:
    longest = max(*settings.contexts, settings.long_prompt_tokens)
    if longest + ROOM_TOKENS > info.max_context_tokens:
        limit = info.max_context_tokens - ROOM_TOKENS
        raise CliError(ExitCode.USAGE, f"a context of {longest:,} tokens is over this model's {limit:,}")
