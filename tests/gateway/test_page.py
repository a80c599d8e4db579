"""The page on gateways: its commands are understood, and its fields and bounds are the code's."""

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from smg.launch_router import parse_router_args
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from daemon.front.command_line import read
from daemon.front.kv_feeds import LINGER_S, MAX_LOG_BYTES, MAX_READERS

PAGE = (Path(__file__).parents[2] / "ops" / "docs" / "gateway.md").read_text()


def commands(*start: str) -> Iterator[list[str]]:
    """The rest of each command of the page that starts so."""
    for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line)
            if tuple(words[: len(start)]) == start:
                yield words[len(start) :]


def test_the_daemons_flags_are_understood() -> None:
    configs = [read(arguments, {}).config() for arguments in commands("downcore", "serve")]
    assert [config.tcp for config in configs] == ["127.0.0.1:7101", "127.0.0.1:7102"]
    assert all(config.gateway for config in configs)
    assert len({config.listen for config in configs}) == 2


def test_the_gateways_flags_are_understood() -> None:
    (arguments,) = commands("python", "-m", "smg.launch_router")
    found = parse_router_args(arguments)
    assert found.worker_urls == ["grpc://127.0.0.1:7101", "grpc://127.0.0.1:7102"]
    assert (found.host, found.policy, found.model_path) == ("127.0.0.1", "cache_aware", "/srv/models/model")


def test_versions_are_those_that_are_tested() -> None:
    (installed,) = commands("pip", "install")
    assert f"smg=={version('smg')}" in installed
    assert f"`smg-grpc-proto` {version('smg-grpc-proto')}" in PAGE


def test_every_sampling_field_is_on_the_page() -> None:
    for name in vllm.SamplingParams.DESCRIPTOR.fields_by_name:
        assert f"`{name}`" in PAGE, name


def test_bounds_are_those_of_the_code() -> None:
    assert f"latest {MAX_LOG_BYTES >> 20} MiB" in PAGE
    assert f"for {LINGER_S:.0f} s after" in PAGE
    assert f"{MAX_READERS} subscribers" in PAGE
