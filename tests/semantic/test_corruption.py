"""The questions can be answered wrongly: a damaged block or a foreign state gives another answer, as the model's own
table of corruptions says. Without this, right answers would prove nothing."""

from collections.abc import Callable, Iterator

import pytest
from tokenizers import Encoding, Tokenizer

from daemon.config import EngineConfig
from ops.models.shipped import TINY_HYBRID
from tests.exact.probe import Probe
from tests.semantic.needles import ANSWER_TOKENS, Question, needle, status
from tiers.match import Match

BLOCK, GRID = 64, 128
END_TOKEN = 2
NUM_CASES = 6
NUM_TOKENS = 1500
MOST_RIGHT = 3  # of six where nothing but chance is left: there are ten states

TOKENIZER = Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))

Damage = Callable[[Probe, Question, Match], None]


@pytest.fixture(scope="module")
def probe() -> Probe:
    """A short grid, so that a prompt resumes from near its end."""
    return Probe(
        EngineConfig(
            str(TINY_HYBRID),
            dtype="bfloat16",
            threads=1,
            block_size=BLOCK,
            grid=GRID,
            pool_bytes=64 << 20,
            max_sequences=4,
        )
    )


def nothing(probe: Probe, question: Question, match: Match) -> None:
    """The cache as it is."""


def zero_note(probe: Probe, question: Question, match: Match) -> None:
    """Zeroes the two KV blocks that hold the note, in every layer."""
    for index in _note_blocks(question):
        _zero_block(probe, match, index)


def zero_other_blocks(probe: Probe, question: Question, match: Match) -> None:
    """Zeroes as many blocks, two further on."""
    for index in _note_blocks(question):
        _zero_block(probe, match, index + 2)


def zero_state(probe: Probe, question: Question, match: Match) -> None:
    """Zeroes the checkpoint's recurrent states; its convolutions stay."""
    states = [tensor for name, tensor in probe.engine.pools.slot_tensors.items() if name.endswith(".recurrent")]
    assert len(states) == 9
    for state in states:
        assert state[match.checkpoint].any()
        state[match.checkpoint] = 0


def foreign_state(probe: Probe, question: Question, match: Match) -> None:
    """Puts another prompt's checkpoint in the place of this one's."""
    ids = _encode(status(800, NUM_TOKENS, 0.9)).ids
    probe.run(ids)
    other = probe.engine.device.lookup(ids, "").checkpoint
    assert other is not None
    assert match.checkpoint is not None
    assert other != match.checkpoint
    probe.engine.pools.copy_slot(other, match.checkpoint)


HARM = {  # of each damage: whether it reaches the answer
    "needle": {nothing: False, zero_note: True, zero_other_blocks: False, zero_state: False},
    "status": {nothing: False, zero_state: True, foreign_state: True},
}


@pytest.mark.parametrize("kind", ["needle", "status"])
def test_an_answer_is_wrong_exactly_where_what_it_depends_on_is_damaged(probe: Probe, kind: str) -> None:
    num_right = dict.fromkeys(HARM[kind], 0)
    for question in _questions(kind):
        ids = _encode(question).ids
        probe.forget()
        cold = probe.run(ids, ANSWER_TOKENS)
        assert cold.cached_len == 0
        assert _text(cold.answer) == question.expected
        match = probe.engine.device.lookup(ids, "")
        assert match.resume_len == _resume_len(ids)
        pools = probe.engine.pools
        blocks, slots = pools.blocks.clone(), pools.slots.clone()
        for damage in HARM[kind]:
            damage(probe, question, match)
            again = probe.run(ids, ANSWER_TOKENS)
            assert again.cached_len == match.resume_len, "the damaged cache was not read"
            num_right[damage] += _text(again.answer) == question.expected
            held = [node.block_id for node in match.nodes]
            pools.blocks[held] = blocks[held]
            pools.slots[match.checkpoint] = slots[match.checkpoint]
    for damage, is_harmful in HARM[kind].items():
        right = num_right[damage]
        assert right <= MOST_RIGHT if is_harmful else right == NUM_CASES, f"{damage.__name__}: {right} right"


def _questions(kind: str) -> Iterator[Question]:
    """Those that are resumed between what their answer comes from and their question, a whole text before it."""
    found, seed = 0, 600
    while found < NUM_CASES:
        seed += 1
        question = needle(seed, NUM_TOKENS, 0.5) if kind == "needle" else status(seed, NUM_TOKENS, 0.9)
        encoding = _encode(question)
        answer = encoding.char_to_token(question.prompt.rindex(f" {question.expected}.") + 1)
        asked = encoding.char_to_token(question.prompt.rindex("<|im_end|>\n<|im_start|>user"))
        assert answer is not None
        assert asked is not None
        if answer + 8 < _resume_len(encoding.ids) <= asked:
            found += 1
            yield question


def _resume_len(ids: list[int]) -> int:
    return (len(ids) - 1) // GRID * GRID


def _note_blocks(question: Question) -> tuple[int, int]:
    """The block in which the note's value ends, and the one before."""
    end = question.prompt.index(f" is {question.expected}.") + len(f" is {question.expected}.")
    token = _encode(question).char_to_token(end - 1)
    assert token is not None
    return token // BLOCK - 1, token // BLOCK


def _zero_block(probe: Probe, match: Match, index: int) -> None:
    block_id = match.nodes[index].block_id
    assert block_id is not None
    assert probe.engine.pools.blocks[block_id].any()
    probe.engine.pools.blocks[block_id] = 0


def _encode(question: Question) -> Encoding:
    return TOKENIZER.encode(question.prompt, add_special_tokens=False)


def _text(answer: tuple[int, ...]) -> str:
    """Up to the end token, which the probe does not stop at."""
    ids = list(answer)
    return TOKENIZER.decode(ids[: ids.index(END_TOKEN)] if END_TOKEN in ids else ids, skip_special_tokens=False)
