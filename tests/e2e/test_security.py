"""A real daemon: what it listens on, what it refuses to start with, and that no caller learns of another's prompts."""

import ipaddress
import os
import struct
import subprocess
import sys
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import cache_pb2, generation_pb2

from tests.campaigns.budget import first_seed
from tests.campaigns.timing import measure
from tests.e2e.daemon import TINY_FLAGS, Daemon, running, tiny_model
from tests.front.harness import running_front
from tests.front.pki import Authority
from tests.front.secured import Who, code_of, tls_flags, unary, write_principals

SCOPES = ("generate", "warm")
LISTENING = "0A"  # st of /proc/net/tcp
ACCEPTS = 0x10000  # flag of /proc/net/unix
PROMPT = [7 + i % 200 for i in range(64 * 3 + 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


def inodes_of(pid: int) -> set[str]:
    """Sockets that a process and those that it started hold."""
    found: set[str] = set()
    for number in [pid, *children_of(pid)]:
        for entry in Path(f"/proc/{number}/fd").iterdir():
            try:
                where = os.readlink(entry)
            except FileNotFoundError:  # closed meanwhile
                continue
            if where.startswith("socket:["):
                found.add(where[8:-1])
    return found


def children_of(pid: int) -> list[int]:
    children = [int(n) for task in Path(f"/proc/{pid}/task").iterdir() for n in (task / "children").read_text().split()]
    return children + [below for child in children for below in children_of(child)]


def listening_of(pid: int) -> tuple[set[str], set[str], int]:
    """TCP addresses, Unix paths and the number of UDP and raw sockets that the daemon's processes listen with."""
    mine = inodes_of(pid)
    tcp = {
        address_of(fields[1])
        for name in ("tcp", "tcp6")
        for fields in rows_of(name)
        if fields[3] == LISTENING and fields[9] in mine
    }
    unix = {
        fields[7] if len(fields) > 7 else "unnamed"
        for fields in rows_of("unix")
        if int(fields[3], 16) & ACCEPTS and fields[6] in mine
    }
    others = sum(fields[9] in mine for name in ("udp", "udp6", "raw", "raw6") for fields in rows_of(name))
    return tcp, unix, others


def rows_of(name: str) -> list[list[str]]:
    path = Path("/proc/net") / name
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def address_of(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080: the kernel writes an address as words of its own byte order."""
    words, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return f"{address}:{int(port, 16)}"


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


def tcp_of(ready_line: str) -> list[str]:
    """Where it says that it listens."""
    said = ready_line.partition(" on ")[2].strip().split(", ")
    return [where.replace("[::1]", "::1") for where in said if not where.startswith("unix:")]


def check_listening(pid: int, ready_line: str, sockets: set[Path], num_tcp: int) -> None:
    tcp, unix, others = listening_of(pid)
    assert tcp == set(tcp_of(ready_line))
    assert len(tcp) == num_tcp
    assert unix == set(map(str, sockets))
    assert others == 0
    for path in sockets:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_daemon_listens_where_it_was_told_to_and_nowhere_else(tmp_path: Path, model: Path) -> None:
    admin = tmp_path / "admin" / "a.sock"
    flags = ("--tcp", "127.0.0.1:0", "--admin-tcp", "127.0.0.2:0", "--admin-listen", str(admin))
    with running(made(tmp_path / "run"), model, *TINY_FLAGS, *flags) as daemon:
        check_listening(daemon.process.pid, daemon.ready_line, {daemon.socket, admin}, 2)


@pytest.mark.parametrize("flags", [(), ("--tcp", "127.0.0.1:0"), ("--admin-tcp", "[::1]:0")])
def test_what_was_not_configured_does_not_listen(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with running_front(tmp_path, flags=flags) as front:
        check_listening(front.process.pid, front.ready_line, {front.socket}, len(flags) // 2)


def started(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "daemon", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_beyond_this_machine_it_does_not_listen_without_tls_and_authentication(tmp_path: Path, model: Path) -> None:
    base = ("--model", str(model), *TINY_FLAGS, "--listen", str(tmp_path / "run" / "d.sock"))
    tls = tls_flags(tmp_path, Authority(), mutual=False)
    principals = ("--principals-file", str(write_principals(tmp_path / "p.toml", [Who("who", SCOPES)])))
    for flags, where in (
        ((), ("--tcp", "0.0.0.0:0")),
        (tls, ("--admin-tcp", "[::]:0")),
        (principals, ("--tcp", "192.0.2.1:0")),
    ):
        done = started(*base, *flags, *where)
        assert done.returncode == 1
        assert "with TLS and authentication only" in done.stderr
        assert done.stderr.count("\n") == 1, "a sentence, not a traceback"
    with running_front(tmp_path / "open", flags=(*tls, *principals, "--tcp", "0.0.0.0:0")) as front:
        (address,) = listening_of(front.process.pid)[0]
        assert address.rpartition(":")[0] == "::", "every address of either family: gRPC knows no other wildcard"


def test_files_that_would_let_others_in_are_refused(tmp_path: Path, model: Path) -> None:
    base = ("--model", str(model), *TINY_FLAGS, "--listen", str(tmp_path / "run" / "d.sock"), "--tcp", "127.0.0.1:0")
    flags = tls_flags(tmp_path, Authority(), mutual=True)
    principals = write_principals(tmp_path / "p.toml", [Who("who", SCOPES)])
    everything = (*base, *flags, "--principals-file", str(principals))
    key = tmp_path / "server.key"

    def complaint(*arguments: str, status: int = 1) -> str:
        done = started(*arguments)
        assert done.returncode == status, done.stderr
        return done.stderr

    key.chmod(0o644)
    assert "is open to other users" in complaint(*everything)
    key.chmod(0o600)
    principals.chmod(0o660)
    assert "may be written by others" in complaint(*everything)
    principals.chmod(0o600)
    key.write_bytes(Authority().issue("localhost").key)
    assert "server.key" in complaint(*everything)
    assert "tls_client_ca_file needs principals_file" in complaint(*base, *flags, status=2)
    assert "need each other" in complaint(*base, *flags[:2], status=2)
    principals.write_text('[[principals]]\nname = "who"\nscopes = ["generate"]\ntoken = "dct_who.x"\n')
    assert "token" in complaint(*base, "--principals-file", str(principals))
    assert not (tmp_path / "run" / "d.sock").exists()


class Callers:
    """A daemon with a real cache, and three callers of it: two strangers, and one of the first's own team."""

    def __init__(self, daemon: Daemon, authority: Authority, people: list[Who]) -> None:
        (address,) = tcp_of(daemon.ready_line)
        address = address.replace("127.0.0.1", "localhost")
        self.channels = {who.name: authority.channel(address, None, who.token) for who in people}

    def cached_tokens(self, name: str, prompt: list[int], **fields: Any) -> int:
        """Of a request that asks for one token."""
        stub = self.channels[name].unary_stream(
            "/downcore.v1.GenerationService/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            stopping=generation_pb2.StoppingParams(max_tokens=1, ignore_eos=True),
            **fields,
        )
        (usage,) = (one.summary.usage for one in stub(request, timeout=60) if one.HasField("summary"))
        return usage.cached_tokens.device + usage.cached_tokens.host + usage.cached_tokens.disk


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Generator[Callers]:
    folder = tmp_path_factory.mktemp("callers")
    authority = Authority()
    later = datetime.now(UTC) + timedelta(days=1)
    people = [
        Who("one", SCOPES, "team", expires=later),
        Who("mate", SCOPES, "team"),
        Who("two", SCOPES),
        Who("full", SCOPES, limits={"cached_bytes": 0, "pinned_bytes": 0}),
    ]
    principals = write_principals(folder / "p.toml", people)
    flags = [*tls_flags(folder, authority, mutual=False), "--principals-file", str(principals), "--tcp", "127.0.0.1:0"]
    with running(made(folder / "run"), model, *TINY_FLAGS, *flags) as daemon:
        yield Callers(daemon, authority, people)


def test_cached_tokens_are_of_ones_own_namespace_alone(callers: Callers) -> None:
    assert callers.cached_tokens("one", PROMPT) == 0
    assert callers.cached_tokens("one", PROMPT) == 64 * 3
    assert callers.cached_tokens("mate", PROMPT) == 64 * 3, "the same namespace"
    assert callers.cached_tokens("two", PROMPT) == 0
    assert callers.cached_tokens("one", PROMPT, namespace="team/part") == 0
    assert callers.cached_tokens("mate", PROMPT, namespace="team/part") == 64 * 3


def test_a_namespace_keeps_no_more_than_its_quota(callers: Callers) -> None:
    assert callers.cached_tokens("full", PROMPT) == 0
    prompt = cache_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=PROMPT))
    lookup = cache_pb2.LookupPrefixRequest(prompt=prompt)

    def matched() -> int:
        answer = unary(callers.channels["full"], "CacheService/LookupPrefix", lookup)
        return cache_pb2.LookupPrefixResponse.FromString(answer).matched_tokens

    end = datetime.now(UTC) + timedelta(seconds=10)
    while matched():
        assert datetime.now(UTC) < end, "what is over the quota stays"
    selector = cache_pb2.PrefixSelector(prompt=prompt)
    pin = cache_pb2.PinPrefixRequest(prefix=selector)
    found = code_of(lambda: unary(callers.channels["full"], "CacheService/PinPrefix", pin))
    assert found is grpc.StatusCode.NOT_FOUND


def test_what_others_have_cached_is_not_told_and_ones_own_is(tmp_path: Path) -> None:
    found = measure(tmp_path, 16, first_seed())
    assert found.others.known_tokens == found.others.fresh_tokens == {0}
    assert found.lookups.known_tokens == found.lookups.fresh_tokens == {0}
    assert found.own.fresh_tokens == {0}
    assert found.own.known_tokens == {512}, "caching was on"
    # Of time the campaign has the figures: of so few pairs only what is certain is looked at.
    assert found.own.auc > 0.8
    assert 0.1 < found.others.auc < 0.9
