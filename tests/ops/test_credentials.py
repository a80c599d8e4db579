"""Tokens and certificates from the command line to the daemon: what ops/docs/security.md says is what happens."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.front.principals import read_principals
from ops.cli.credentials import channel_credentials, is_local
from ops.cli.errors import CliError, ExitCode
from ops.cli.main import run, take_credentials
from tests.front.harness import running_front

PAGE = Path(__file__).parents[2] / "ops" / "docs" / "security.md"
SHORT = "/bin:/usr/bin"


def blocks() -> list[str]:
    """The page's shell commands."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shell(script: str, folder: Path, server: str = "") -> subprocess.CompletedProcess[str]:
    """Runs commands as the page has them; of `localhost:8443` is made where the daemon listens."""
    program = folder / "bin" / "downcore"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ops "$@"\n')
        program.chmod(0o700)
    root = str(PAGE.parents[2])
    environ = {"PATH": f"{program.parent}:{SHORT}", "HOME": str(folder), "PYTHONPATH": f"{root}:{root}/proto"}
    command = ["bash", "-euo", "pipefail", "-c", script.replace("localhost:8443", server)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(shutil.which("openssl", path=SHORT) is None, reason="openssl is not installed")
def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    *making, serving, calling = blocks()
    assert serving.startswith("downcore serve ")
    for script in making:
        done = shell(script, tmp_path)
        assert done.returncode == 0, done.stderr
    known = read_principals(tmp_path / "principals.toml").principals
    assert {name: (p.own_namespace, len(p.tokens)) for name, p in known.items()} == {
        "operator": ("operator", 1),
        "search": ("team/search", 1),
    }
    for secret in (tmp_path / "credentials").iterdir():
        assert secret.stat().st_mode & 0o077 == 0, secret
    flags = shlex.split(serving.replace("\\\n", " "))[2:]
    flags = [str(tmp_path / flag) if (tmp_path / flag).is_file() else flag for flag in flags]
    flags[flags.index("--tcp") + 1] = "127.0.0.1:0"
    with running_front(tmp_path / "front", flags=flags) as front:
        port = front.ready_line.rpartition(":")[2]
        done = shell(calling, tmp_path, f"localhost:{port}")
        assert done.returncode == 0, done.stderr
        assert "SERVING" in done.stdout
        wrong = "downcore --tls-ca ca.crt --token-file credentials/search.token status --server localhost:8443"
        done = shell(wrong, tmp_path, f"localhost:{port}")
        assert done.returncode == ExitCode.UNAUTHORISED
        assert "this needs the scope admin [PERMISSION_DENIED]" in done.stderr


def test_flags_before_a_command_and_after_it_are_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOWNCORE_TOKEN_FILE", "DOWNCORE_TLS_CA", "DOWNCORE_TLS_KEY"):
        monkeypatch.setenv(name, "")
    rest = take_credentials(["--token-file", "t", "--tls-ca=c", "prefix", "ls", "--tls-key", "k", "-o", "json"])
    assert rest == ["prefix", "ls", "-o", "json"]
    names = ("DOWNCORE_TOKEN_FILE", "DOWNCORE_TLS_CA", "DOWNCORE_TLS_KEY")
    assert tuple(os.environ[name] for name in names) == ("t", "c", "k")
    with pytest.raises(CliError, match="needs a file"):
        take_credentials(["status", "--tls-ca"])


@pytest.mark.parametrize("line", ["generate -- --tls-ca x", "serve --tls-key x", "config check --tls-cert=x"])
def test_what_is_no_credential_of_the_command_line_stays(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOWNCORE_TLS_CA", "DOWNCORE_TLS_KEY", "DOWNCORE_TLS_CERT"):
        monkeypatch.setenv(name, "")
    assert take_credentials(line.split()) == line.split()
    assert not os.environ["DOWNCORE_TLS_CA"] + os.environ["DOWNCORE_TLS_KEY"] + os.environ["DOWNCORE_TLS_CERT"]


def test_a_token_goes_over_no_network_in_the_open(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("dct_a.b\n")
    environ = {"DOWNCORE_TOKEN_FILE": str(token)}
    for target in ("unix:/x", "127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert is_local(target)
        assert channel_credentials(target, environ) is not None
    for target in ("10.0.0.1:1", "example.org:1", "[2001:db8::1]:1"):
        with pytest.raises(CliError, match="over TLS only"):
            channel_credentials(target, environ)
        assert channel_credentials(target, {**environ, "DOWNCORE_TLS_CA": "system"}) is not None
    assert channel_credentials("10.0.0.1:1", {}) is None
    token.chmod(0o640)
    with pytest.raises(CliError, match=r"--token-file .*: open to other users"):
        channel_credentials("unix:/x", environ)


@pytest.mark.parametrize(
    "arguments",
    [["a b"], ["a", "--scope", "all"], ["a", "--expires", "soon"], ["a", "--namespace", "/"], ["a", "--expires", "0d"]],
)
def test_a_wrong_token_is_not_made(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "new", *arguments]) == ExitCode.USAGE
    assert "dct_" not in capsys.readouterr().out


def test_neither_a_token_file_nor_a_principal_is_written_over(tmp_path: Path) -> None:
    out, principals = str(tmp_path / "t"), str(tmp_path / "p.toml")
    assert run(["token", "new", "a", "--out", out, "--principals", principals]) == ExitCode.OK
    before = Path(out).read_text(), Path(principals).read_text()
    assert run(["token", "new", "a", "--principals", principals]) == ExitCode.USAGE
    assert run(["token", "new", "b", "--out", out, "--principals", principals]) == ExitCode.USAGE
    assert before == (Path(out).read_text(), Path(principals).read_text())
