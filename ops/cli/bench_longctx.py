"""downcore bench longctx: one long context with ever less of it on the device."""

import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ops.bench.longctx import LongMeasurement, LongSettings
from ops.bench.longctx_report import as_plain, print_report, write_json
from ops.bench.report import RESULTS, draw
from ops.child import ending_signals
from ops.cli.app import Format, FormatOption
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console, print_data
from ops.models.shipped import TINY_HYBRID

DEFAULT_SHARES = [0.5, 0.1, 0.02]
QUESTIONS = ("needle", "status")


class Below(StrEnum):
    """Where the rest of the context lies."""

    HOST = "host"
    DISK = "disk"


def longctx(
    model: Annotated[Path | None, typer.Option("--model", help="Default: tiny-hybrid, which ships with this.")] = None,
    context: Annotated[int, typer.Option("--context", min=2048, help="Tokens, the answer included.")] = 16384,
    answer: Annotated[int, typer.Option("--answer", min=4, help="Tokens decoded.")] = 24,
    resident: Annotated[
        list[float] | None,
        typer.Option("--resident", min=0.001, max=1.0, help="Shares of the context on the device, beside all of it."),
    ] = None,
    below: Annotated[list[Below] | None, typer.Option("--below", help="host, disk. Default: both.")] = None,
    grid: Annotated[int, typer.Option("--grid", min=64, help="Tokens of a prefill chunk; two must fit.")] = 128,
    whole: Annotated[bool, typer.Option("--whole/--no-whole", help="Measure all of it resident first.")] = True,
    questions: Annotated[
        bool, typer.Option("--questions", help="Ask for a note and for a state in texts that long, not random tokens.")
    ] = False,
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="All answer again by turns, so often; questions are asked once.")
    ] = 5,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: all cores.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw a PNG beside the JSON.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result.")] = RESULTS,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure decode and prefill with ever less of a context resident; exits 1 where an answer is wrong."""
    if plot and find_spec("matplotlib") is None:
        raise CliError(ExitCode.FAILED, "matplotlib is not installed; make bench installs it")
    settings = LongSettings(
        context_tokens=context,
        answer_tokens=answer,
        shares=tuple(sorted(set(resident or DEFAULT_SHARES), reverse=True)),
        tiers=tuple(tier.value for tier in below or Below),
        grid=grid,
        threads=threads or len(os.sched_getaffinity(0)),
        seed=seed,
        with_whole=whole,
        questions=QUESTIONS if questions else (),
        rounds=0 if questions else rounds,
    )
    for share in settings.shares:
        if share * context < 2 * grid:
            raise CliError(ExitCode.USAGE, f"{share:.1%} of {context:,} tokens are less than two chunks of {grid:,}")
    progress = make_console(stderr=True)
    with ending_signals(), progress.status("starting") as status:
        report = LongMeasurement(model or TINY_HYBRID, settings, lambda text: status.update(text)).measure()
    path = write_json(report, results)
    if plot:
        draw("longctx_plot.py", path)
    if output is not Format.TABLE:
        print_data(as_plain(report), output)
    else:
        print_report(report, make_console())
    progress.print(f"\nwritten: {path}" + (" and the .png beside it" if plot else ""), soft_wrap=True)
    if not all(answered.is_right for budget in report.budgets for answered in budget.answers):
        raise typer.Exit(int(ExitCode.FAILED))
