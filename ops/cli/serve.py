"""downcore serve: becomes the daemon."""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.cli.errors import CliError, ExitCode
from ops.cli.output import make_console
from ops.model.catalog import SMOLLM2
from ops.model.fetch import FetchError, ensure_model

TELLS = {"-h", "--help", "--show-config", "--check-config"}  # with these the daemon serves nothing


def run(arguments: list[str]) -> int:
    """Replaces this process with `python -m daemon` and the same arguments; without a model, with the embedded one.

    Help and every check of the arguments are the daemon's own.
    """
    names = {argument.split("=", 1)[0] for argument in arguments}
    if not names & TELLS and not names_model(arguments, os.environ):
        try:
            folder = ensure_model(SMOLLM2, make_console(stderr=True))
        except FetchError as error:
            raise CliError(ExitCode.FAILED, str(error)) from None
        arguments = ["--model", str(folder), *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "daemon", *arguments])


def names_model(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether flags, environment or file name a model. A file that cannot be read is the daemon's to complain of."""
    if "--model" in {argument.split("=", 1)[0] for argument in arguments} or "DOWNCORE_ENGINE__MODEL_PATH" in environ:
        return True
    path = _value(arguments, "--config") or environ.get("DOWNCORE_CONFIG")
    if not path:
        return False
    try:
        engine = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("engine", {})
    except (OSError, ValueError):  # not TOML, or not UTF-8
        return True
    return not isinstance(engine, dict) or "model_path" in engine


def _value(arguments: Sequence[str], flag: str) -> str | None:
    for number, argument in enumerate(arguments):
        if argument.startswith(flag + "="):
            return argument.split("=", 1)[1]
        if argument == flag and number + 1 < len(arguments):
            return arguments[number + 1]
    return None
