"""Nobody gets in who may not: every method of every service on every listener, over real sockets with mutual TLS.

A call is refused by its own code, UNAUTHENTICATED or PERMISSION_DENIED; where a client has no certificate of our
authority there is no connection. What is let in is proven too, so that a server that refuses everything fails here.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import cache_pb2, generation_pb2
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from daemon.front.access import ACCESS, ADMIN, Access
from tests.engines.scripted_cache import GRID
from tests.front.harness import details_of, running_front
from tests.front.pki import Authority, Pair
from tests.front.secured import (
    Guarded,
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

REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
SCOPES = ("generate", "warm", "admin")
LONG = timedelta(days=1)
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

PEOPLE = {
    "all": Who("all", SCOPES, "team", certificates=["spiffe://test/all"]),
    "other": Who("other", SCOPES, "other", certificates=["other.test"]),
    "below": Who("below", ("generate", "warm"), "team/below"),
    "generate": Who("generate", ("generate",), certificates=["generate.test"]),
    "warm": Who("warm", ("warm",)),
    "admin": Who("admin", ("admin",)),
    "nothing": Who("nothing", ()),
    "late": Who("late", SCOPES, expires=datetime.now(UTC) - timedelta(seconds=1)),
}


@dataclass(frozen=True)
class Method:
    """A method as a stranger calls it."""

    path: str
    needs: Access | None
    answer: Any

    def call(self, channel: grpc.Channel, request: bytes, timeout_s: float = 2.0) -> Iterator[Any]:
        """Any method can be called as a stream of requests and answers; on the wire they are alike."""
        stub = channel.stream_stream(self.path, response_deserializer=self.answer.FromString)
        return stub(iter((request,)), timeout=timeout_s)

    def code(self, channel: grpc.Channel, request: bytes = b"") -> grpc.StatusCode:
        """What the call ends with; OK as well where it has only begun to answer."""
        calling: Any = self.call(channel, request)
        try:
            next(calling)
            calling.cancel()
        except StopIteration:
            pass
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
        return grpc.StatusCode.OK


def described(channel: grpc.Channel) -> list[Method]:
    """Every method of every service that the listener's reflection tells of, from its own descriptors."""
    stub = channel.stream_stream(
        REFLECT,
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    def ask(**question: Any) -> reflection_pb2.ServerReflectionResponse:
        (answer,) = stub(iter((reflection_pb2.ServerReflectionRequest(**question),)), timeout=10)
        return answer

    pool = descriptor_pool.DescriptorPool()
    known: set[bytes] = set()
    methods: list[Method] = []
    for name in (service.name for service in ask(list_services="").list_services_response.service):
        told = ask(file_containing_symbol=name).file_descriptor_response.file_descriptor_proto
        for file in reversed(told):  # what a file imports comes after it
            if file not in known:
                pool.AddSerializedFile(file)
                known.add(file)
        for method in pool.FindServiceByName(name).methods:
            needs = ACCESS.get(name, {}).get(method.name)
            methods.append(Method(f"/{name}/{method.name}", needs, message_factory.GetMessageClass(method.output_type)))
    return methods


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Generator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority()
    principals = write_principals(folder / "principals.toml", PEOPLE.values())
    flags = [
        *tls_flags(folder, authority, mutual=True), "--principals-file", str(principals),
        "--tcp", "127.0.0.1:0", "--admin-tcp", "127.0.0.1:0", "--gateway", "true",
    ]  # fmt: skip
    with running_front(folder, ("--tiers", "device,host,disk"), flags) as front:
        _, address, admin_address = addresses_of(front)
        yield Guarded(
            front, authority, address, admin_address, principals, folder / "server.crt", folder / "server.key"
        )


@contextmanager
def reached(guarded: Guarded, address: str, pair: Pair | None, token: str | None = None) -> Generator[grpc.Channel]:
    with guarded.authority.channel(address, pair, token) as channel:
        yield channel


def stranger(guarded: Guarded) -> Pair:
    """A certificate of our authority that names nobody."""
    return guarded.authority.issue("stranger.test")


def by_token(guarded: Guarded, address: str, who: str) -> Any:
    return reached(guarded, address, stranger(guarded), PEOPLE[who].token)


def test_every_served_method_of_both_listeners_is_in_the_table_and_nothing_else_is(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "all") as main, by_token(guarded, guarded.admin_address, "all") as admin:
        on_main, on_admin = described(main), described(admin)
    for method in (*on_main, *on_admin):
        assert method.needs is not None, f"{method.path} has no entry"
    served = {method.path for method in (*on_main, *on_admin)}
    assert served == {f"/{service}/{name}" for service, methods in ACCESS.items() for name in methods}
    services = [{path.split("/")[1] for path in (m.path for m in methods)} for methods in (on_main, on_admin)]
    assert ADMIN not in services[0]
    assert services[0] & services[1] == {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert ADMIN in services[1]


@pytest.mark.parametrize("where", ["main", "admin"])
def test_every_method_is_refused_to_all_who_may_not_call_it(guarded: Guarded, where: str) -> None:
    address = guarded.address if where == "main" else guarded.admin_address
    with by_token(guarded, address, "all") as channel:
        methods = described(channel)
    assert len(methods) >= 10
    nobody = {
        "a certificate that names nobody": (stranger(guarded), None),
        "a token that nobody has": (stranger(guarded), PEOPLE["all"].token[:-4] + "AAAA"),
        "a token of no known name": (stranger(guarded), PEOPLE["all"].token.replace("all", "none")),
        "something that is no token": (stranger(guarded), "x"),
        "an expired token": (stranger(guarded), PEOPLE["late"].token),
        "an expired token beside a good certificate": (
            guarded.authority.issue("spiffe://test/all"), PEOPLE["late"].token
        ),
        "a certificate of two principals": (guarded.authority.issue("spiffe://test/all", "other.test"), None),
        "a name of another kind": (guarded.authority.issue("spiffe://other.test"), None),
    }  # fmt: skip
    for what, (pair, token) in nobody.items():
        with reached(guarded, address, pair, token) as channel:
            for method in methods:
                expected = grpc.StatusCode.OK if method.needs is Access.OPEN else grpc.StatusCode.UNAUTHENTICATED
                assert method.code(channel) is expected, f"{method.path} with {what}"
    for who, scopes in (("nothing", ()), ("generate", ("generate",)), ("warm", ("warm",)), ("admin", ("admin",))):
        with by_token(guarded, address, who) as channel:
            for method in methods:
                if method.needs in (Access.OPEN, Access.CALLER) or method.path.endswith("/Drain"):
                    continue
                assert method.needs is not None
                code = method.code(channel)
                if method.needs.scope in scopes:
                    assert code not in REFUSED, f"{method.path} is {who}'s to call"
                else:
                    assert code is grpc.StatusCode.PERMISSION_DENIED, f"{method.path} as {who}"
    with by_token(guarded, address, "generate") as channel:
        drain = [method for method in methods if method.path.endswith("/Drain")]
        assert [method.code(channel) for method in drain] == [grpc.StatusCode.PERMISSION_DENIED] * len(drain)


@pytest.mark.parametrize("where", ["main", "admin"])
def test_without_a_good_certificate_there_is_no_connection(guarded: Guarded, where: str) -> None:
    address = guarded.address if where == "main" else guarded.admin_address
    with by_token(guarded, address, "all") as channel:
        methods = described(channel)
    forged = Authority().issue("spiffe://test/all")
    late = guarded.authority.issue("spiffe://test/all", lifetime=-timedelta(seconds=1))
    for pair in (None, forged, late):
        with reached(guarded, address, pair, PEOPLE["all"].token) as channel:
            for method in methods:
                assert method.code(channel) is grpc.StatusCode.UNAVAILABLE, method.path
    plain = grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
    with plain:
        assert {method.code(plain) for method in methods} == {grpc.StatusCode.UNAVAILABLE}


def test_a_certificate_is_enough_and_names_its_principal(guarded: Guarded) -> None:
    with reached(guarded, guarded.address, guarded.authority.issue("spiffe://test/all")) as channel:
        assert text_of(generate(channel, "hi")) == "h"
    with reached(guarded, guarded.address, guarded.authority.issue("GENERATE.test")) as channel:
        assert text_of(generate(channel, "hi")) == "h"
        with pytest.raises(grpc.RpcError) as caught:
            listed(channel)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]


def test_administration_is_on_its_own_listener_and_nowhere_else(guarded: Guarded) -> None:
    path = f"/{ADMIN}/GetServerInfo"
    with by_token(guarded, guarded.address, "all") as channel:
        assert Method(path, None, generation_pb2.AbortResponse).code(channel) is grpc.StatusCode.UNIMPLEMENTED
    with by_token(guarded, guarded.admin_address, "all") as channel:
        generate_path = "/downcore.v1.GenerationService/Generate"
        found = Method(generate_path, None, generation_pb2.GenerateResponse).code(channel)
        assert found is grpc.StatusCode.UNIMPLEMENTED


def test_of_a_refused_call_nothing_is_parsed(guarded: Guarded) -> None:
    garbage = b"\xff" * (1 << 20)
    with by_token(guarded, guarded.address, "late") as late, by_token(guarded, guarded.address, "all") as good:
        for method in described(good):
            if method.needs not in (Access.OPEN, Access.CALLER):
                assert method.code(late, garbage) is grpc.StatusCode.UNAUTHENTICATED
                assert method.code(good, garbage) is grpc.StatusCode.INVALID_ARGUMENT, method.path


def test_headers_are_bounded_and_the_next_call_works(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "all") as channel:
        stub = channel.unary_unary("/downcore.v1.GenerationService/Abort")
        request = generation_pb2.AbortRequest(request_id="x").SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            stub(request, metadata=[("x-large", "x" * (20 << 10))], timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert stub(request, timeout=5) == b""


def test_a_caller_reaches_its_own_namespace_and_parts_of_it_and_no_other(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "below") as below:
        for asked in ("", "team/below", "team/below/x"):
            warm(below, namespace=asked)
            assert {prefix.namespace for prefix in listed(below, asked)} == {asked or "team/below"}
            assert text_of(generate(below, "ab", namespace=asked)) == "a"
        prompt = cache_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=[5] * GRID))
        selector = cache_pb2.PrefixSelector(prompt=prompt)
        for namespace in ("team", "other", "team/belo", "team/below2", "default"):
            calls = (
                lambda name=namespace: list(generate(below, "ab", namespace=name)),
                lambda name=namespace: warm(below, namespace=name),
                lambda name=namespace: listed(below, name),
                lambda name=namespace: unary(
                    below, "CacheService/LookupPrefix", cache_pb2.LookupPrefixRequest(prompt=prompt, namespace=name)
                ),
                lambda name=namespace: unary(
                    below, "CacheService/PinPrefix", cache_pb2.PinPrefixRequest(prefix=selector, namespace=name)
                ),
                lambda name=namespace: unary(
                    below, "CacheService/UnpinPrefix", cache_pb2.UnpinPrefixRequest(prefix=selector, namespace=name)
                ),
                lambda name=namespace: unary(
                    below, "CacheService/EvictPrefix", cache_pb2.EvictPrefixRequest(prefix=selector, namespace=name)
                ),
            )
            for call in calls:
                assert code_of(call) is grpc.StatusCode.PERMISSION_DENIED, namespace


def test_prefixes_of_others_cannot_be_seen_or_touched_by_prompt_or_by_key(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "all") as mine, by_token(guarded, guarded.address, "warm") as theirs:
        receipt = warm(mine)[-1].receipt
        (key,) = (prefix.key for prefix in receipt.prefixes)
        assert key in {prefix.key for prefix in listed(mine)}
        assert listed(theirs) == []
        prompt = cache_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=[5] * GRID))
        lookup = unary(theirs, "CacheService/LookupPrefix", cache_pb2.LookupPrefixRequest(prompt=prompt))
        assert cache_pb2.LookupPrefixResponse.FromString(lookup).matched_tokens == 0
        for selector in (cache_pb2.PrefixSelector(key=key), cache_pb2.PrefixSelector(prompt=prompt)):
            for method, request in (
                ("PinPrefix", cache_pb2.PinPrefixRequest(prefix=selector)),
                ("UnpinPrefix", cache_pb2.UnpinPrefixRequest(prefix=selector)),
                ("EvictPrefix", cache_pb2.EvictPrefixRequest(prefix=selector)),
            ):
                call = lambda name=method, sent=request: unary(theirs, f"CacheService/{name}", sent)  # noqa: E731
                assert code_of(call) is grpc.StatusCode.NOT_FOUND
        assert key in {prefix.key for prefix in listed(mine)}


def test_an_operator_sees_the_prefixes_of_all(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "other") as operator, by_token(guarded, guarded.address, "below") as below:
        warm(below)
        assert {prefix.namespace for prefix in listed(operator, "team/below")} == {"team/below"}
        call = lambda: list(generate(operator, "ab", namespace="team/below"))  # noqa: E731
        assert code_of(call) is grpc.StatusCode.PERMISSION_DENIED, "but speaks as nobody else"


def test_request_ids_and_job_keys_are_each_callers_own(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "all") as mine, by_token(guarded, guarded.address, "generate") as theirs:
        running = generate(mine, "ab", request_id="same", max_tokens=100_000, timeout_s=30)
        next(running)
        assert text_of(generate(theirs, "cd", request_id="same")) == "c"
        abort = generation_pb2.AbortRequest(request_id="same")
        answer = unary(theirs, "GenerationService/Abort", abort)
        assert not generation_pb2.AbortResponse.FromString(answer).found
        next(running)
        assert generation_pb2.AbortResponse.FromString(unary(mine, "GenerationService/Abort", abort)).found
        assert [r.finished.reason for r in running if r.HasField("finished")] == [3]
        with by_token(guarded, guarded.address, "warm") as other:
            first = warm(mine, key="job")[-1].receipt
            second = warm(other, key="job")[-1].receipt
        assert not first.is_repeated
        assert not second.is_repeated
        assert warm(mine, key="job")[-1].receipt.is_repeated


def test_refusals_say_why_and_nothing_more(guarded: Guarded) -> None:
    with by_token(guarded, guarded.address, "late") as channel, pytest.raises(grpc.RpcError) as caught:
        listed(channel)
    assert caught.value.details() == "the token has expired"  # type: ignore[attr-defined]
    assert details_of(caught.value)["ErrorInfo"].reason == "UNAUTHENTICATED"
    log = "".join(guarded.front.log)
    for who in PEOPLE.values():
        assert who.token.partition(".")[2] not in log, "a secret in the log"


def test_a_local_socket_needs_no_token_but_knows_one(tmp_path: Path) -> None:
    principals = write_principals(tmp_path / "p.toml", PEOPLE.values())
    with running_front(tmp_path, flags=["--principals-file", str(principals), "--namespace", "mine/here"]) as front:
        warm(front.channel)
        assert {prefix.namespace for prefix in listed(front.channel)} == {"mine/here"}
        token = grpc.access_token_call_credentials(PEOPLE["warm"].token)
        local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
        target = f"unix:{front.socket}"
        with grpc.secure_channel(target, grpc.composite_channel_credentials(local, token)) as channel:
            assert listed(channel) == []
            assert code_of(lambda: list(generate(channel, "a"))) is grpc.StatusCode.PERMISSION_DENIED


def test_a_local_socket_may_need_a_token(tmp_path: Path) -> None:
    principals = write_principals(tmp_path / "p.toml", PEOPLE.values())
    flags = ["--principals-file", str(principals), "--local-needs-token", "true", "--tcp", "127.0.0.1:0"]
    with running_front(tmp_path, flags=flags) as front:
        began_s = time.monotonic()
        with grpc.insecure_channel(addresses_of(front)[1]) as tcp:
            for channel in (front.channel, tcp):
                assert code_of(lambda at=channel: listed(at)) is grpc.StatusCode.UNAUTHENTICATED
                metadata = (("authorization", f"Bearer {PEOPLE['warm'].token}"),)
                stub = channel.unary_unary("/downcore.v1.CacheService/ListPrefixes")
                stub(b"", metadata=metadata, timeout=5)
                two = (*metadata, ("authorization", f"Bearer {PEOPLE['all'].token}"))
                assert code_of(lambda call=stub, sent=two: call(b"", metadata=sent, timeout=5)) in REFUSED
                basic = (("authorization", "Basic eDp5"),)
                assert code_of(lambda call=stub, sent=basic: call(b"", metadata=sent, timeout=5)) in REFUSED
        assert front.health_status() == 1
        assert time.monotonic() - began_s < 10
