"""Generate over a real socket: the order of a stream, text and ids, ends of every kind, cancelling and deadlines."""

from typing import Any

import grpc
import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from tests.front.harness import END, Front, details_of, eventually, ids_of, ids_sent, text_of

LONG = pb.StoppingParams(max_tokens=50_000)


def kinds(responses: list[pb.GenerateResponse]) -> list[str]:
    return [response.WhichOneof("event") or "" for response in responses]


def finished(responses: list[pb.GenerateResponse], index: int = 0) -> pb.GenerateFinished:
    (found,) = [r.finished for r in responses if r.HasField("finished") and r.finished.index == index]
    return found


def occupy(front: Front) -> list[Any]:
    """Streams that keep all four places of the engine taken."""
    calls = [front.stream(stopping=LONG) for _ in range(4)]
    eventually(lambda: len(front.sequences()) == 4)
    return calls


def test_a_stream_is_started_chunks_finished_summary(front: Front) -> None:
    responses = front.generate("hello", stopping=pb.StoppingParams(max_tokens=6), n=2)
    order = kinds(responses)
    assert order[0] == "started"
    assert order[-1] == "summary"
    assert order.count("started") == order.count("summary") == 1
    assert order.count("finished") == 2
    for index in range(2):
        own = [r for r in responses if r.HasField("chunk") and r.chunk.index == index]
        ends = [i for i, r in enumerate(responses) if r.HasField("finished") and r.finished.index == index]
        assert len(ends) == 1
        assert responses.index(own[-1]) < ends[0]
    usage = responses[-1].summary.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 12)
    assert responses[0].started.prompt_tokens == 2
    assert responses[0].started.model == "scripted"


def test_timings_are_ordered_and_counted_from_arrival(front: Front) -> None:
    timings = front.generate(stopping=pb.StoppingParams(max_tokens=5))[-1].summary.timings
    assert 0 < timings.queue_s <= timings.first_token_s < timings.total_s


def test_text_equals_the_tokens_text_and_utf8_is_never_cut(front: Front) -> None:
    text = "naïve 😀 €"
    ids = ids_of(text)
    responses = front.generate(token_ids=pb.TokenIds(ids=ids), stopping=pb.StoppingParams(max_tokens=len(ids)))
    assert ids_sent(responses) == ids
    assert text_of(responses) == text
    assert not any("\ufffd" in r.chunk.text for r in responses)


def test_an_answer_of_one_token_has_its_whole_stream(front: Front) -> None:
    responses = front.generate("h", stopping=pb.StoppingParams(max_tokens=1))
    assert (text_of(responses), finished(responses).reason) == ("h", pb.FINISH_REASON_LENGTH)


def test_the_end_token_ends_an_answer_and_has_no_text(front: Front) -> None:
    responses = front.generate("abc<|end|>")
    assert text_of(responses) == "abc"
    assert finished(responses).reason == pb.FINISH_REASON_STOP
    assert finished(responses).stop_token_id == END
    assert finished(responses).completion_tokens == 4


def test_ignore_eos_goes_past_the_end_token(front: Front) -> None:
    responses = front.generate("ab<|end|>", stopping=pb.StoppingParams(max_tokens=6, ignore_eos=True))
    assert text_of(responses) == "abab"
    assert finished(responses).reason == pb.FINISH_REASON_LENGTH


def test_a_stop_token_is_counted_and_not_part_of_the_text(front: Front) -> None:
    stop_id = ids_of("c")[0]
    responses = front.generate("abcd", stopping=pb.StoppingParams(stop_token_ids=[stop_id]))
    assert text_of(responses) == "ab"
    assert (finished(responses).stop_token_id, finished(responses).completion_tokens) == (stop_id, 3)


def test_a_stop_string_across_tokens_ends_the_text_before_it_and_usage_at_its_last_token(front: Front) -> None:
    responses = front.generate("one. two. END three", stopping=pb.StoppingParams(stop=["never", " END"]))
    assert text_of(responses) == "one. two."
    assert finished(responses).reason == pb.FINISH_REASON_STOP
    assert finished(responses).stop_string == " END"
    assert finished(responses).completion_tokens == len("one. two. END")
    assert responses[-1].summary.usage.completion_tokens == len("one. two. END")
    assert len(ids_sent(responses)) == len("one. two. END")
    eventually(lambda: not front.sequences())


def test_no_stop_string_ends_an_answer_before_min_tokens(front: Front) -> None:
    responses = front.generate("ab", stopping=pb.StoppingParams(stop=["ab"], min_tokens=5))
    assert text_of(responses) == "abab"
    assert finished(responses).completion_tokens == 6


def test_text_held_for_a_stop_string_is_shown_when_the_answer_ends_otherwise(front: Front) -> None:
    responses = front.generate("abx", stopping=pb.StoppingParams(stop=["abz"], max_tokens=2))
    assert text_of(responses) == "ab"


def test_choices_end_each_by_itself(front: Front) -> None:
    responses = front.generate("abcX", n=3, stopping=pb.StoppingParams(stop=["X"]))
    assert [text_of(responses, i) for i in range(3)] == ["abc", "bc", "c"]
    assert [finished(responses, i).completion_tokens for i in range(3)] == [4, 3, 2]


def test_logprobs_are_as_many_as_tokens_and_carry_their_bytes(front: Front) -> None:
    sampling = pb.SamplingParams(logprobs=True, top_logprobs=2)
    responses = front.generate("é", sampling=sampling, stopping=pb.StoppingParams(max_tokens=2))
    chunks = [r.chunk for r in responses if r.HasField("chunk")]
    found = [position for chunk in chunks for position in chunk.logprobs]
    assert [position.chosen.token for position in found] == ["é".encode()[:1], "é".encode()[1:]]
    assert all(len(position.top) == 2 for position in found)
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


def test_a_given_seed_is_told_and_an_absent_one_is_drawn(front: Front) -> None:
    one_token = pb.StoppingParams(max_tokens=1)
    given = front.generate(sampling=pb.SamplingParams(seed=7), stopping=one_token)
    assert given[0].started.seed == 7
    drawn = {front.generate(stopping=one_token)[0].started.seed for _ in range(3)}
    assert len(drawn) == 3
    assert all(seed < 2**63 for seed in drawn)


def test_a_chat_goes_through_the_folders_template(front: Front) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="bot", content="yo")])
    tokens = front.generation.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10)
    assert b"".join(tokens.tokens) == b"<user>hi<bot>yo"
    responses = front.generate(chat=chat, stopping=pb.StoppingParams(max_tokens=len(tokens.token_ids)))
    assert text_of(responses) == "<user>hi<bot>yo"


def test_tokenize_gives_the_ids_that_generate_uses(front: Front) -> None:
    tokens = front.generation.Tokenize(pb.TokenizeRequest(text="hello é"), timeout=10)
    responses = front.generate("hello é", stopping=pb.StoppingParams(max_tokens=len(tokens.token_ids)))
    assert ids_sent(responses) == list(tokens.token_ids)
    assert len(tokens.token_ids) < len("hello é".encode()), "the merges of the vocabulary were used"


def test_an_id_in_use_is_refused_and_free_again_afterwards(front: Front) -> None:
    call = front.stream(request_id="same", stopping=LONG)
    next(call)
    with pytest.raises(grpc.RpcError) as caught:
        front.generate(request_id="same")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]
    assert details_of(caught.value)["ErrorInfo"].reason == "DUPLICATE_REQUEST_ID"
    call.cancel()
    eventually(lambda: not front.sequences())
    assert text_of(front.generate("ok", request_id="same", stopping=pb.StoppingParams(max_tokens=2))) == "ok"


def test_cancelling_frees_the_engine(front: Front) -> None:
    call = front.stream(n=3, stopping=LONG)
    next(call)
    assert len(front.sequences()) == 3
    call.cancel()
    eventually(lambda: not front.sequences())


def test_a_deadline_ends_a_running_stream_and_frees_the_engine(front: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(front.stream(stopping=LONG, timeout=0.2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    eventually(lambda: not front.sequences())


def test_a_deadline_in_the_queue_ends_the_request_before_it_runs(front: Front) -> None:
    running = occupy(front)
    with pytest.raises(grpc.RpcError) as caught:
        list(front.stream(request_id="late", timeout=0.2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    eventually(lambda: "late" not in {s.request_id for s in front.sequences()})
    for call in running:
        call.cancel()
    eventually(lambda: not front.sequences())


def test_abort_ends_a_running_stream_with_its_own_reason_and_a_summary(front: Front) -> None:
    call = front.stream(request_id="doomed", stopping=LONG, n=2)
    got = [next(call)]
    assert front.generation.Abort(pb.AbortRequest(request_id="doomed"), timeout=10).found
    got += list(call)
    assert {finished(got, i).reason for i in range(2)} == {pb.FINISH_REASON_ABORTED}
    assert kinds(got)[-1] == "summary"
    eventually(lambda: not front.sequences())
    assert not front.generation.Abort(pb.AbortRequest(request_id="doomed"), timeout=10).found


def test_abort_before_the_start_ends_a_queued_request(front: Front) -> None:
    running = occupy(front)
    queued = front.stream(request_id="queued")
    eventually(lambda: "queued" in {s.request_id for s in front.sequences()})
    (row,) = [s for s in front.sequences() if s.request_id == "queued"]
    assert row.state == admin_pb2.SEQUENCE_STATE_QUEUED
    assert front.generation.Abort(pb.AbortRequest(request_id="queued"), timeout=10).found
    got = list(queued)
    assert kinds(got) == ["finished", "summary"]
    assert finished(got).reason == pb.FINISH_REASON_ABORTED
    for call in running:
        call.cancel()
    eventually(lambda: not front.sequences())


def test_an_answer_that_cannot_fit_is_refused_and_names_max_tokens(front: Front) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        front.generate("hello", stopping=pb.StoppingParams(max_tokens=99_999))
    assert details_of(caught.value)["ErrorInfo"].reason == "CONTEXT_TOO_LONG"
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == "stopping.max_tokens"
