"""Hashed n-grams: which rows of an embedding table the last tokens of each position name.

For each order 2 .. n and each head, XOR of id x multiplier over the last tokens, modulo the head's prime, plus the
head's offset. History stops at the end-of-sequence token: what lies behind it reads as that token, and so does what
lies before the first. The ids that the next rows will need are data: they come in from a slot and go out to one, n - 1
of them.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Constants of one table; heads are sorted by order, 2-grams first."""

    multipliers: torch.Tensor  # [n] int64, odd; multipliers[0] is the position's own
    head_sizes: torch.Tensor  # [heads] int64 primes
    head_offsets: torch.Tensor  # [heads] int64: a head's first row in the table
    eos_id: int

    @property
    def history_len(self) -> int:
        """Earlier tokens that a position needs: n - 1."""
        return self.multipliers.shape[0] - 1


def ngram_rows_reference(tokens: list[int], hash_: NgramHash) -> list[list[int]]:
    """The plain rule over a whole sequence, in Python's integers: table rows of each position."""
    orders = range(2, hash_.history_len + 2)
    heads_per_order = hash_.head_sizes.shape[0] // hash_.history_len
    multipliers = [int(m) for m in hash_.multipliers]
    rows: list[list[int]] = []
    for position in range(len(tokens)):
        seen = [tokens[position]]
        while len(seen) <= hash_.history_len:
            before = position - len(seen)
            stopped = before < 0 or tokens[before] == hash_.eos_id or (len(seen) > 1 and seen[-1] == hash_.eos_id)
            seen.append(hash_.eos_id if stopped else tokens[before])
        found: list[int] = []
        for order in orders:
            mixed = 0
            for shift in range(order):
                mixed ^= seen[shift] * multipliers[shift]
            for head in range((order - 2) * heads_per_order, (order - 1) * heads_per_order):
                found.append(mixed % int(hash_.head_sizes[head]) + int(hash_.head_offsets[head]))
        rows.append(found)
    return rows


def first_history(num_seqs: int, hash_: NgramHash) -> torch.Tensor:
    """History of sequences that have none: [num_seqs, n - 1] of the end-of-sequence token."""
    return torch.full((num_seqs, hash_.history_len), hash_.eos_id, dtype=torch.int64)


def ngram_rows(history: torch.Tensor, tokens: torch.Tensor, hash_: NgramHash) -> torch.Tensor:
    """Table rows of new tokens: [num_seqs, N, heads] int64 from history [num_seqs, n - 1] and tokens [num_seqs, N]."""
    assert history.shape == (tokens.shape[0], hash_.history_len)
    assert history.dtype == tokens.dtype == torch.int64
    num_heads = hash_.head_sizes.shape[0]
    assert num_heads % hash_.history_len == 0
    heads_per_order = num_heads // hash_.history_len
    joined = torch.cat((history, tokens), dim=1)
    num_tokens = tokens.shape[1]
    mixed = tokens * hash_.multipliers[0]
    stopped = torch.zeros_like(tokens, dtype=torch.bool)
    parts: list[torch.Tensor] = []
    for shift in range(1, hash_.history_len + 1):
        begin = hash_.history_len - shift
        earlier = joined[:, begin : begin + num_tokens]
        stopped = stopped | (earlier == hash_.eos_id)
        mixed = mixed ^ (earlier.masked_fill(stopped, hash_.eos_id) * hash_.multipliers[shift])
        heads = slice((shift - 1) * heads_per_order, shift * heads_per_order)
        parts.append(torch.remainder(mixed[:, :, None], hash_.head_sizes[heads]) + hash_.head_offsets[heads])
    return torch.cat(parts, dim=-1)


def next_history(history: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """History after these tokens: the last n - 1 of both, [num_seqs, n - 1]."""
    return torch.cat((history, tokens), dim=1)[:, tokens.shape[1] :]
