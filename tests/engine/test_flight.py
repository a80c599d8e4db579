"""Steps one ahead of the host: the same answers, nothing left of a row too much, and ahead only where it may be.

The engine's own tests and its storms run here once more, with steps that fly.
"""

from typing import Any

import pytest

from daemon.engine.decode_step import StepCounts
from daemon.messages import Abort, StopReason, StopSequence
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import EOS, Oracle
from tests.engine.test_engine import *  # noqa: F403 - its tests
from tests.engine.test_engine import prompt_of
from tests.engine.test_storms import *  # noqa: F403 - its tests

del test_a_row_whose_host_stage_fails_ends_its_own_request_alone  # noqa: F821 - such a model's steps never fly


@pytest.fixture(autouse=True)
def _flying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "flies", True)


def counts(harness: Harness) -> StepCounts:
    step = harness.engine.runner.step
    assert step is not None
    return step.counts


def step_until_decoding(harness: Harness, names: list[str]) -> None:
    while not all(len(harness.tokens[(name, 0)]) > 2 for name in names):
        harness.step()


def test_answers_that_end_at_different_tokens_are_exact_and_the_rows_too_much_are_dropped() -> None:
    harness, oracle = Harness(), Oracle(INVENTED, BLOCK)
    stopped = 0
    for seed in range(12):
        harness.submit(f"r{seed}", prompt_of(GRID + seed, seed), 30, seed=seed, temperature=1.0)
        harness.step(seed % 4)
    harness.run()
    for seed in range(12):
        answer = oracle.answer(prompt_of(GRID + seed, seed), 30, seed=seed, temperature=1.0)
        assert harness.tokens[(f"r{seed}", 0)] == answer
        stopped += answer[-1] == EOS
    assert stopped > 2
    found = counts(harness)
    assert found.ahead > 10
    assert found.dropped >= 1
    harness.assert_idle_books()


def test_a_lone_answer_is_ahead_at_all_steps_but_where_a_block_is_missing() -> None:
    harness = Harness(growth_window=8)
    harness.submit("r", prompt_of(GRID), 4 * BLOCK, ignore_eos=True)
    harness.run()
    found = counts(harness)
    steps = found.eager + found.replayed
    assert steps == 4 * BLOCK - 1, "the first token is the prompt's, and a length is no surprise"
    assert steps - found.ahead <= 1 + 4 * BLOCK // BLOCK
    assert found.dropped == 0


@pytest.mark.parametrize(
    "options", [{"logprobs": True}, {"presence_penalty": 0.5}, {"min_tokens": 12}, {"typical_p": 0.5}], ids=str
)
def test_no_step_is_ahead_while_the_host_must_see_a_rows_logits(options: dict[str, Any]) -> None:
    harness = Harness()
    harness.submit("device", prompt_of(GRID), 60, ignore_eos=True)
    harness.submit("host", prompt_of(GRID + 1), 10, temperature=1.0, ignore_eos="min_tokens" not in options, **options)
    while ("host", 0) not in harness.finished:
        before = counts(harness).ahead
        harness.step()
        both = harness.tokens[("host", 0)] and harness.tokens[("device", 0)] and ("host", 0) not in harness.finished
        assert not both or counts(harness).ahead == before
    harness.run()
    assert counts(harness).ahead > 0
    assert harness.tokens[("device", 0)] == Oracle(INVENTED, BLOCK).answer(prompt_of(GRID), 60, stop_at_eos=False)
    harness.assert_idle_books()


@pytest.mark.parametrize("ends", ["abort", "stop"])
def test_what_an_ended_answer_held_serves_another_at_once_although_a_step_of_it_is_under_way(ends: str) -> None:
    prompts = {name: prompt_of(2 * GRID + 3, salt) for salt, name in enumerate(("gone", "stays", "next"))}
    harness, oracle = Harness(num_blocks=26, num_slots=5), Oracle(INVENTED, BLOCK)
    for name in ("gone", "stays"):
        harness.submit(name, prompts[name], 30, ignore_eos=True)
    step_until_decoding(harness, ["gone", "stays"])
    assert harness.engine.flights.is_flying
    harness.submit("next", prompts["next"], 12, ignore_eos=True)
    harness.engine.handle(Abort("gone") if ends == "abort" else StopSequence("gone", 0, 2))
    harness.engine.check()
    harness.run()
    assert harness.finished[("gone", 0)].reason is (StopReason.ABORTED if ends == "abort" else StopReason.STOP_STRING)
    for name, length in (("stays", 30), ("next", 12)):
        assert harness.tokens[(name, 0)] == oracle.answer(prompts[name], length, stop_at_eos=False), name
    assert counts(harness).dropped >= 1
    harness.assert_idle_books()


def test_a_step_that_is_nobodys_any_more_is_work_until_it_has_landed() -> None:
    harness = Harness()
    harness.submit("r", prompt_of(GRID), 30, ignore_eos=True)
    step_until_decoding(harness, ["r"])
    harness.engine.handle(Abort("r"))
    assert harness.engine.is_idle
    assert harness.engine.has_work
    harness.step()
    assert not harness.engine.flights.is_flying
    assert not harness.engine.has_work
    harness.assert_idle_books()


def test_a_prompt_that_is_computed_meanwhile_joins_the_steps() -> None:
    harness, oracle = Harness(), Oracle(INVENTED, BLOCK)
    harness.submit("first", prompt_of(GRID), 60, ignore_eos=True)
    step_until_decoding(harness, ["first"])
    harness.submit("second", prompt_of(5 * GRID), 20, ignore_eos=True)
    before = counts(harness).ahead
    while not harness.tokens[("second", 0)]:
        harness.step()
    assert counts(harness).ahead > before, "decoding goes ahead while a prompt is computed"
    harness.run()
    assert harness.tokens[("first", 0)] == oracle.answer(prompt_of(GRID), 60, stop_at_eos=False)
    assert harness.tokens[("second", 0)] == oracle.answer(prompt_of(5 * GRID), 20, stop_at_eos=False)
