"""Foreign clients: grpc-js from the .proto files, and buf curl from reflection, list, describe, stream and cancel."""

import base64
import json
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.front.harness import Front, eventually, running_front

HERE = Path(__file__).parent
PROTO = HERE.parents[1] / "proto"
SERVICES = {
    "downcore.v1.AdminService", "downcore.v1.CacheService", "downcore.v1.GenerationService", "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}  # fmt: skip


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with running_front(tmp_path_factory.mktemp("foreign"), flags=("--tcp", "127.0.0.1:0")) as front:
        yield front


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def buf_curl(packages: Path, front: Front, *arguments: str, path: str = "") -> str:
    buf = str(packages / "node_modules" / ".bin" / "buf")
    address = front.ready_line.rpartition(", ")[2]
    url = f"http://{address}{path}"
    return run([buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect", *arguments, url], packages)


def test_grpc_js_streams_cancels_and_reads_an_errors_details(packages: Path, front: Front) -> None:
    shown = run(["node", str(HERE / "client.js"), str(PROTO), f"unix:{front.socket}"], packages)
    got: dict[str, Any] = json.loads(shown)
    assert got["kinds"][0] == "started"
    assert got["kinds"][-1] == "summary"
    assert got["kinds"].count("finished") == 2
    assert got["text"] == "grüße"
    assert got["completion_tokens"] == 14
    assert (got["cancel_code"], got["cancel_count"]) == (1, 5)
    eventually(lambda: not front.sequences())
    assert got["error_code"] == 3
    status = status_pb2.Status.FromString(base64.b64decode(got["error_details"]))
    violation = error_details_pb2.BadRequest()
    assert sum(detail.Unpack(violation) for detail in status.details) == 1
    assert violation.field_violations[0].field == "n"


def test_buf_curl_lists_every_service_by_reflection(packages: Path, front: Front) -> None:
    assert set(buf_curl(packages, front, "--list-services").split()) == SERVICES


def test_buf_curl_lists_and_describes_methods_by_reflection(packages: Path, front: Front) -> None:
    listed = buf_curl(packages, front, "--list-methods").split()
    assert "downcore.v1.GenerationService/Generate" in listed
    assert "downcore.v1.AdminService/Drain" in listed


def test_buf_curl_streams_an_answer(packages: Path, front: Front) -> None:
    request = json.dumps({"text": "hey", "stopping": {"maxTokens": 3}})
    shown = buf_curl(packages, front, "--data", request, path="/downcore.v1.GenerationService/Generate")
    decoder, events, at = json.JSONDecoder(), [], 0
    while at < len(shown.rstrip()):
        event, at = decoder.raw_decode(shown, at)
        events.append(event)
        at += len(shown[at:]) - len(shown[at:].lstrip())
    assert "started" in events[0]
    assert "".join(event["chunk"].get("text", "") for event in events if "chunk" in event) == "heyhe"
    assert events[-1]["summary"]["usage"]["completionTokens"] == 3


def test_buf_curl_reads_server_info(packages: Path, front: Front) -> None:
    shown = buf_curl(packages, front, "--data", "{}", path="/downcore.v1.AdminService/GetServerInfo")
    assert json.loads(shown)["state"] == "ENGINE_STATE_SERVING"
