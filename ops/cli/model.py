"""downcore model check, downcore model fetch, downcore model path."""

from typing import Annotated

import typer

from ops.cli.app import make_app, run_app
from ops.cli.errors import CliError, ExitCode
from ops.cli.model_check import check
from ops.cli.output import make_console
from ops.model.catalog import SMOLLM2, model_path
from ops.model.fetch import FetchError, ensure_model, find_damage

app = make_app(f"The embedded model, {SMOLLM2.name}, and what any other needs.")
app.command("check")(check)


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "model", arguments)


@app.command("fetch")
def fetch(
    verify: Annotated[bool, typer.Option("--verify", help="Digest every file of a folder that is there.")] = False,
) -> None:
    """Download and convert the model, unless it is there; prints its folder."""
    try:
        folder = ensure_model(SMOLLM2, make_console(stderr=True))
    except FetchError as error:
        raise CliError(ExitCode.FAILED, str(error)) from None
    damage = find_damage(SMOLLM2, folder, full=True) if verify else None
    if damage is not None:
        raise CliError(ExitCode.FAILED, f"{folder} is damaged ({damage}); remove it and fetch again")
    print(folder)


@app.command("path")
def path() -> None:
    """The model's folder. Exits 6 when it has not been fetched, or not wholly."""
    folder = model_path(SMOLLM2)
    damage = find_damage(SMOLLM2, folder, full=False)
    if damage is not None:
        raise CliError(ExitCode.NOT_FOUND, f"{folder}: {damage}; run downcore model fetch")
    print(folder)
