"""The hybrids (recurrent layers beside dense attention) against transformers, in every way of running, and in bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.parity import matrix
from tests.parity.checkpoints import BLOCK_SIZE, GRID, Pair, tokens
from tests.parity.driver import Driver
from tests.parity.hybrid_checkpoints import FAMILIES, MAKERS, make_pair
from tests.parity.matrix import CHUNKS, TOLERANCE

Pairs = Callable[[str], Pair]
every_model = pytest.mark.parametrize("name", MAKERS)
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with matrix.stable_topk():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Pairs by name, each made once."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = make_pair(MAKERS[name], tmp_path_factory.mktemp("model"))
        return made[name]

    return get


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
@every_model
def test_a_prompt_in_any_chunks_gives_their_logits(pairs: Pairs, name: str, sizes: list[int]) -> None:
    matrix.check_chunks(pairs(name), sizes)


@every_model
def test_forty_decoded_tokens_give_their_logits(pairs: Pairs, name: str) -> None:
    matrix.check_decode(pairs(name))


@every_family
def test_a_batch_with_joins_and_leaves_gives_their_logits(pairs: Pairs, name: str) -> None:
    matrix.check_ragged(pairs(name))


@every_family
def test_several_rows_of_several_sequences_give_their_logits(pairs: Pairs, name: str) -> None:
    assert pairs(name).ours.caps.verify_rows
    matrix.check_verify_rows(pairs(name))


@every_family
def test_verified_rows_leave_states_that_can_be_kept_or_dropped(pairs: Pairs, name: str) -> None:
    matrix.check_verified_states(pairs(name))


@pytest.mark.parametrize("sizes", [[37], [20, 17], [1, 1, 2, 33]], ids=str)
@every_family
def test_the_state_after_a_prompt_is_theirs(pairs: Pairs, name: str, sizes: list[int]) -> None:
    pair, prompt = pairs(name), tokens(37)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence = driver.add()
    driver.chunks(sequence, prompt, sizes)
    held = driver.state(sequence)
    with torch.inference_mode():
        cache = pair.theirs(input_ids=torch.tensor([prompt]), use_cache=True).cache
    kinds: set[str] = set()
    for part, mine in held.items():
        _, layer, kind = part.split(".")
        theirs = cache.layers[int(layer)]
        match kind:
            case "k":
                expected = theirs.keys[0].transpose(0, 1)
            case "v":
                expected = theirs.values[0].transpose(0, 1)
            case "latent":
                expected = torch.cat((theirs.keys[0, 0], theirs.values[0, 0]), dim=-1)
            case "conv":  # theirs keeps one row more than the next token reads
                expected = theirs.conv_states[0][0, :, -mine.shape[0] :].t()
            case _:
                expected = theirs.recurrent_states[0][0]
                if name == "nemotron_h":
                    expected = expected.transpose(1, 2)
        assert mine.shape == expected.shape, part
        assert (mine - expected).abs().max() <= TOLERANCE, part
        assert expected.abs().max() > 0.1, part
        kinds.add(kind)
    assert kinds == {"conv", "recurrent"} | ({"latent"} if name == "kimi_linear" else {"k", "v"})


@every_family
def test_prefill_resumed_at_any_grid_position_gives_the_bytes_of_a_cold_one(pairs: Pairs, name: str) -> None:
    assert matrix.check_resumed_bytes(pairs(name).ours) == 10


@every_family
def test_a_batch_equals_its_members_alone(pairs: Pairs, name: str) -> None:
    assert pairs(name).ours.caps.batched_decode
    matrix.check_members_alone(pairs(name).ours)


@every_family
def test_a_slot_used_by_a_longer_sequence_and_poisoned_gives_the_bytes_of_a_fresh_one(pairs: Pairs, name: str) -> None:
    matrix.check_poisoned_reuse(pairs(name).ours)


@every_family
def test_a_forward_dropped_at_any_pause_harms_nobody(pairs: Pairs, name: str) -> None:
    assert matrix.check_dropped_forwards(pairs(name)) > 8, "pauses in four layers at least"


@every_family
def test_a_prompt_of_one_token_gives_their_logits(pairs: Pairs, name: str) -> None:
    matrix.check_chunks(pairs(name), [1])


def test_a_time_step_below_its_clamp_is_clamped_in_decode_as_in_prefill(tmp_path: Path) -> None:
    """transformers clamps in prefill alone; here a sequence in single rows equals the whole prompt."""
    pair = make_pair(MAKERS["nemotron_h, a long clamp"], tmp_path)
    text = tokens(40, seed=3)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence = driver.add()
    logits = [driver.prefill(sequence, text[:GRID], GRID)]
    logits += [driver.step([(sequence, [token])]) for token in text[GRID:]]
    matrix.assert_close(torch.cat(logits), pair.expected(text))
    theirs = _cached(pair, text)
    assert (theirs - pair.expected(text)).abs().max() > 100 * TOLERANCE, "the clamp does not bite"


def _cached(pair: Pair, text: list[int]) -> torch.Tensor:
    """transformers' own logits, decoding after the first grid chunk."""
    cache, parts = None, []
    with torch.inference_mode():
        for begin, end in [(0, GRID), *((i, i + 1) for i in range(GRID, len(text)))]:
            out = pair.theirs(input_ids=torch.tensor([text[begin:end]]), cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits[0].float())
    return torch.cat(parts)
