"""downcore config show, config check: the settings a daemon would start with, and where each comes from."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ops.cli.app import Format, FormatOption, make_app, run_app
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console, make_table, print_data

# Everything the command does not know is a flag of the daemon, which has the only list of them.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}

app = make_app("Settings of the daemon. Flags of `downcore serve` may follow, as if it were started with them.")


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "config", arguments)


@app.command("show", context_settings=PASSED_ON)
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what is at its default.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Every setting with its value: defaults, then the file, then the environment, then flags."""
    rows = [row for row in settings(context.args) if not changed or row["origin"] != "default"]
    if output is not Format.TABLE:
        print_data(rows, output)
        return
    table = make_table(("section", "setting", "value", *(("origin",) if origin else ())))
    for row in rows:
        table.add_row(row["section"], row["key"], as_text(row["value"]), *((row["origin"],) if origin else ()))
    make_console().print(table, markup=False)


@app.command("check", context_settings=PASSED_ON)
def check(context: typer.Context) -> None:
    """Say whether a daemon would start with these settings. Exits 2 where something is wrong with them."""
    done = _daemon("--check-config", context.args)
    if done.returncode:
        raise CliError(ExitCode.USAGE, _message(done))
    print("the settings are in order")


def settings(flags: Sequence[str]) -> list[dict[str, Any]]:
    """Every setting as the daemon tells it: section, key, flag, value, origin, default, help.

    Raises:
        CliError: the daemon refuses them.
    """
    done = _daemon("--show-config", flags)
    if done.returncode:
        raise CliError(ExitCode.USAGE, _message(done))
    return json.loads(done.stdout)


def as_text(value: Any) -> str:
    """A value as the file would have it; "-" for none."""
    if value is None:
        return "-"
    return json.dumps(value, ensure_ascii=False)


def _daemon(action: str, flags: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "daemon", action, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _message(done: "subprocess.CompletedProcess[str]") -> str:
    return done.stderr.strip().removeprefix("downcored: ") or f"the daemon ended with code {done.returncode}"
