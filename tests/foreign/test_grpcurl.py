"""grpcurl, a client on grpc-go: lists, describes and streams by reflection, of both this project and the gateway."""

import json
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.front.harness import BYTE, Front, running_front

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    flags = ("--tcp", "127.0.0.1:0", "--gateway", "true")
    with running_front(tmp_path_factory.mktemp("grpcurl"), flags=flags) as front:
        yield front


@pytest.fixture(scope="module")
def call(grpcurl: Path, front: Front) -> Call:
    """Runs grpcurl with these arguments, and this request where there is one."""
    address = front.ready_line.rpartition(", ")[2]

    def call(*arguments: str, request: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        data = () if request is None else ("-d", json.dumps(request))
        command = [str(grpcurl), "-plaintext", "-max-time", "20", *data, address, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return call


def test_it_lists_the_services_and_describes_a_message(call: Call) -> None:
    listed = call("list").stdout.split()
    assert {"downcore.v1.GenerationService", "grpc.health.v1.Health", "vllm.grpc.engine.VllmEngine"} <= set(listed)
    assert "rpc SubscribeKvEvents" in call("describe", "vllm.grpc.engine.VllmEngine").stdout
    assert "optional uint32 max_tokens = 8" in call("describe", "vllm.grpc.engine.SamplingParams").stdout


def test_it_streams_an_answer_of_both_services(call: Call) -> None:
    own = call("downcore.v1.GenerationService/Generate", request={"text": "hey", "stopping": {"maxTokens": 4}})
    assert own.returncode == 0, own.stderr
    assert '"completion_tokens": 4' in own.stdout
    request = {"tokenized": {"inputIds": [BYTE + 97, BYTE + 98]}, "samplingParams": {"maxTokens": 3}}
    foreign = call("vllm.grpc.engine.VllmEngine/Generate", request=request)
    assert foreign.returncode == 0, foreign.stderr
    assert json.loads(foreign.stdout)["complete"]["output_ids"] == [BYTE + 97, BYTE + 98, BYTE + 97]


def test_it_shows_an_errors_code_and_field(call: Call) -> None:
    refused = call("downcore.v1.GenerationService/Generate", request={"text": "x", "n": 9})
    assert refused.returncode == 64 + 3
    assert "InvalidArgument" in refused.stderr
    assert '"field":"n"' in refused.stderr
