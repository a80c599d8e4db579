"""The example clients in three languages: they stream, cancel, show errors, wait as they are told, speak mutual TLS.

All three must do the same; the daemon is a front with the scripted engine, which repeats its prompt.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from downcore.v1 import generation_pb2 as pb

from tests.foreign.conftest import or_skip
from tests.foreign.golang import MODULE, SOURCE, go_program, gofmt, page_commands
from tests.foreign.kept import npm_packages
from tests.front.harness import Front, eventually, running_front
from tests.front.pki import Authority
from tests.front.secured import Who, addresses_of, tls_flags, write_principals

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "ops" / "examples"
LANGUAGES = ("python", "node", "go")
MANY = "500000"  # tokens: more than any test waits for


@pytest.fixture(scope="module", params=LANGUAGES)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs a client."""
    if request.param == "python":
        return [sys.executable, str(EXAMPLES / "python" / "generate.py")]
    if request.param == "go":
        return [str(or_skip(go_program))]
    folder = tmp_path_factory.mktemp("node")
    (folder / "generate.js").write_text((EXAMPLES / "node" / "generate.js").read_text())
    (folder / "node_modules").symlink_to(or_skip(npm_packages) / "node_modules")
    return ["node", str(folder / "generate.js")]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    with running_front(tmp_path_factory.mktemp("front"), flags=("--max-open-requests", "1")) as front:
        yield front


def start(client: list[str], *arguments: str, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DOWNCORE_")}
    environment = {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "DOWNCORE_PROTO": str(ROOT / "proto"), **variables}
    return subprocess.Popen(
        [*client, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ask(client: list[str], *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, output and error."""
    with start(client, *arguments, **variables) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_it_streams_an_answer(client: list[str], front: Front) -> None:
    status, out, err = ask(client, "grüße", "14", DOWNCORE_SERVER=f"unix:{front.socket}")
    assert (status, out) == (0, "grüßegrüße\n"), err
    assert err == "prompt 7 tokens, 0 from the cache; answer 14 tokens\n"


def test_it_shows_an_errors_code_message_and_reason(client: list[str], front: Front) -> None:
    status, out, err = ask(client, "hey", "0", DOWNCORE_SERVER=f"unix:{front.socket}")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"INVALID_ARGUMENT: stopping\.max_tokens: must be .*, not 0 \[INVALID_ARGUMENT\]\n", err), err


def test_ctrl_c_cancels_in_the_daemon_too(client: list[str], front: Front) -> None:
    with start(client, "hello", MANY, DOWNCORE_SERVER=f"unix:{front.socket}") as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "h"
        assert front.sequences()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, "cancelled")
    eventually(lambda: not front.sequences())


def test_it_tries_again_after_the_time_of_retry_info(client: list[str], front: Front) -> None:
    stopping = pb.StoppingParams(max_tokens=int(MANY))
    holder = front.stream("hello", stopping=stopping, timeout=60)
    next(holder)
    with start(client, "hey", "2", DOWNCORE_SERVER=f"unix:{front.socket}") as process:
        assert process.stderr is not None
        refused = process.stderr.readline()
        holder.cancel()
        out, err = process.communicate(timeout=60)
    assert re.fullmatch(r"RESOURCE_EXHAUSTED: .* \[QUEUE_FULL\]; try again in 1 s\n", refused), refused
    assert (process.returncode, out) == (0, "hey\n"), err


def test_it_speaks_mutual_tls_with_certificate_or_token(client: list[str], tmp_path: Path) -> None:
    authority, folder = Authority(), tmp_path
    by_token = Who("by-token", ["generate"])
    by_name = Who("by-name", ["generate"], certificates=["client.internal"])
    principals = write_principals(folder / "principals.toml", [by_token, by_name])
    authority.issue("client.internal").write(folder / "client.crt", folder / "client.key")
    authority.issue("nobody.internal").write(folder / "nobody.crt", folder / "nobody.key")
    token = folder / "token"
    token.write_text(by_token.token + "\n")
    flags = ["--tcp", "127.0.0.1:0", "--principals-file", str(principals), *tls_flags(folder, authority, mutual=True)]
    with running_front(folder / "front", flags=flags) as front:
        (address,) = (where for where in addresses_of(front) if where.startswith("localhost:"))
        server = {"DOWNCORE_SERVER": address, "DOWNCORE_TLS_CA": str(folder / "ca.crt")}
        named = {"DOWNCORE_TLS_CERT": str(folder / "client.crt"), "DOWNCORE_TLS_KEY": str(folder / "client.key")}
        nobody = {"DOWNCORE_TLS_CERT": str(folder / "nobody.crt"), "DOWNCORE_TLS_KEY": str(folder / "nobody.key")}
        assert ask(client, "hey", "2", **server, **named)[:2] == (0, "hey\n")
        assert ask(client, "hey", "2", **server, **nobody, DOWNCORE_TOKEN_FILE=str(token))[:2] == (0, "hey\n")
        status, _, err = ask(client, "hey", "2", **server, **nobody)
        assert (status, "[UNAUTHENTICATED]" in err) == (1, True), err


def test_a_token_does_not_leave_the_machine_in_the_open(client: list[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    status, _, err = ask(client, "hey", DOWNCORE_SERVER="192.0.2.1:7001", DOWNCORE_TOKEN_FILE=str(token))
    assert (status, err) == (1, "a token leaves this machine over TLS only: set DOWNCORE_TLS_CA\n")


def test_their_service_config_is_the_published_one() -> None:
    published = json.loads((ROOT / "proto" / "downcore" / "v1" / "service_config.json").read_text())
    (published,) = published["methodConfig"]
    for name in ("python/generate.py", "node/generate.js", "go/main.go"):
        (text,) = re.findall(r"\{\"methodConfig\".*?\n\}\]\}", (EXAMPLES / name).read_text(), re.DOTALL)
        (config,) = json.loads(text)["methodConfig"]
        assert config["retryPolicy"] == published["retryPolicy"], name
        assert all(service in published["name"] for service in config["name"]), name


def test_the_node_example_needs_what_is_tested() -> None:
    wanted = json.loads((EXAMPLES / "node" / "package.json").read_text())["dependencies"]
    locked = json.loads((Path(__file__).parent / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_the_go_example_is_as_gofmt_writes_it(go_client: Path) -> None:
    assert go_client.exists()
    assert gofmt("-l", ".") == ""
    assert f"module {MODULE}\n" in (SOURCE / "go.mod").read_text()


def test_the_go_pages_commands_are_those_that_made_it() -> None:
    begins = [" ".join(command.split()[:2]) for command in page_commands()]
    assert begins == ["go install", "go install", "cd ops/examples/go", "protoc -I", "go mod", "go build"]
