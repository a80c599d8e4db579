"""grpcurl, where it is installed: lists, describes and streams by reflection, both own services and the gateway's."""

import json
import shutil
import subprocess
from collections.abc import Generator
from typing import Any

import pytest

from tests.front.harness import BYTE, Front, running_front

GRPCURL = shutil.which("grpcurl")

pytestmark = pytest.mark.skipif(GRPCURL is None, reason="grpcurl is not installed")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    flags = ("--tcp", "127.0.0.1:0", "--gateway", "true")
    with running_front(tmp_path_factory.mktemp("grpcurl"), flags=flags) as front:
        yield front


def grpcurl(front: Front, *arguments: str, request: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    assert GRPCURL is not None
    data = () if request is None else ("-d", json.dumps(request))
    address = front.ready_line.rpartition(", ")[2]
    command = [GRPCURL, "-plaintext", "-max-time", "20", *data, address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_lists_the_services_and_describes_a_message(front: Front) -> None:
    listed = grpcurl(front, "list").stdout.split()
    assert {"downcore.v1.GenerationService", "grpc.health.v1.Health", "vllm.grpc.engine.VllmEngine"} <= set(listed)
    assert "rpc SubscribeKvEvents" in grpcurl(front, "describe", "vllm.grpc.engine.VllmEngine").stdout
    assert "optional uint32 max_tokens = 8" in grpcurl(front, "describe", "vllm.grpc.engine.SamplingParams").stdout


def squeezed(text: str) -> str:
    """Versions differ in how they spell the names of fields, and in spaces."""
    return "".join(text.split()).replace("_", "").lower()


def test_it_streams_an_answer_of_both_services(front: Front) -> None:
    asked: dict[str, Any] = {"text": "hey", "stopping": {"max_tokens": 4}}
    own = grpcurl(front, "downcore.v1.GenerationService/Generate", request=asked)
    assert own.returncode == 0, own.stderr
    assert '"completiontokens":4' in squeezed(own.stdout)
    ids = [BYTE + 97, BYTE + 98]
    asked = {"tokenized": {"input_ids": ids}, "sampling_params": {"max_tokens": 3}}
    foreign = grpcurl(front, "vllm.grpc.engine.VllmEngine/Generate", request=asked)
    assert foreign.returncode == 0, foreign.stderr
    assert squeezed(f'"output_ids": {[*ids, ids[0]]}') in squeezed(foreign.stdout)


def test_it_shows_an_errors_code_and_field(front: Front) -> None:
    refused = grpcurl(front, "downcore.v1.GenerationService/Generate", request={"text": "x", "n": 9})
    assert refused.returncode == 64 + 3
    assert "InvalidArgument" in refused.stderr
    assert '"field":"n"' in squeezed(refused.stderr)
