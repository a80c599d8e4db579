"""Asks the daemon's own code what a model needs, in a process of its own: the command line never imports torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
MODULE = "daemon.models.check"


class CheckError(Exception):
    """The folder cannot be served; the message says why."""


def check_folder(folder: Path, *, pool_bytes: int | None, max_sequences: int | None) -> dict[str, Any]:
    """The report on a snapshot folder, from its configuration and headers alone.

    Raises:
        CheckError: the configuration or a header is not one that can be served.
    """
    command = [sys.executable, "-m", MODULE, str(folder)]
    if pool_bytes is not None:
        command += ["--pool-bytes", str(pool_bytes)]
    if max_sequences is not None:
        command += ["--max-sequences", str(max_sequences)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CheckError(f"the check took longer than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CheckError(lines[-1] if lines else f"the check ended with status {done.returncode}")
    return json.loads(done.stdout)
