"""What reads metrics: promtool judges the page and the rules, curl does what ops/docs/observability.md types."""

import os
import re
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from downcore.v1 import generation_pb2 as pb

from tests.front.harness import Front, running_front
from tests.front.scraping import get, metrics_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ops" / "docs" / "observability.md"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    folder = tmp_path_factory.mktemp("scraped")
    flags = ("--metrics-tcp", "127.0.0.1:0", "--metrics-listen", str(folder / "m" / "m.sock"))
    (folder / "m").mkdir(mode=0o700)
    with running_front(folder, engine=("--tiers", "device,host,disk"), flags=flags) as front:
        front.generate(stopping=pb.StoppingParams(max_tokens=7))
        yield front


def test_promtool_takes_every_family_of_the_page(promtool: Path, front: Front) -> None:
    body = get(metrics_port(front.log), "/metrics").body
    own = b"\n".join(line for line in body.splitlines() if b"vllm:" not in line) + b"\n"
    done = subprocess.run([str(promtool), "check", "metrics"], input=own, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_promtool_parses_the_aliases_and_dislikes_only_their_colon(promtool: Path, front: Front) -> None:
    body = get(metrics_port(front.log), "/metrics").body
    done = subprocess.run([str(promtool), "check", "metrics"], input=body, capture_output=True, check=False, timeout=60)
    complaints = (done.stdout + done.stderr).decode().splitlines()
    assert complaints
    for complaint in complaints:
        assert complaint.startswith("vllm:"), complaint
        assert "':'" in complaint, complaint


def test_promtool_takes_the_rules_of_alerts(promtool: Path) -> None:
    command = [str(promtool), "check", "rules", str(ROOT / "ops" / "alerts" / "downcore.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"SUCCESS: \d\d rules found", done.stdout), done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_pages_curl_commands_get_the_metrics(front: Front, tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    commands = [line for line in page.splitlines() if line.startswith("curl ")]
    assert len(commands) == 2
    places = {
        "127.0.0.1:9464": f"127.0.0.1:{metrics_port(front.log)}",
        "/run/user/1000/downcore-metrics/metrics.sock": str(front.socket.parents[1] / "m" / "m.sock"),
    }
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    for command in commands:
        for shown, here in places.items():
            command = command.replace(shown, here)
        done = subprocess.run(
            ["bash", "-ec", command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert "\ndowncore_serving 1\n" in done.stdout
