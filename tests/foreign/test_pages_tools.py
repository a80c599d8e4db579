"""Commands of ops/docs/clients.md that are other projects' programs: grpcurl and buf curl, as they are typed there."""

import os
import shlex
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.front.harness import Front, running_front

PAGE = Path(__file__).parents[2] / "ops" / "docs" / "clients.md"
SHOWN = "127.0.0.1:7001"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with running_front(tmp_path_factory.mktemp("tools"), flags=("--tcp", "127.0.0.1:0")) as front:
        yield front


def outputs(program: str, path: Path, front: Front) -> list[str]:
    """What each of the page's commands of a program prints."""
    address = front.ready_line.rpartition(", ")[2]
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line.replace(SHOWN, address) for line in text.splitlines() if line.startswith(f"{program} ")]
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    printed: list[str] = []
    for command in commands:
        done = subprocess.run(
            shlex.split(command), env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        printed.append(done.stdout)
    return printed


def test_grpcurl_as_the_page_types_it(grpcurl: Path, front: Front) -> None:
    listed, answer = outputs("grpcurl", grpcurl.parent, front)
    assert "downcore.v1.GenerationService" in listed.split()
    assert '"completion_tokens": 4' in answer


def test_buf_curl_as_the_page_types_it(packages: Path, front: Front) -> None:
    (answer,) = outputs("buf", packages / "node_modules" / ".bin", front)
    assert '"completionTokens": 4' in answer or '"completionTokens":4' in answer
