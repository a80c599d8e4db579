"""The guard's parts by themselves: principals, their file, tokens, namespaces, and a method that nobody listed."""

import asyncio
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from downcore.v1 import admin_pb2, generation_pb2
from hypothesis import given
from hypothesis import strategies as st

from daemon.errors import ErrorReason, RequestError
from daemon.front import access, status, tokens
from daemon.front.access import ACCESS, GENERATION
from daemon.front.caller import local_principal, namespace_of, readable_namespace_of
from daemon.front.door import Door
from daemon.front.guard import Guard
from daemon.front.held import HeldBytes
from daemon.front.limits import Use, Uses
from daemon.front.principals import Directory, Principal, Scope, TokenEntry, is_namespace, read_principals
from daemon.front.service import methods_of
from daemon.front.tokens import Token, TokenHash
from daemon.front.watched import UnusableFile
from tests.front.harness import Front, running_front
from tests.front.secured import Who, fresh_token, generate, hash_of, text_of, write_principals

NAMES = st.lists(st.from_regex(r"[A-Za-z0-9._-]{1,8}", fullmatch=True), min_size=1, max_size=4).map("/".join)


class Nothing:
    """A servicer that answers whatever it is asked."""

    async def Generate(self, request: Any, context: Any) -> None:
        raise AssertionError("it was called")

    Tokenize = Generate

    async def Abort(self, request: Any, context: Any) -> generation_pb2.AbortResponse:
        return generation_pb2.AbortResponse(found=True)


def code_of_abort() -> grpc.StatusCode:
    """What a caller with every scope gets for GenerationService.Abort."""

    async def body() -> grpc.StatusCode:
        server = grpc.aio.server()
        door = Door(None, local_principal("n"), sees_certificates=False)
        server.add_generic_rpc_handlers(
            (Guard(methods_of(GENERATION, Nothing()), door, Uses(HeldBytes(1 << 30)), Counter(), Counter()),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await channel.unary_unary(f"/{GENERATION}/Abort")(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await server.stop(0)
        return grpc.StatusCode.OK

    return asyncio.run(body())


def test_a_method_without_an_entry_is_refused_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of_abort() is grpc.StatusCode.OK
    entries = {name: needs for name, needs in ACCESS[GENERATION].items() if name != "Abort"}
    monkeypatch.setattr(access, "ACCESS", {**ACCESS, GENERATION: entries})
    assert code_of_abort() is grpc.StatusCode.PERMISSION_DENIED


def test_every_reason_has_a_code() -> None:
    assert set(status.CODES) == set(ErrorReason)


def directory(*people: Principal) -> Directory:
    return Directory(people)


def principal(name: str, **fields: Any) -> Principal:
    return Principal(name=name, scopes=tuple(Scope), **fields)


@given(st.text(max_size=80))
def test_no_text_but_a_token_is_one(text: str) -> None:
    known = directory(principal("a", tokens=(TokenEntry(hash_of(fresh_token("a"))),)))
    with pytest.raises(RequestError) as caught:
        known.by_token(text, 0.0)
    assert caught.value.reason is ErrorReason.UNAUTHENTICATED
    assert caught.value.message == "the token is not known here"


def test_each_of_a_principals_tokens_is_its_own_and_nobody_elses() -> None:
    first, second, foreign = fresh_token("a"), fresh_token("a"), fresh_token("b")
    a = principal("a", tokens=(TokenEntry(hash_of(first)), TokenEntry(hash_of(second))))
    known = directory(a, principal("b", tokens=(TokenEntry(hash_of(foreign)),)))
    assert {known.by_token(token, 0.0).principal.name for token in (first, second)} == {"a"}
    assert known.by_token(foreign, 0.0).principal.name == "b"
    swapped = f"dct_a.{foreign.partition('.')[2]}"
    for token in (swapped, first[:-1], first + "A", first.replace("dct_", ""), fresh_token("c")):
        with pytest.raises(RequestError):
            known.by_token(token, 0.0)


def test_a_token_is_compared_in_constant_time_and_hashed_with_its_salt() -> None:
    assert "compare_digest" in inspect.getsource(TokenHash.matches)
    token = Token.parse(fresh_token("a"))
    assert token is not None
    salt = bytes(range(16))
    digest = hashlib.sha256(salt + token.secret.encode()).digest()
    kept = TokenHash.parse(f"sha256:{salt.hex()}:{digest.hex()}")
    assert kept.matches(token.secret)
    assert not kept.matches(token.secret[::-1])
    assert not tokens.NOBODY.matches("")
    for text in ("", "sha256::", f"md5:{salt.hex()}:{digest.hex()}", f"sha256:{salt.hex()}:{digest.hex()[:-1]}"):
        with pytest.raises(ValueError, match="token new"):
            TokenHash.parse(text)


def test_a_credential_is_known_as_long_as_it_stands_for_the_same() -> None:
    token = fresh_token("a")
    entry = TokenEntry(hash_of(token))
    before = directory(principal("a", tokens=(entry,), certificates=("A.test", "spiffe://x/A")))
    by_token = before.by_token(token, 0.0)
    by_name = before.by_certificate(["a.TEST"])
    assert before.still_knows(by_token, 0.0)
    assert before.still_knows(by_name, 0.0)
    with_limit = directory(principal("a", tokens=(entry,), max_requests=1))
    assert with_limit.still_knows(by_token, 0.0)
    assert not with_limit.still_knows(by_name, 0.0)
    for changed in (
        directory(),
        directory(principal("a", tokens=(TokenEntry(hash_of(token)),))),  # another salt: another entry
        directory(principal("a", tokens=(entry,), namespace="b")),
        directory(Principal(name="a", scopes=(Scope.WARM,), tokens=(entry,))),
    ):
        assert not changed.still_knows(by_token, 0.0)
    with pytest.raises(RequestError):
        before.by_certificate(["spiffe://x/a"])


BAD_FILES = {
    "two principals are named a": [Who("a", ()), Who("a", ())],
    "names b and another": [Who("a", (), certificates=["X.test"]), Who("b", (), certificates=["x.test"])],
    "has two quotas": [
        Who("a", (), "n", limits={"cached_bytes": 1}),
        Who("b", (), "n", limits={"cached_bytes": 2}),
    ],
    "Invalid enum value 'everything'": [Who("a", ("everything",))],
    "unknown field `max_reqests`": [Who("a", (), limits={"max_reqests": 1})],
    "max_requests of a must be": [Who("a", (), limits={"max_requests": -1})],
    "name 'a b' must match": [Who("a b", ())],
    "namespace 'a//b' of a must match": [Who("a", (), "a//b")],
}


@pytest.mark.parametrize("complaint", BAD_FILES)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, complaint: str) -> None:
    path = write_principals(tmp_path / "p.toml", BAD_FILES[complaint])
    with pytest.raises(UnusableFile) as caught:
        read_principals(path)
    assert complaint in str(caught.value)


def test_an_expiry_needs_a_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.touch(mode=0o600)
    table = '[[principals]]\nname = "a"\nscopes = []\ntokens = [{{ hash = "{}", expires = 2030-01-01T00:00:00{} }}]\n'
    path.write_text(table.format(hash_of(fresh_token("a")), ""))
    with pytest.raises(UnusableFile, match="time zone"):
        read_principals(path)
    path.write_text(table.format(hash_of(fresh_token("a")), "Z"))
    assert read_principals(path).principals["a"].tokens[0].expires is not None


@given(NAMES, NAMES)
def test_no_caller_chooses_a_namespace_beyond_its_own(own: str, asked: str) -> None:
    call = SimpleNamespace(principal=Principal(name="x", scopes=(Scope.GENERATE, Scope.WARM), namespace=own))
    operator = SimpleNamespace(principal=Principal(name="x", scopes=tuple(Scope), namespace=own))
    assert namespace_of(call) == own
    assert namespace_of(call, f"{own}/{asked}") == f"{own}/{asked}"
    assert readable_namespace_of(operator, asked) == asked
    if asked.split("/")[: own.count("/") + 1] != own.split("/"):
        for choose, who in ((namespace_of, call), (readable_namespace_of, call), (namespace_of, operator)):
            with pytest.raises(RequestError) as caught:
                choose(who, asked)
            assert caught.value.reason is ErrorReason.PERMISSION_DENIED
    else:
        assert namespace_of(call, asked) == asked


def test_namespaces_are_names_separated_by_slashes() -> None:
    assert all(map(is_namespace, ("a", "a/b", "A.b_c-9/x", "x" * 128)))
    assert not any(map(is_namespace, ("", "/", "a/", "/a", "a//b", "a b", "a\n", "ä", "x" * 129)))


def test_what_is_queued_is_given_back_once() -> None:
    use, limited = Use(), principal("a", max_queued_tokens=10)
    first = use.queue(limited, 50)
    with pytest.raises(RequestError) as caught:
        use.queue(limited, 1)
    assert caught.value.reason is ErrorReason.LIMIT_EXCEEDED
    first.release()
    first.release()
    assert use.queued_tokens == 0
    use.queue(limited, 4)
    use.queue(limited, 6)
    assert use.queued_tokens == 10


def service_config() -> str:
    return files("downcore.v1").joinpath("service_config.json").read_text(encoding="utf-8")


def test_the_published_retries_are_of_what_is_safe_to_do_again() -> None:
    (entry,) = json.loads(service_config())["methodConfig"]
    assert entry["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    for name in entry["name"]:
        assert name["service"] in ACCESS
        assert name.get("method", "Check") in ACCESS[name["service"]] or "method" not in name
        assert name["service"] != access.ADMIN


def is_refused(front: Front, request: generation_pb2.GenerateRequest) -> bool:
    """With UNAVAILABLE, by a client that does not try again."""
    try:
        list(front.generation.Generate(request, wait_for_ready=True, timeout=20))
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    return False


@contextmanager
def refusing_front(folder: Path, request: generation_pb2.GenerateRequest) -> Generator[Front]:
    """A front that has just refused this request, since its engine still loads."""
    for load_s in ("1.5", "2.5", "3.5"):  # a busy machine may take longer to connect than the engine to load
        own = folder / load_s[0]
        own.mkdir(mode=0o700)
        front = Front(own, engine=("--load-s", load_s), wait=False)
        try:
            if is_refused(front, request):
                yield front
                return
        finally:
            assert front.close() == 0
    raise AssertionError("the first call was never refused")


def test_a_client_with_the_published_retries_waits_for_an_engine_that_loads(tmp_path: Path) -> None:
    stopping = generation_pb2.StoppingParams(max_tokens=1, ignore_eos=True)
    request = generation_pb2.GenerateRequest(text="ab", stopping=stopping)
    with (
        refusing_front(tmp_path, request) as front,
        front.new_channel(("grpc.service_config", service_config())) as channel,
    ):
        stub = channel.unary_stream(
            f"/{GENERATION}/Generate", response_deserializer=generation_pb2.GenerateResponse.FromString
        )
        assert text_of(stub(request.SerializeToString(), wait_for_ready=True, timeout=20)) == "a"


def test_a_client_without_them_is_told_when_to_come_back(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        front.admin.Drain(admin_pb2.DrainRequest(), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(front.channel, "ab"))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "5000") in error.trailing_metadata()
