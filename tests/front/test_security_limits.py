"""What a caller may have open, and what becomes of it when its credential goes: limits, expiry, files read again."""

import json
import os
import resource
import signal
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from downcore.v1 import admin_pb2

from daemon.front import listeners
from tests.front.harness import Front, details_of, eventually, running_front
from tests.front.pki import Authority
from tests.front.secured import (
    Who,
    addresses_of,
    code_of,
    generate,
    listed,
    text_of,
    tls_flags,
    unary,
    warm,
    write_principals,
)

GONE = grpc.StatusCode.UNAUTHENTICATED
FOREVER = 1 << 19  # tokens of an answer that outlasts its test


class Place:
    """A front that takes tokens over TLS, and the file of who may call."""

    def __init__(self, folder: Path, *people: Who, flags: tuple[str, ...] = (), engine: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.authority = Authority()
        self.principals = write_principals(folder / "principals.toml", people)
        self.flags = [
            *tls_flags(folder, self.authority, mutual=False), "--principals-file", str(self.principals),
            "--tcp", "127.0.0.1:0", *flags,
        ]  # fmt: skip
        self.engine = engine
        self.front: Front

    @contextmanager
    def running(self) -> Generator["Place"]:
        with running_front(self.folder, self.engine, self.flags) as self.front:
            yield self

    def channel(self, who: Who) -> grpc.Channel:
        return self.authority.channel(addresses_of(self.front)[1], None, who.token)

    def serial(self) -> int:
        """Of the certificate that a new connection is shown."""
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        context.set_alpn_protocols(["h2"])
        host, port = addresses_of(self.front)[1].split(":")
        with (
            socket.create_connection((host, int(port)), 5) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            shown = tls.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number

    def num_log(self, text: str) -> int:
        return sum(text in line for line in list(self.front.log))


def refusal(call: Any) -> tuple[grpc.StatusCode, dict[str, Any], dict[str, Any]]:
    """Code, details and trailers of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), details_of(error), dict(error.trailing_metadata())


def test_a_caller_at_its_limit_of_calls_is_shed_at_once_and_others_are_not(tmp_path: Path) -> None:
    few, many = Who("few", ("generate", "warm"), limits={"max_requests": 2}), Who("many", ("generate",))
    with Place(tmp_path, few, many).running() as place, place.channel(few) as channel, place.channel(many) as other:
        running = [generate(channel, "ab", max_tokens=FOREVER) for _ in range(2)]
        for one in running:
            next(one)
        code, details, trailers = refusal(lambda: list(generate(channel, "ab")))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details["ErrorInfo"].reason == "LIMIT_EXCEEDED"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == int(trailers["grpc-retry-pushback-ms"]) == 1000
        assert code_of(lambda: listed(channel)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text_of(generate(other, "ab")) == "a"
        running[0].cancel()
        eventually(lambda: _works(lambda: list(generate(channel, "ab"))))
        running[1].cancel()


def test_prompts_that_wait_are_limited_by_their_tokens_and_count_no_more_once_they_run(tmp_path: Path) -> None:
    who, other = Who("who", ("generate", "warm"), limits={"max_queued_tokens": 10}), Who("other", ("generate",))
    place = Place(tmp_path, who, other, engine=("--max-running", "1"))
    with place.running(), place.channel(who) as channel, place.channel(other) as others:
        long = generate(channel, "x" * 50, max_tokens=FOREVER)  # longer than the limit: one alone may be
        next(long)
        waiting = generate(channel, "y" * 8, timeout_s=20)
        eventually(lambda: len(place.front.sequences()) == 2)
        code, details, _ = refusal(lambda: list(generate(channel, "z" * 3)))
        assert (code, details["ErrorInfo"].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        behind = generate(others, "y" * 8, timeout_s=20)
        eventually(lambda: len(place.front.sequences()) == 3)
        long.cancel()
        assert text_of(waiting) == "y"
        assert text_of(behind) == "y"
        assert text_of(generate(channel, "z" * 10)) == "z"


def test_jobs_that_nobody_listens_to_count_as_well(tmp_path: Path) -> None:
    who = Who("who", ("warm",), limits={"max_requests": 1})
    place = Place(tmp_path, who, engine=("--tick-s", "0.5"))
    with place.running(), place.channel(who) as channel:
        with pytest.raises(grpc.RpcError):
            warm(channel, key="detached", detached=True, timeout_s=0.3)
        code, details, _ = refusal(lambda: warm(channel, key="another"))
        assert (code, details["ErrorInfo"].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        assert warm(channel, key="detached", detached=True)[-1].HasField("receipt"), "its own may be joined"


def test_quotas_of_the_file_are_the_namespaces_and_follow_the_file(tmp_path: Path) -> None:
    who = Who("who", ("warm",), "team", limits={"cached_bytes": 4096, "pinned_bytes": 1})
    with Place(tmp_path, who).running() as place:

        def quota() -> tuple[int, int] | None:
            answer = admin_pb2.ListQuotasResponse.FromString(
                unary(place.front.channel, "AdminService/ListQuotas", admin_pb2.ListQuotasRequest())
            )
            found = [q for q in answer.quotas if q.namespace == "team" and q.HasField("cached_bytes")]
            return (found[0].cached_bytes, found[0].pinned_bytes) if found else None

        eventually(lambda: quota() == (4096, 1))
        who.limits = {"cached_bytes": 8192, "pinned_bytes": 2}
        write_principals(place.principals, [who])
        eventually(lambda: quota() == (8192, 2))
        who.limits = {}
        write_principals(place.principals, [who])
        eventually(lambda: quota() is None)


def test_an_open_call_ends_when_its_token_expires_or_is_taken_out_or_loses_its_scope(tmp_path: Path) -> None:
    soon = Who("soon", ("generate",), expires=datetime.now(UTC) + timedelta(seconds=15))
    out, less, stays = (Who(name, ("generate",)) for name in ("out", "less", "stays"))
    with Place(tmp_path, soon, out, less, stays).running() as place:
        channels = {who.name: place.channel(who) for who in (soon, out, less, stays)}
        calls = {name: generate(channel, "ab", 60, max_tokens=FOREVER) for name, channel in channels.items()}
        for call in calls.values():
            next(call)
        write_principals(place.principals, [soon, Who("less", ("warm",), token=less.token), stays])
        for name in ("out", "less", "soon"):
            with pytest.raises(grpc.RpcError) as caught:
                list(calls[name])
            assert caught.value.code() is GONE, name  # type: ignore[attr-defined]
        assert datetime.now(UTC) < soon.expires + timedelta(seconds=20)  # type: ignore[operator]
        for name in ("soon", "out"):
            assert code_of(lambda at=channels[name]: list(generate(at, "ab"))) is GONE
        next(calls["stays"])
        calls["stays"].cancel()
        eventually(lambda: place.front.sequences() == [])
        for channel in channels.values():
            channel.close()


def test_a_request_whose_credential_is_taken_back_is_logged_as_failed_and_not_as_left(tmp_path: Path) -> None:
    out, stays = Who("out", ("generate",)), Who("stays", ("generate",))
    with Place(tmp_path, out, stays).running() as place, place.channel(out) as channel:
        call = generate(channel, "ab", 60, max_tokens=FOREVER)
        next(call)
        write_principals(place.principals, [stays])
        assert code_of(lambda: list(call)) is GONE
        eventually(lambda: place.num_log("request over") == 1)
        (line,) = (json.loads(line) for line in list(place.front.log) if "request over" in line)
        assert (line["principal"], line["ends"], line["error"]) == ("out", "failed", "UNAUTHENTICATED")
        eventually(lambda: place.front.sequences() == [])


def test_a_file_that_cannot_be_used_changes_nothing_and_the_next_good_one_does(tmp_path: Path) -> None:
    first, second = Who("first", ("generate",)), Who("second", ("generate",))
    with Place(tmp_path, first).running() as place, place.channel(first) as channel, place.channel(second) as newer:
        assert text_of(generate(channel, "ab")) == "a"
        assert code_of(lambda: list(generate(newer, "ab"))) is GONE
        place.principals.write_text('[[principals]]\nname = "first"\nscopes = ["everything"]\n')
        eventually(lambda: place.num_log("stays in use") == 1)
        assert text_of(generate(channel, "ab")) == "a"
        write_principals(place.principals, [second])
        place.principals.chmod(0o622)
        eventually(lambda: place.num_log("stays in use") >= 2)
        assert text_of(generate(channel, "ab")) == "a"
        write_principals(place.principals, [first, second])
        os.kill(place.front.process.pid, signal.SIGHUP)
        eventually(lambda: _works(lambda: list(generate(newer, "ab"))))
        assert text_of(generate(channel, "ab")) == "a"


def test_a_new_certificate_is_shown_to_new_connections_and_old_ones_live_on(tmp_path: Path) -> None:
    who = Who("who", ("generate",))
    with Place(tmp_path, who).running() as place, place.channel(who) as channel:
        cert, key = place.folder / "server.crt", place.folder / "server.key"
        running = generate(channel, "ab", 60, max_tokens=FOREVER)
        next(running)
        first = place.serial()
        fresh = place.authority.issue("localhost", "127.0.0.1")
        fresh.write(cert, key)
        eventually(lambda: place.serial() == fresh.serial)
        assert fresh.serial != first
        key.write_bytes(b"no key")
        eventually(lambda: place.num_log("stays in use") >= 1)
        assert place.serial() == fresh.serial
        next(running)
        running.cancel()
        last = place.authority.issue("localhost", "127.0.0.1")
        last.write(cert, key)
        eventually(lambda: place.serial() == last.serial)


def _works(call: Any) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_connections_are_bounded_and_leave_descriptors_for_everything_else(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = listeners.SPARE_FILES + listeners.LEAST_CONNECTIONS
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        front = Front(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    opened: list[socket.socket] = []
    try:
        front.info()  # over a connection that is there before them
        while sum(map(is_open, opened)) == len(opened) <= listeners.LEAST_CONNECTIONS:
            opened.append(socket.socket(socket.AF_UNIX))
            opened[-1].connect(str(front.socket))
        assert len(opened) == listeners.LEAST_CONNECTIONS
        front.info()
        for one in opened:
            one.close()
        with front.new_channel() as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
    finally:
        for one in opened:
            one.close()
        assert front.close() == 0


def is_open(one: socket.socket) -> bool:
    """The server has sent its settings, and not closed the connection."""
    one.settimeout(5)
    try:
        return bool(one.recv(1, socket.MSG_PEEK))
    except ConnectionError:
        return False


def test_refused_calls_are_counted_in_the_log_and_do_not_fill_it(tmp_path: Path) -> None:
    who = Who("who", ("generate",))
    with Place(tmp_path, who).running() as place, place.channel(Who("who", ())) as stranger:
        for _ in range(50):
            assert code_of(lambda: list(generate(stranger, "ab"))) is GONE
        eventually(lambda: place.num_log("50 UNAUTHENTICATED") == 1)
        assert place.num_log("refused") <= 4
