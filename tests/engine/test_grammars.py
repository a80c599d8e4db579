"""Answers that follow a grammar, from weights that know none: whatever is drawn is allowed, and nobody else sees it."""

import json
import math
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from daemon.engine.grammar_builder import MAX_KEPT, GrammarBuilder
from daemon.errors import ErrorReason
from daemon.grammar import load_tokenizer
from daemon.messages import Abort, StopReason
from daemon.models.base import BuildOptions, Model
from daemon.models.load import build_dummy
from tests.campaigns.budget import seeds
from tests.e2e.daemon import TINY
from tests.engine.harness import Harness
from tests.engine.schemas import has_schema, random_schema
from tests.front.harness import MERGES, ids_of, write_model_folder

BLOCK, GRID = 64, 128
EOS = 0
PROMPT = [1 + (i * i) % 250 for i in range(70)]
TOKENS = [b"", *(bytes((byte,)) for byte in range(256)), *((left + right).encode() for left, right in MERGES)]
DRAWN: dict[str, Any] = {"temperature": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def model() -> Model:
    return build_dummy(TINY, BuildOptions(torch.float32, torch.device("cpu"), tile=GRID))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def harness(model: Model, folder: str) -> Harness:
    return harness_of(model, folder)


def harness_of(model: Model, folder: str, **options: Any) -> Harness:
    settings: dict[str, Any] = {"num_blocks": 128, "block_size": BLOCK, "grid": GRID, "growth_window": 64, **options}
    return Harness(model=model, model_path=folder, **settings)


def schema(value: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(value, {"whitespace_flexible": False})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def text_of(harness: Harness, name: str, index: int = 0) -> bytes:
    """The answer without its end token, which must be there."""
    tokens = harness.tokens[(name, index)]
    assert tokens[-1] == EOS
    ended = harness.finished[(name, index)]
    assert (ended.reason, ended.stop_token_id) == (StopReason.STOP_TOKEN, EOS)
    return b"".join(TOKENS[token] for token in tokens[:-1])


@pytest.mark.parametrize("seed", seeds(fraction=6, full=200))
def test_whatever_is_drawn_has_the_schema(harness: Harness, seed: int) -> None:
    rng = random.Random(seed)
    wanted = {f"r{i}": random_schema(rng) for i in range(4)}
    for name, value in wanted.items():
        harness.submit(name, PROMPT, 900, grammar=schema(value), seed=seed, temperature=rng.choice([0.5, 1.0, 3.0]))
    harness.run()
    for name, value in wanted.items():
        text = text_of(harness, name)
        assert has_schema(json.loads(text), value), (text, value)
    harness.assert_idle_books()


def test_each_of_eight_choices_is_its_seed_alone(model: Model, folder: str) -> None:
    forked, alone = harness_of(model, folder), harness_of(model, folder)
    grammar = regex("[a-f]{3,9}(-[0-9]{2}){1,4}")
    forked.submit("r", PROMPT, 60, n=8, seed=40, grammar=grammar, **DRAWN)
    forked.run()
    texts: set[bytes] = set()
    for index in range(8):
        alone.submit(f"a{index}", PROMPT, 60, seed=40 + index, grammar=grammar, **DRAWN)
        alone.run()
        assert forked.tokens[("r", index)] == alone.tokens[(f"a{index}", 0)]
        texts.add(text_of(forked, "r", index))
    assert len(texts) == 8
    assert all(re.fullmatch(rb"[a-f]{3,9}(-[0-9]{2}){1,4}", text) for text in texts)
    forked.assert_idle_books()


def test_rows_without_a_grammar_are_as_without_such_neighbours(model: Model, folder: str) -> None:
    mixed, alone = harness_of(model, folder), harness_of(model, folder)
    for harness in (mixed, alone):
        for i in range(3):
            harness.submit(f"free{i}", PROMPT, 40, seed=i, ignore_eos=True, repetition_penalty=1.2, **DRAWN)
            if harness is mixed:
                harness.submit(f"bound{i}", PROMPT, 40, seed=i, grammar=regex("(ab|cd)*"), ignore_eos=True, **DRAWN)
            else:  # the same rows in the batch, so that the same shapes are computed
                harness.submit(f"bound{i}", PROMPT, 40, seed=i, ignore_eos=True, **DRAWN)
        harness.run()
    for i in range(3):
        assert mixed.tokens[(f"free{i}", 0)] == alone.tokens[(f"free{i}", 0)]
        pairs = zip(mixed.logprobs[(f"free{i}", 0)], alone.logprobs[(f"free{i}", 0)], strict=True)
        assert max(abs(one - other) for one, other in pairs) < 1e-4
        assert mixed.tokens[(f"bound{i}", 0)] != alone.tokens[(f"bound{i}", 0)]
        assert len(mixed.tokens[(f"bound{i}", 0)]) == 40
        assert set(mixed.tokens[(f"bound{i}", 0)]) <= set(ids_of("abcd"))


def test_a_mask_leaves_other_rows_as_they_are_to_the_byte(harness: Harness) -> None:
    for name, grammar in (("free", None), ("bound", regex("[ab]{9}")), ("free2", None)):
        harness.submit(name, PROMPT, 40, grammar=grammar, ignore_eos=True)
    while len(harness.tokens) < 3:
        harness.step()
    running = sorted(harness.engine.scheduler.running, key=lambda sequence: sequence.rank)
    logits = torch.randn(3, TINY["vocab_size"])  # type: ignore[call-overload]
    masked = harness.engine.sampler.matchers.mask(logits, running).logits
    assert [torch.equal(masked[row], logits[row]) for row in range(3)] == [True, False, True]
    assert masked[1].isfinite().nonzero().flatten().tolist() == ids_of("ab")
    assert torch.equal(masked[1, ids_of("ab")], logits[1, ids_of("ab")])
    assert harness.engine.sampler.matchers.mask(logits, running[::2] + running[2:]).logits is logits


def test_logprobs_are_a_distribution_over_what_is_allowed(harness: Harness) -> None:
    harness.submit("r", PROMPT, 20, grammar=regex("x[ab]y"), top_logprobs=20, **DRAWN)
    tops: list[dict[int, float]] = []
    commit = harness.engine._commit_token

    def watch(sequence: Any, drawn: Any) -> None:
        tops.append({top.token_id: top.logprob for top in drawn.top})
        commit(sequence, drawn)

    harness.engine._commit_token = watch
    harness.run()
    assert [set(top) for top in tops] == [set(ids_of("x")), set(ids_of("ab")), set(ids_of("y")), {EOS}]
    assert [sum(map(math.exp, top.values())) for top in tops] == pytest.approx([1.0] * 4, abs=1e-5)
    assert harness.logprobs[("r", 0)][0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 100},
        {"top_p": 0.3},
        {"min_p": 0.9},
        {"typical_p": 0.1},
        {"top_k": 3, "top_p": 0.5, "typical_p": 0.5, "repetition_penalty": 5.0, "frequency_penalty": 2.0},
        {"logit_bias": dict.fromkeys(ids_of("zZ9"), 100.0)},
        {"logit_bias": dict.fromkeys(ids_of("abc"), -100.0)},
    ],
)
def test_no_parameter_draws_what_is_forbidden(harness: Harness, options: dict[str, Any]) -> None:
    for i in range(4):
        harness.submit(f"r{i}", PROMPT, 40, seed=i, grammar=regex("([abc]{2}[0-3]){4}"), **{**DRAWN, **options})
    harness.run()
    for i in range(4):
        assert re.fullmatch(rb"([abc]{2}[0-3]){4}", text_of(harness, f"r{i}"))


def test_the_grammars_end_comes_before_min_tokens_and_only_where_nothing_else_is_left(harness: Harness) -> None:
    harness.submit("fixed", PROMPT, 40, min_tokens=20, grammar=regex("ab"), **DRAWN)
    harness.submit("open", PROMPT, 40, min_tokens=20, grammar=regex("a{1,39}"), **DRAWN)
    harness.run()
    assert text_of(harness, "fixed") == b"ab"
    assert len(text_of(harness, "open")) >= 19


def test_an_ignored_end_token_comes_where_nothing_else_is_left(harness: Harness) -> None:
    harness.submit("r", PROMPT, 40, ignore_eos=True, grammar=regex("(ab?){1,7}"), seed=3, **DRAWN)
    harness.submit("endless", PROMPT, 30, ignore_eos=True, grammar=regex("(ab?)*"), seed=3, **DRAWN)
    harness.run()
    assert text_of(harness, "r").count(b"a") == 7
    assert harness.finished[("endless", 0)].reason is StopReason.LENGTH


def test_a_preempted_answer_goes_on_where_its_grammar_was(model: Model, folder: str) -> None:
    whole = harness_of(model, folder)
    grammar = regex("([a-c]{2}-[0-9]){6}")
    whole.submit("r", PROMPT, 60, seed=5, grammar=grammar, **DRAWN)
    whole.run()
    for num_chunks in (0, 16):  # replayed, and brought back from the host tier
        harness = harness_of(model, folder, num_chunks=num_chunks)
        harness.submit("r", PROMPT, 60, seed=5, grammar=grammar, **DRAWN)
        num_preempted = 0
        while not harness.engine.is_idle:
            harness.step()
            running = harness.engine.scheduler.running
            if running and num_preempted < 2 and running[0].num_generated == (3, 9)[num_preempted]:
                harness.engine.scheduler.preempt(running[0])
                assert not harness.engine.sampler.matchers._matchers
                num_preempted += 1
        harness.run()
        assert num_preempted == 2
        assert harness.tokens[("r", 0)] == whole.tokens[("r", 0)]
        harness.assert_idle_books()


def test_cancelling_at_any_point_gives_back_the_matcher(model: Model, folder: str) -> None:
    whole = harness_of(model, folder)
    grammar = regex("([a-c]{2}-[0-9]){2}")
    whole.submit("r", PROMPT, 60, n=4, seed=5, grammar=grammar, **DRAWN)
    whole.run()
    num_drawn = len(whole.tokens[("r", 0)])
    for at in range(num_drawn):
        harness = harness_of(model, folder)
        harness.submit("r", PROMPT, 60, n=4, seed=5, grammar=grammar, **DRAWN)
        while len(harness.tokens[("r", 0)]) < at:
            harness.step()
        assert len(harness.engine.sampler.matchers._matchers) == (4 if at else 0)
        harness.engine.handle(Abort("r", 1))
        harness.step()
        assert len(harness.engine.sampler.matchers._matchers) in ((0, 3) if at in (0, num_drawn - 1) else (3,))
        if at % 2:
            harness.engine.handle(Abort("r"))
        harness.run()
        if not at % 2:
            assert harness.tokens[("r", 3)] == whole.tokens[("r", 3)]
        harness.assert_idle_books()


def test_a_grammar_that_grows_too_large_ends_its_own_request_alone(model: Model, folder: str) -> None:
    harness, alone = harness_of(model, folder), harness_of(model, folder)
    for each in (harness, alone):
        each.submit("well", PROMPT, 40, seed=1, grammar=regex("[a-z]{39}"), **DRAWN)
    harness.submit("late", PROMPT, 40, grammar=regex("q{5}(a?){0}" + "a?b?" * 700), **DRAWN)
    harness.submit("wrong", PROMPT, 40, grammar="start: (", **DRAWN)
    harness.run()
    alone.run()
    assert {name: rejected.reason for name, rejected in harness.rejected.items()} == dict.fromkeys(
        ("late", "wrong"), ErrorReason.TOO_LARGE
    )
    assert len(harness.tokens[("late", 0)]) >= 5
    assert harness.tokens[("well", 0)] == alone.tokens[("well", 0)]
    harness.assert_idle_books()


def test_a_model_without_a_tokenizer_answers_everyone_else(model: Model) -> None:
    harness = harness_of(model, "nowhere")
    harness.submit("bound", PROMPT, 8, grammar=regex("a"))
    harness.submit("free", PROMPT, 8, ignore_eos=True)
    harness.run()
    assert "no tokenizer.json" in harness.rejected["bound"].message
    assert len(harness.tokens[("free", 0)]) == 8
    harness.assert_idle_books()


def test_a_build_that_fails_otherwise_than_grammars_do_ends_its_own_request_alone(model: Model, folder: str) -> None:
    harness = harness_of(model, folder)
    loads = iter((RuntimeError("out of memory"), None))

    def load() -> LLTokenizer:
        error = next(loads)
        if error is not None:
            raise error
        return load_tokenizer(Path(folder), (EOS,))

    harness.engine.grammars._load = load
    harness.submit("first", PROMPT, 8, grammar=regex("a{9}"))
    harness.submit("second", PROMPT, 8, grammar=regex("b{9}"))
    harness.run()
    assert harness.rejected["first"].reason is ErrorReason.TOO_LARGE
    assert len(harness.tokens[("second", 0)]) == 8
    harness.assert_idle_books()


def test_an_engine_that_only_waits_for_a_grammar_may_sleep_and_is_woken_when_it_is_built(
    harness: Harness, folder: str
) -> None:
    may_load = threading.Event()

    def load() -> LLTokenizer:
        assert may_load.wait(60)
        return load_tokenizer(Path(folder), (EOS,))

    harness.engine.grammars._load = load
    harness.submit("bound", PROMPT, 8, grammar=regex("a{9}"))
    harness.step(2)
    assert harness.engine.only_waits
    harness.submit("free", PROMPT[:5], 8, ignore_eos=True)
    harness.step()
    assert not harness.engine.only_waits
    while ("free", 0) not in harness.finished:
        harness.step()
    assert harness.engine.only_waits
    may_load.set()
    assert harness.mover.woken.wait(60)
    assert not harness.engine.only_waits
    harness.run()
    assert len(harness.tokens[("bound", 0)]) == 8
    harness.assert_idle_books()


def test_a_matcher_that_nobody_holds_is_named(harness: Harness) -> None:
    harness.submit("r", PROMPT, 20, grammar=regex("a{30}"))
    while not harness.tokens[("r", 0)]:
        harness.step()
    harness.engine.sampler.matchers._forget("r/0")
    assert harness.engine.astray() == ["matcher of r/0"]


def test_grammars_are_shared_within_a_namespace_and_kept_for_a_while(folder: str) -> None:
    builder = GrammarBuilder(lambda: load_tokenizer(Path(folder), (EOS,)), lambda: None)
    first = builder.build('start: "a"', "one")
    assert builder.build('start: "a"', "one") is first
    assert builder.build('start: "a"', "two") is not first
    for i in range(MAX_KEPT):
        builder.build(f'start: "{i}"', "two")
    assert builder.build('start: "a"', "one") is not first
    assert len(builder._kept) == MAX_KEPT
    builder.close()
    assert builder._thread is not None
    assert not builder._thread.is_alive()
