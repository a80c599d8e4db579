"""tiny-hybrid through gRPC: every question is answered cold, from the cache, and in a batch with others."""

import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from ops.models.shipped import TINY_HYBRID
from tests.campaigns.budget import first_seed
from tests.e2e.daemon import Daemon, running
from tests.semantic.crowd import ask_all_at_once, decoding_beside
from tests.semantic.needles import GRID, Case, Message, Question, ask, floor_of, needle, ready_cases, status

FLAGS = (
    "--dtype",
    "bfloat16",
    "--threads",
    "2",
    "--pool-bytes",
    str(256 << 20),
    "--max-sequences",
    "12",
    "--slice-ms",
    "50",
    "--grid",
    str(GRID),
)
MOST_TOKENS = 8192  # longer ones belong to the campaign

READY = [case for case in ready_cases() if case.num_tokens <= MOST_TOKENS]
ALONE = [case for case in READY if not case.turns]
CONVERSATIONS = [case for case in READY if case.turns]


@pytest.fixture(scope="module")
def daemon() -> Generator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp"))
    try:
        with running(folder, TINY_HYBRID, *FLAGS) as daemon:
            yield daemon
            daemon.wait_idle()
            assert daemon.ledger().balanced
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_ready_cases_are_those_that_the_folder_tells_of() -> None:
    assert len(ready_cases()) == 40
    assert len(READY) == 31
    assert {case.question.kind for case in READY} == {"needle", "status", "multi"}


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.question.name)
def test_a_ready_case_is_answered_cold_and_again_from_the_cache(daemon: Daemon, case: Case) -> None:
    cold = ask(daemon, case.question.messages)
    assert cold.prompt_tokens == case.num_tokens
    assert cold.cached_tokens == 0
    assert cold.text == case.question.expected
    again = ask(daemon, case.question.messages)
    assert again.cached_tokens == floor_of(case.num_tokens)
    assert again.cached_tokens > 0 or case.num_tokens <= GRID
    assert again.text == case.question.expected


@pytest.mark.parametrize("case", CONVERSATIONS, ids=lambda case: case.question.name)
def test_every_turn_of_a_conversation_is_answered_from_the_cache_of_the_one_before(daemon: Daemon, case: Case) -> None:
    messages: tuple[Message, ...] = case.question.messages
    earlier_tokens = 0
    for number, (question, expected) in enumerate(case.turns):
        if number:
            messages = (*messages, {"role": "user", "content": question})
        answer = ask(daemon, messages)
        assert answer.text == expected, f"turn {number}"
        if number:
            # What the turn before published: its whole grid chunks, as far as they end inside this prompt.
            assert answer.cached_tokens == earlier_tokens // GRID * GRID, f"turn {number}"
            assert answer.cached_tokens > 0
        earlier_tokens = answer.prompt_tokens
        messages = (*messages, {"role": "assistant", "content": answer.text})


def test_needle_and_status_questions_are_answered_in_a_batch_cold_and_from_the_cache(daemon: Daemon) -> None:
    seed = first_seed()
    questions: list[Question] = [needle(seed, 2048, 0.05), needle(seed + 1, 2048, 0.95), needle(seed + 2, 8192, 0.5)]
    questions += [status(seed, 2048, 0.4), status(seed + 1, 2048, 1.0)]
    names = [question.name for question in questions]
    with decoding_beside(daemon):
        cold = ask_all_at_once(daemon, questions)
        again = ask_all_at_once(daemon, questions)
    assert [answer.cached_tokens for answer in cold] == [0] * len(questions)
    assert [answer.cached_tokens for answer in again] == [floor_of(answer.prompt_tokens) for answer in cold]
    assert all(answer.cached_tokens > 0 for answer in again)
    expected = dict(zip(names, (question.expected for question in questions), strict=True))
    assert dict(zip(names, (answer.text for answer in cold), strict=True)) == expected
    assert dict(zip(names, (answer.text for answer in again), strict=True)) == expected
