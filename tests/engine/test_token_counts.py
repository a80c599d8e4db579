"""Penalties look at prompt and answer without reading them again for each token."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from daemon.engine.token_counts import PromptTokens, TokenCounts
from tests.engine.harness import GRID, Harness
from tests.engine.test_engine import prompt_of

CPU = torch.device("cpu")
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
)


@pytest.mark.parametrize("has_prompt", [True, False])
def test_counts_are_those_of_the_whole_text_however_it_grew(has_prompt: bool) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(40) for _ in range(50)] if has_prompt else []
    counts = TokenCounts(PromptTokens(prompt, CPU) if has_prompt else None, CPU)
    answer: list[int] = []
    for _ in range(40):
        more = [rng.randrange(80) for _ in range(rng.randrange(4))]
        answer += more
        counts.add(more)
        made = zip(counts.made.tolist(), counts.made_counts.tolist(), strict=True)
        assert dict(made) == Counter(answer)
        assert sorted(counts.seen.tolist()) == sorted({*prompt, *answer})


class Watched(list[int]):
    """Token ids that count how many of them are read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("penalties", PENALTIES)
def test_a_draw_with_penalties_reads_what_has_come_since_the_last_and_not_the_context(
    penalties: dict[str, Any],
) -> None:
    harness = Harness(num_blocks=200)
    harness.submit("r", prompt_of(20 * GRID), 60, temperature=1.0, ignore_eos=True, **penalties)
    while len(harness.tokens[("r", 0)]) < 3:
        harness.step()
    (sequence,) = harness.engine.scheduler.running
    sequence.token_ids = token_ids = Watched(sequence.token_ids)
    for _ in range(50):
        token_ids.num_read = 0
        harness.step()
        assert 0 < token_ids.num_read <= 2
    harness.run()
    harness.assert_idle_books()


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalties_are_the_same_after_a_replay_and_for_each_choice_as_alone(penalties: dict[str, Any]) -> None:
    harness = Harness(num_blocks=128)
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, **penalties}
    for index in range(3):
        harness.submit(f"alone{index}", prompt_of(11), 30, seed=index, **options)
    harness.run()
    harness.submit("r", prompt_of(11), 30, n=3, **options)
    harness.step(15)
    for sequence in list(harness.engine.scheduler.running):
        harness.engine.scheduler.preempt(sequence)
    harness.run()
    for index in range(3):
        assert harness.tokens[("r", index)] == harness.tokens[(f"alone{index}", 0)]
    harness.assert_idle_books()
