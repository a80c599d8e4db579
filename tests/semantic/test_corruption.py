"""The questions can be answered wrongly: a damaged block or a foreign state gives another answer, as the model's own
table of corruptions says. Without this, right answers would prove nothing."""

from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import Tokenizer

from daemon.config import EngineConfig
from ops.models.shipped import TINY_HYBRID
from tests.exact.probe import Probe
from tests.semantic.needles import Question, needle, status
from tiers.device import Match

BLOCK = 64
NUM_CASES = 10
NUM_TOKENS = 1500
MOST_RIGHT = 3  # of ten, where a corruption leaves nothing but chance; the table has 0 to 2

Damage = Callable[[Probe, Question, Match], None]


@pytest.fixture(scope="module")
def probe() -> Probe:
    """Blocks and grid of 64, so that a prompt resumes from just before its question."""
    return Probe(
        EngineConfig(
            str(TINY_HYBRID),
            dtype="bfloat16",
            threads=1,
            block_size=BLOCK,
            grid=BLOCK,
            pool_bytes=64 << 20,
            max_sequences=4,
        )
    )


def nothing(probe: Probe, question: Question, match: Match) -> None:
    """The control: the cache as it is."""


def zero_note(probe: Probe, question: Question, match: Match) -> None:
    """Zeroes the KV blocks that hold the note."""
    begin = question.prompt.index(f" is {question.expected}.") - 60
    first = len(encode(question.prompt[:begin])) // BLOCK
    last = len(encode(question.prompt[: begin + 90])) // BLOCK
    for node in match.nodes[first : last + 1]:
        probe.engine.pools.blocks[node.block_id] = 0


def zero_other_blocks(probe: Probe, question: Question, match: Match) -> None:
    """Zeroes as many blocks elsewhere."""
    end = len(encode(question.prompt[: question.prompt.index(f" is {question.expected}.") + 30])) // BLOCK
    for node in match.nodes[end + 2 : end + 5]:
        probe.engine.pools.blocks[node.block_id] = 0


def zero_state(probe: Probe, question: Question, match: Match) -> None:
    """Zeroes the recurrent states of the checkpoint, convolutions kept."""
    for name, tensor in recurrent_states(probe).items():
        assert tensor[match.checkpoint].any(), name
        tensor[match.checkpoint] = 0


def foreign_state(probe: Probe, question: Question, match: Match) -> None:
    """Puts another prompt's whole slot in the checkpoint's place."""
    other = status(9_000 if question is not _cases("status")[0] else 9_001, NUM_TOKENS, 0.9)
    assert other.expected != question.expected or True
    ids = encode(other.prompt)
    probe.run(ids)
    foreign = probe.engine.device.lookup(ids, "").checkpoint
    assert foreign is not None
    assert match.checkpoint is not None
    probe.engine.pools.copy_slot(foreign, match.checkpoint)
