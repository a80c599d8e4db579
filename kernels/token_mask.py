"""Allowed tokens as bits: word w of a row's mask holds token ids [32 w, 32 w + 32), the lowest in its lowest bit."""

import sys

import torch

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words of a mask over a vocabulary."""
    return -(-vocab_size // WORD_BITS)


def apply_token_masks(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] and [rows, words] int32 to [rows, vocab]: -inf wherever the bit is 0 or the mask has none.

    The logits are finite.
    """
    assert masks.dtype == torch.int32
    assert masks.dim() == 2
    assert masks.shape[0] == logits.shape[0]
    assert sys.byteorder == "little", "a word's bytes are taken in order"
    rows, vocab_size = logits.shape
    # Adding 0 or -inf, looked up for eight tokens at a time, is several times faster than choosing by a mask.
    is_set = torch.arange(256, device=masks.device).unsqueeze(-1) >> torch.arange(8, device=masks.device) & 1
    added = torch.where(is_set.bool(), 0.0, -torch.inf).to(logits.dtype)  # [256, 8]
    octets = masks.contiguous().view(torch.uint8).flatten().int()
    bias = added.index_select(0, octets).view(rows, -1)  # [rows, words * 32]
    covered = min(vocab_size, bias.shape[1])
    masked = logits.new_full((rows, vocab_size), -torch.inf)
    torch.add(logits[:, :covered], bias[:, :covered], out=masked[:, :covered])
    return masked
