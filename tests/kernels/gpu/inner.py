"""Runs a file of checks in a pytest of its own, with a plugin that makes Triton work without a GPU.

Triton reads TRITON_INTERPRET when it is imported, and the compile gate replaces its driver: neither may share a process
with the other, nor with anything else. On a machine with a GPU the checks run as they are, on the device:
`python -m pytest --confcutdir=tests/kernels/gpu -o python_files=check_*.py tests/kernels/gpu`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
TIMEOUT_S = 280


def files(pattern: str) -> list[str]:
    """Names of the files to run."""
    return sorted(path.name for path in FOLDER.glob(pattern))


def run_inner(names: Sequence[str], plugin: str, environment: dict[str, str]) -> None:
    """Fails where the inner run does, or where it had nothing to run."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"),
        *("-p", f"tests.kernels.gpu.{plugin}", "--confcutdir", str(FOLDER)),
        *("-o", f"python_files={' '.join(names)}", *(str(FOLDER / name) for name in names)),
    ]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "TRITON_INTERPRET"))}
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\b[1-9]\d* passed\b", run.stdout), f"nothing ran:\n{run.stdout}"
