"""The families that select what they attend to, in every way of running; and equality of bytes where it is owed."""

import pytest
import torch

from daemon.layers import inputs
from tests.parity.checkpoints import BLOCK_SIZE, load, tokens
from tests.parity.driver import Driver
from tests.parity.matrix import (
    CHUNKS,
    SelectionGaps,
    check_bfloat16,
    check_chunks,
    check_decode,
    check_dropped_forwards,
    check_members_alone,
    check_poisoned_reuse,
    check_ragged,
    check_resumed_bytes,
    check_verified_states,
    check_verify_rows,
)
from tests.parity.sparse_checkpoints import MAKERS

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "glm5_next", "qwen4_exp")
LEAST_GAP = 1e-4  # of selections that are compared with another program's


@pytest.fixture
def clear_selections():
    """Fails a comparison that a near tie could have decided."""
    gaps = SelectionGaps()
    with gaps.watch():
        yield
    assert all(gap > LEAST_GAP for gap in gaps.gaps), "these weights nearly tie: take another seed"


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_any_chunks_gives_their_logits(sparse_pairs, name, sizes):
    check_chunks(sparse_pairs(name), sizes)


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_one_token_gives_their_logits(sparse_pairs, name):
    check_chunks(sparse_pairs(name), [1])


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in FAMILIES])
def test_variants_give_their_logits(sparse_pairs, name):
    check_chunks(sparse_pairs(name), [16, 16, 1, 1, 6])


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("name", FAMILIES)
def test_forty_decoded_tokens_give_their_logits(sparse_pairs, name):
    check_decode(sparse_pairs(name))


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_with_joins_and_leaves_gives_their_logits(sparse_pairs, name):
    check_ragged(sparse_pairs(name))


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("name", FAMILIES)
def test_several_rows_of_several_sequences_give_their_logits(sparse_pairs, name):
    check_verify_rows(sparse_pairs(name))


@pytest.mark.usefixtures("clear_selections")
@pytest.mark.parametrize("name", FAMILIES)
def test_verified_rows_leave_states_that_can_be_kept_or_dropped(sparse_pairs, name):
    check_verified_states(sparse_pairs(name))


def test_a_chunk_of_several_pieces_gives_their_logits(sparse_pairs):
    check_chunks(sparse_pairs("deepseek_v32 more kept than there is"), [300])


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_a_chunk_equal_the_chunk_in_one_piece(sparse_pairs, monkeypatch, name):
    pair, text = sparse_pairs(name), tokens(300)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE, num_blocks=160)
    in_pieces = driver.chunk(driver.add(), text)
    monkeypatch.setattr(inputs, "QUERY_TILE", 1 << 20)
    torch.testing.assert_close(driver.chunk(driver.add(), text), in_pieces, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefill_resumed_on_the_grid_gives_the_bytes_of_a_cold_one(sparse_pairs, name, dtype):
    assert check_resumed_bytes(load(sparse_pairs(name).folder, dtype)) == 10


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_equals_its_members_alone_in_any_order(sparse_pairs, name):
    check_members_alone(sparse_pairs(name).ours)


@pytest.mark.parametrize("name", FAMILIES)
def test_reused_poisoned_blocks_and_slots_change_no_byte(sparse_pairs, name):
    check_poisoned_reuse(sparse_pairs(name).ours)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_dropped_at_any_pause_harms_nobody(sparse_pairs, name):
    assert check_dropped_forwards(sparse_pairs(name)) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_strays_no_further_than_theirs(sparse_pairs, name):
    pair = sparse_pairs(name)
    check_bfloat16(pair, load(pair.folder, "bfloat16"))
