"""A mask's bits are the token ids that stay; every other logit is -inf, also beyond the mask's end."""

import random

import pytest
import torch

from kernels.token_mask import apply_token_masks, mask_words


@pytest.mark.parametrize(
    ("vocab_size", "covered"), [(1, 1), (31, 32), (32, 32), (33, 33), (320, 260), (260, 320), (97, 70)]
)
def test_only_what_is_set_stays(vocab_size: int, covered: int) -> None:
    rng = random.Random(vocab_size)
    logits = torch.randn(5, vocab_size)
    allowed = [{id_ for id_ in range(covered) if rng.random() < share} for share in (0.0, 0.01, 0.5, 0.9, 1.1)]
    masks = torch.zeros(5, mask_words(covered), dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for id_ in ids:
            masks[row, id_ // 32] |= 1 << (id_ % 32)
    signed = torch.where(masks >= 1 << 31, masks - (1 << 32), masks).to(torch.int32)
    before = logits.clone()
    masked = apply_token_masks(logits, signed)
    assert torch.equal(logits, before)
    for row, ids in enumerate(allowed):
        for id_ in range(vocab_size):
            assert masked[row, id_] == (logits[row, id_] if id_ in ids else -torch.inf)
