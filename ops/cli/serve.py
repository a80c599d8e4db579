"""downcore serve: becomes the daemon."""

import os
import sys

from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console
from ops.model.catalog import SMOLLM2
from ops.model.fetch import FetchError, ensure_model


def run(arguments: list[str]) -> int:
    """Replaces this process with `python -m daemon` and the same arguments; without --model, with the embedded model.

    Help and every check of the arguments are the daemon's own.
    """
    names = {argument.split("=", 1)[0] for argument in arguments}
    if not names & {"--model", "-h", "--help"}:
        try:
            folder = ensure_model(SMOLLM2, make_console(stderr=True))
        except FetchError as error:
            raise CliError(ExitCode.FAILED, str(error)) from None
        arguments = ["--model", str(folder), *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "daemon", *arguments])
