"""n = 8 on a real family, around block and grid borders: each choice is its seed alone, and shared bytes stay."""

import random
from typing import Any

import pytest
import torch

from daemon.messages import Abort, StopReason
from daemon.models.base import BuildOptions, Model
from daemon.models.load import build_dummy
from tests.e2e.daemon import TINY
from tests.engine.harness import Harness

BLOCK, GRID = 64, 128
LENGTHS = (63, 64, 65, 127, 128, 129)


@pytest.fixture(scope="module")
def model() -> Model:
    return build_dummy(TINY, BuildOptions(torch.float32, torch.device("cpu"), tile=GRID))


def harness_of(model: Model) -> Harness:
    return Harness(model=model, num_blocks=64, block_size=BLOCK, grid=GRID, growth_window=64)


def prompt_of(length: int) -> list[int]:
    return [1 + (i * i + length) % 250 for i in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_each_choice_equals_its_seed_alone(model: Model, length: int) -> None:
    forked, alone = harness_of(model), harness_of(model)
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "logprobs": True}
    forked.submit("r", prompt_of(length), 70, n=8, seed=40, **options)
    forked.run()
    for index in range(8):
        alone.submit(f"a{index}", prompt_of(length), 70, seed=40 + index, **options)
        alone.run()
        assert forked.tokens[("r", index)] == alone.tokens[(f"a{index}", 0)]
        pairs = zip(forked.logprobs[("r", index)], alone.logprobs[(f"a{index}", 0)], strict=True)
        assert max(abs(one - other) for one, other in pairs) < 1e-4
    assert len({tuple(forked.tokens[("r", index)]) for index in range(8)}) == 8
    forked.assert_idle_books()


@pytest.mark.parametrize("length", LENGTHS)
def test_any_choice_can_be_cancelled_at_any_point(model: Model, length: int) -> None:
    whole = harness_of(model)
    whole.submit("r", prompt_of(length), 12, n=8, seed=7, temperature=1.0, ignore_eos=True)
    num_steps = whole.run()
    assert num_steps > 12
    rng = random.Random(length)
    for at in range(num_steps):
        harness = harness_of(model)
        harness.submit("r", prompt_of(length), 12, n=8, seed=7, temperature=1.0, ignore_eos=True)
        harness.step(at)
        gone = rng.randrange(8)
        if ("r", gone) in harness.finished:  # slices take their time: this run was quicker
            break
        harness.engine.handle(Abort("r", gone))
        harness.run()
        for index in range(8):
            ended = harness.finished[("r", index)].reason
            assert ended is (StopReason.ABORTED if index == gone else StopReason.LENGTH), (at, index)
            if index != gone:
                assert harness.tokens[("r", index)] == whole.tokens[("r", index)], (at, index)
        harness.assert_idle_books()
