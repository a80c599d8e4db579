"""Commands that destroy something ask before, and can say what they would do."""

import sys
from typing import Annotated

import typer

from ops.cli.errors import CliError, ExitCode

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def confirm(question: str, *, yes: bool) -> None:
    """Returns where the user agrees, at the terminal or with --yes.

    Raises:
        CliError: the user does not, or there is no terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CliError(ExitCode.USAGE, "there is no terminal to ask at: --yes goes on without asking")
    if not typer.confirm(question, err=True):
        raise CliError(ExitCode.FAILED, "nothing was done")
