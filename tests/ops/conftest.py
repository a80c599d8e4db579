"""What the tests of the command line share: a command line run against a module's own `front`."""

from typing import Any

import pytest

from ops.cli.main import run
from tests.front.harness import Front


@pytest.fixture
def call(front: Front, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line: exit code, stdout, stderr."""
    monkeypatch.setenv("DOWNCORE_SERVER", str(front.socket))

    def invoke(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke
