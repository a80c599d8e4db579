"""One forward's rows: which tokens, whose, at which positions, and where their state lives.

A batch is a prefill chunk (one sequence, many rows), a decode step (many sequences, one row each), or k rows of each of
several. Layers read nothing else about sequences; there is no per-sequence object and no counter below this line.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows [cu_rows[s], cu_rows[s + 1]) belong to sequence s, at consecutive positions from starts[s].

    The host tuples and the device tensors say the same; layers on a CPU loop over the first, kernels read the second.
    """

    token_ids: torch.Tensor  # [num_rows] int64
    positions: torch.Tensor  # [num_rows] int64
    row_blocks: torch.Tensor  # [num_rows] int64: the block that holds the row's position
    row_offsets: torch.Tensor  # [num_rows] int64: position % block_size
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int64; entries past a sequence's end repeat block 0, unread
    slot_in: torch.Tensor  # [num_seqs] int64: slots that hold the state before the first row
    slot_out: torch.Tensor  # [num_seqs] int64: slots that receive the state after the last; equal to slot_in in decode
    starts: tuple[int, ...]  # position of each sequence's first row = tokens already in its planes
    cu_rows: tuple[int, ...]  # num_seqs + 1 cumulative row counts, the first 0
    logit_rows: torch.Tensor  # int64: rows whose logits are wanted

    @property
    def num_seqs(self) -> int:
        return len(self.starts)

    @property
    def num_rows(self) -> int:
        return self.cu_rows[-1]

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one row."""
        return self.num_rows == self.num_seqs

    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after this forward."""
        return tuple(start + self.cu_rows[s + 1] - self.cu_rows[s] for s, start in enumerate(self.starts))


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a batch, in host values: the argument of `make_batch`."""

    token_ids: tuple[int, ...] | list[int]
    start: int
    block_table: list[int]  # covers positions [0, start + len(token_ids))
    slot_in: int
    slot_out: int
    want_all_logits: bool = False  # else only the last row's


def make_batch(rows: list[SequenceRows], block_size: int, device: torch.device) -> Batch:
    """Lays sequences side by side. Every block table must cover its rows."""
    token_ids: list[int] = []
    positions: list[int] = []
    row_blocks: list[int] = []
    logit_rows: list[int] = []
    cu_rows = [0]
    for seq in rows:
        num_rows = len(seq.token_ids)
        end = seq.start + num_rows
        assert num_rows > 0
        assert end <= len(seq.block_table) * block_size, "block table does not cover the rows"
        token_ids.extend(seq.token_ids)
        positions.extend(range(seq.start, end))
        row_blocks.extend(seq.block_table[p // block_size] for p in range(seq.start, end))
        first = 0 if seq.want_all_logits else num_rows - 1
        logit_rows.extend(range(cu_rows[-1] + first, cu_rows[-1] + num_rows))
        cu_rows.append(cu_rows[-1] + num_rows)
    width = max(-(-(s.start + len(s.token_ids)) // block_size) for s in rows)
    tables = [(s.block_table[:width] + [0] * (width - len(s.block_table)))[:width] for s in rows]

    def ids(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    position_ids = ids(positions)
    return Batch(
        token_ids=ids(token_ids),
        positions=position_ids,
        row_blocks=ids(row_blocks),
        row_offsets=position_ids % block_size,
        block_tables=torch.tensor(tables, dtype=torch.int64, device=device),
        slot_in=ids([s.slot_in for s in rows]),
        slot_out=ids([s.slot_out for s in rows]),
        starts=tuple(s.start for s in rows),
        cu_rows=tuple(cu_rows),
        logit_rows=ids(logit_rows),
    )
