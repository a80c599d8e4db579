"""The gateway's service over a socket, with an engine that repeats the prompt."""

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Generator
from pathlib import Path

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from daemon.front.access import ACCESS, VLLM_ENGINE
from daemon.front.vllm.folder import NoTokenizer, archive_of, facts_of
from tests.front.harness import END, Front, details_of, eventually, ids_of, running_front, write_model_folder
from tests.front.secured import Who, write_principals
from tests.gateway.client import Client

GATEWAY = ("--gateway", "true")
STREAMS = ("Generate", "GetTokenizer", "SubscribeKvEvents")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_front(folder, ("--max-running", "4", "--context", "100000"), GATEWAY) as front:
        yield front


@pytest.fixture(scope="module")
def client(front: Front) -> Client:
    return Client(front.channel)


def refused(client: Client, ids: list[int], **sampling: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(ids, **sampling)
    return caught.value


def test_a_stream_carries_each_choices_tokens_once(client: Client) -> None:
    responses = client.generate(ids_of("abc"), n=2, max_tokens=5)
    for index, text in ((0, "abcab"), (1, "bcabc")):
        chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == index]
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == ids_of(text)
        assert {chunk.prompt_tokens for chunk in chunks} == {3}
        assert sum(chunk.completion_tokens for chunk in chunks) == 5
    ends = {r.complete.index: r.complete for r in responses if r.HasField("complete")}
    assert {index: (end.finish_reason, end.completion_tokens) for index, end in ends.items()} == {
        0: ("length", 5), 1: ("length", 5),
    }  # fmt: skip


def test_an_answer_that_is_kept_for_its_end_counts_among_what_open_requests_hold(tmp_path: Path) -> None:
    flags = (*GATEWAY, "--max-held-bytes", "100000")
    with running_front(tmp_path, ("--token-s", "0.0001"), flags) as front:
        other = front.stream(stopping=pb.StoppingParams(max_tokens=1 << 19))
        next(other)
        client = Client(front.channel)
        assert client.generate(ids_of("abc"), max_tokens=100, stream=False, logprobs=20)
        error = refused(client, ids_of("abc"), max_tokens=2_000, stream=False, logprobs=20)
        assert details_of(error)["ErrorInfo"].reason == "QUEUE_FULL"
        assert client.generate(ids_of("abc"), max_tokens=2_000, logprobs=20), "what is sent at once is not kept"
        other.cancel()
        eventually(lambda: not front.sequences())


def test_without_a_stream_each_choice_is_one_message(client: Client) -> None:
    responses = client.generate(ids_of("abc"), n=2, max_tokens=5, stream=False, logprobs=2)
    assert [response.WhichOneof("response") for response in responses] == ["complete", "complete"]
    for response in responses:
        complete = response.complete
        assert list(complete.output_ids) == ids_of("abcab" if complete.index == 0 else "bcabc")
        assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
        assert len(complete.output_logprobs.top_logprobs) == 5
        assert all(len(top.values) == 2 for top in complete.output_logprobs.top_logprobs)


def test_stops_are_told_by_what_matched(client: Client) -> None:
    def end(ids: list[int], **sampling: object) -> vllm.GenerateComplete:
        return client.generate(ids, stream=False, **sampling)[-1].complete

    by_string = end(ids_of("one two"), stop=["e t"])
    assert (by_string.finish_reason, by_string.matched_stop_str) == ("stop", "e t")
    assert list(by_string.output_ids) == ids_of("one t"), "the ids run to the end of what matched"
    by_id = end(ids_of("one two"), stop_token_ids=ids_of("w"))
    assert (by_id.finish_reason, by_id.matched_token_id) == ("stop", ids_of("w")[0])
    by_model = end([*ids_of("one"), END])
    assert (by_model.finish_reason, by_model.WhichOneof("matched_stop")) == ("stop", None)
    ignoring = end([*ids_of("one"), END], ignore_eos=True, max_tokens=6)
    assert (ignoring.finish_reason, len(ignoring.output_ids)) == ("length", 6)


def test_text_is_tokenized_here(client: Client) -> None:
    request = vllm.GenerateRequest(text="axb", sampling_params=vllm.SamplingParams(max_tokens=3))
    (only,) = client.stub.Generate(request, timeout=20)
    assert list(only.complete.output_ids) == ids_of("axb")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"), ({"min_p": 2.0}, "min_p"), ({"repetition_penalty": 11.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"), ({"n": 9}, "n"), ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop"), ({"stop_token_ids": [1 << 31]}, "stop_token_ids"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"structural_tag": "{}"}, "structural_tag"), ({"regex": ""}, "regex"), ({"json_schema": ""}, "json_schema"),
        ({"choice": vllm.ChoiceConstraint()}, "choice.choices"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_the_gateways_name_for_it(
    client: Client, sampling: dict[str, object], field: str
) -> None:
    error = refused(client, ids_of("a"), **sampling)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["BadRequest"].field_violations[0].field == f"sampling_params.{field}"


def test_prompts_are_checked_too(client: Client) -> None:
    for ids, field in (([], "tokenized.input_ids"), ([1 << 20], "tokenized.input_ids")):
        error = refused(client, ids)
        assert details_of(error)["BadRequest"].field_violations[0].field == field
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(vllm.GenerateRequest(), timeout=20))
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == "input"


def test_abort_ends_the_named_streams_alone(client: Client, front: Front) -> None:
    calls = {name: client.stream(ids_of("ab"), request_id=name, max_tokens=50_000) for name in ("one", "two")}
    for call in calls.values():
        assert next(call).HasField("chunk")
    client.call("Abort", request_ids=["one", "nobody"])
    assert list(calls["one"])[-1].complete.finish_reason == "abort"
    assert {row.id for row in front.sequences()} == {"two/0"}
    calls["two"].cancel()
    eventually(lambda: not front.sequences())
    with pytest.raises(grpc.RpcError) as caught:
        client.call("Abort", request_ids=["not an id"])
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == "request_ids"


def test_a_client_that_leaves_frees_what_it_had(client: Client, front: Front) -> None:
    for stream in (True, False):
        call = client.stream(ids_of("ab"), stream=stream, max_tokens=50_000)
        eventually(lambda: bool(front.sequences()))
        call.cancel()
        eventually(lambda: not front.sequences())


def test_what_the_service_says_of_itself(client: Client, front: Front) -> None:
    assert client.call("HealthCheck").healthy
    model = client.call("GetModelInfo")
    assert (model.served_model_name, model.model_path) == ("scripted", "scripted")
    assert model.tokenizer_path.startswith("/nowhere/"), "a name could be somebody else's"
    assert (model.is_generation, model.supports_vision, list(model.eos_token_ids)) == (True, False, [END])
    assert (model.max_context_length, model.max_req_input_len) == (100_000, 99_999)
    before = client.call("GetServerInfo")
    assert (before.server_type, before.data_parallel_size, before.block_size) == ("downcore", 1, 64)
    assert (before.active_requests, before.is_paused, before.kv_connector) == (0, False, "")
    call = client.stream(ids_of("ab"), max_tokens=50_000)
    next(call)
    after = client.call("GetServerInfo")
    assert after.active_requests == 1
    assert after.last_receive_timestamp >= before.last_receive_timestamp > 0
    call.cancel()
    eventually(lambda: not front.sequences())


def test_loads_count_what_runs_and_what_waits(client: Client, front: Front) -> None:
    calls = [client.stream(ids_of("abc"), max_tokens=50_000, n=2) for _ in range(6)]
    eventually(lambda: len(front.sequences()) == 12)
    (load,) = client.call("GetLoads").loads
    for call in calls:
        call.cancel()
    eventually(lambda: not front.sequences())
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (4, 2, 6)
    assert load.num_waiting_uncached_tokens == 6
    # The scripted engine has 16 blocks of 64 tokens: one is padding, 4 are free and 4 are cached.
    assert (load.num_used_tokens, load.max_total_num_tokens) == (7 * 64, 15 * 64)
    assert load.token_usage == pytest.approx(7 / 15)
    assert load.max_running_requests == 64


def test_the_tokenizer_arrives_whole_and_is_the_same_each_time(client: Client, front: Front) -> None:
    first, second = (list(client.call("GetTokenizer")) for _ in range(2))
    assert [chunk.sha256 for chunk in first[:-1]] == [""] * (len(first) - 1)
    data = b"".join(chunk.data for chunk in first)
    assert first[-1].sha256 == second[-1].sha256 == archive_of(front.socket.parents[1] / "model").sha256
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "chat_template.jinja"}
        sent = archive.read("tokenizer.json")
    assert sent == (front.socket.parents[1] / "model" / "tokenizer.json").read_bytes()


def test_a_folder_gives_what_it_has_and_nothing_that_is_not_a_tokenizers(tmp_path) -> None:
    with pytest.raises(NoTokenizer):
        archive_of(tmp_path)
    folder = write_model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "bos_token_id": 4}))
    with zipfile.ZipFile(io.BytesIO(archive_of(folder).data)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "chat_template.jinja", "config.json"}
    facts = facts_of(folder)
    assert (facts.architectures, facts.bos_token_id, facts.pad_token_id) == (("X",), 4, None)
    for content in ("[1]", "{", '{"architectures": 3, "bos_token_id": true}', "[" * 100_000):
        (folder / "config.json").write_text(content)
        assert facts_of(folder).architectures == ()
        assert facts_of(folder).bos_token_id is None


@pytest.mark.parametrize("name", ["Embed", "FlushCache", "StartProfile", "StopProfile"])
def test_what_has_no_counterpart_says_so(client: Client, name: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.call(name)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert details_of(caught.value)["ErrorInfo"].reason == "UNIMPLEMENTED"


def test_a_draining_daemon_is_not_healthy_and_takes_nothing(tmp_path) -> None:
    with running_front(tmp_path, (), GATEWAY) as front:
        client = Client(front.channel)
        call = client.stream(ids_of("ab"), max_tokens=300)
        next(call)
        front.admin.Drain(admin_pb2.DrainRequest(timeout_s=0), timeout=10)
        assert not client.call("HealthCheck").healthy
        assert client.call("GetServerInfo").is_paused
        assert refused(client, ids_of("a")).code() is grpc.StatusCode.UNAVAILABLE
        assert list(call)[-1].complete.completion_tokens == 300


def code_of_call(client: Client, name: str) -> str:
    try:
        answer = client.call(name)
        if name in STREAMS:
            next(answer)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def test_scopes_are_asked_for_and_ids_are_each_callers_own(tmp_path) -> None:
    gateway, other = Who("gateway", ["generate"], limits={"max_requests": 1}), Who("other", ["generate"])
    warmer = Who("warmer", ["warm"])
    principals = write_principals(tmp_path / "principals.toml", (gateway, warmer, other))
    flags = (*GATEWAY, "--principals-file", str(principals), "--local-needs-token", "true")
    with running_front(tmp_path, (), flags) as front:
        for name in ACCESS[VLLM_ENGINE]:
            assert code_of_call(Client(front.channel), name) == "UNAUTHENTICATED"
            assert code_of_call(Client(front.channel, warmer.token), name) == "PERMISSION_DENIED"
        client = Client(front.channel, gateway.token)
        call = client.stream(ids_of("ab"), request_id="mine", max_tokens=50_000)
        next(call)
        Client(front.channel, other.token).call("Abort", request_ids=["mine"])
        assert refused(client, ids_of("a")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.call("HealthCheck").healthy, "a caller at its limit is not a daemon that is ill"
        assert next(call).HasField("chunk"), "another caller ended it"
        client.call("Abort", request_ids=["mine"])
        assert list(call)[-1].complete.finish_reason == "abort"


ASK = "import sys, daemon.front.server; print(any(name.startswith('smg') for name in sys.modules))"
MISSING = """
import sys
sys.modules["smg_grpc_proto"] = None
from daemon.front import gateway
try:
    gateway.load()
except gateway.ListenError as error:
    print(error)
"""


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_the_extras_code_is_imported_only_where_it_is_asked_for() -> None:
    assert run(ASK).strip() == "False"
    assert "install downcore[gateway]" in run(MISSING)


def test_without_the_setting_the_service_is_not_there(tmp_path) -> None:
    with running_front(tmp_path) as front, pytest.raises(grpc.RpcError) as caught:
        Client(front.channel).call("HealthCheck")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
