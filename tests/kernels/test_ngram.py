"""Hashed n-grams against the rule in Python's integers, whole and in parts, and the dilated convolution beside them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dilated_conv import dilated_conv
from kernels.ngram import NgramHash, first_history, next_history, ngram_rows, ngram_rows_reference

EOS = 2


def make_hash(order: int = 3) -> NgramHash:
    sizes = [1009, 1013, 1019, 1021, 1031, 1033][: 2 * (order - 1)]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    multipliers = [6148914691236517205, 3074457345618258603, 1537228672809129301, 768614336404564651][:order]
    return NgramHash(torch.tensor([m // 40 | 1 for m in multipliers]), torch.tensor(sizes), torch.tensor(offsets), EOS)


def in_parts(tokens: list[int], cuts: list[int], hash_: NgramHash) -> list[list[int]]:
    history, rows, position = first_history(1, hash_), [], 0
    for length in cuts:
        part = torch.tensor([tokens[position : position + length]])
        rows.extend(ngram_rows(history, part, hash_)[0].tolist())
        history = next_history(history, part)
        position += length
    assert position == len(tokens)
    return rows


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(2, 4), st.randoms(use_true_random=False))
def test_any_parting_gives_the_rows_of_the_whole(tokens: list[int], order: int, rng) -> None:
    hash_ = make_hash(order)
    cuts, left = [], len(tokens)
    while left:
        cuts.append(rng.randint(1, left))
        left -= cuts[-1]
    assert in_parts(tokens, cuts, hash_) == ngram_rows_reference(tokens, hash_)


def test_history_stops_at_the_end_of_sequence_token() -> None:
    hash_ = make_hash()
    after = ngram_rows_reference([7, 8, EOS, 9, 11], hash_)[3:]
    fresh = ngram_rows_reference([9, 11], hash_)
    assert after == fresh
    assert in_parts([7, 8, EOS, 9, 11], [2, 1, 2], hash_)[3:] == fresh


def test_the_end_of_sequence_token_itself_sees_its_past() -> None:
    hash_ = make_hash()
    assert ngram_rows_reference([7, EOS], hash_)[1] != ngram_rows_reference([8, EOS], hash_)[1]
    assert in_parts([7, EOS], [1, 1], hash_)[1] == ngram_rows_reference([7, EOS], hash_)[1]


def test_a_two_gram_head_does_not_see_the_third_token() -> None:
    hash_ = make_hash()
    one, other = ngram_rows_reference([4, 5, 6], hash_)[2], ngram_rows_reference([3, 5, 6], hash_)[2]
    assert one[:2] == other[:2]
    assert one[2:] != other[2:]


def test_rows_of_a_batch_equal_those_of_its_members() -> None:
    hash_ = make_hash()
    histories = torch.tensor([[EOS, EOS], [5, EOS], [EOS, 5], [3, 4]])
    tokens = torch.tensor([[9], [9], [9], [EOS]])
    together = ngram_rows(histories, tokens, hash_)
    for row in range(4):
        assert torch.equal(together[row : row + 1], ngram_rows(histories[row : row + 1], tokens[row : row + 1], hash_))
    assert torch.equal(together[0], together[1])  # what lies behind the end of sequence is not seen
    assert not torch.equal(together[0], together[2])


@pytest.mark.parametrize("cuts", [[17], [1] * 17, [1, 1, 2, 13], [8, 9]])
def test_dilated_convolution_in_parts_equals_the_whole(cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(17, 5, generator=generator), torch.randn(5, 4, generator=generator)
    padded = torch.nn.functional.pad(rows.double().T, (9, 0))
    want = torch.nn.functional.conv1d(padded[None], weight.double()[:, None], groups=5, dilation=3)[0].T
    past, made, position = torch.zeros(9, 5), [], 0
    for length in cuts:
        result = dilated_conv(past, rows[position : position + length], weight, 3)
        past, position = result.past, position + length
        made.append(result.out)
    assert torch.allclose(torch.cat(made).double(), want, atol=1e-5)
    assert torch.equal(past, rows[-9:])
