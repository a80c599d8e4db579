"""One forward's rows: which tokens, whose, at which positions, and where their state lives.

A batch is a prefill chunk (one sequence, many rows), a decode step (many sequences, one row each), or k rows of each of
several. Layers read nothing else about sequences; there is no per-sequence object and no counter below this line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
    # Verification: [num_rows] int64, a slot for the state after each row, so that any of them can be the one that is
    # kept; slot_out then receives nothing. None everywhere else.
    row_slots: torch.Tensor | None
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

    def row_steps(self) -> Iterator[tuple[torch.Tensor, "Batch"]]:
        """A verification batch as decode steps: the sequences' first rows, their second ones, and so on.

        Each comes with the rows it takes, [num_taken] int64, and reads the slots that the step before wrote.
        """
        assert self.row_slots is not None
        device = self.token_ids.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        for t in range(max(last - first for first, last in pairwise(self.cu_rows))):
            seqs = [s for s in range(self.num_seqs) if self.cu_rows[s] + t < self.cu_rows[s + 1]]
            taken = torch.tensor(seqs, dtype=torch.int64, device=device)
            rows = torch.tensor([self.cu_rows[s] + t for s in seqs], dtype=torch.int64, device=device)
            step = Batch(
                token_ids=self.token_ids[rows],
                positions=self.positions[rows],
                row_blocks=self.row_blocks[rows],
                row_offsets=self.row_offsets[rows],
                block_tables=self.block_tables[taken],
                slot_in=self.slot_in[taken] if t == 0 else self.row_slots[rows - 1],
                slot_out=self.row_slots[rows],
                row_slots=None,
                starts=tuple(self.starts[s] + t for s in seqs),
                cu_rows=tuple(range(len(seqs) + 1)),
                logit_rows=none,
            )
            yield rows, step


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a batch, in host values: the argument of `make_batch`."""

    token_ids: tuple[int, ...] | list[int]
    start: int
    block_table: list[int]  # covers positions [0, start + len(token_ids))
    slot_in: int
    slot_out: int
    want_all_logits: bool = False  # else only the last row's
    row_slots: list[int] | None = None  # a slot for the state after each row; then for all sequences of the batch


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
    row_slots: list[int] | None = None
    if any(seq.row_slots is not None for seq in rows):
        row_slots = [slot for seq in rows for slot in seq.row_slots or []]
        assert len(row_slots) == cu_rows[-1], "a verification batch needs a slot for every row of every sequence"
    width = max(-(-(s.start + len(s.token_ids)) // block_size) for s in rows)
    tables = [(s.block_table[:width] + [0] * (width - len(s.block_table)))[:width] for s in rows]

    def ids(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    # One copy to the device for all columns of a length.
    columns = (token_ids, positions, row_blocks, [position % block_size for position in positions])
    of_rows = torch.tensor(columns, dtype=torch.int64, device=device).unbind()
    slots = torch.tensor(([s.slot_in for s in rows], [s.slot_out for s in rows]), dtype=torch.int64, device=device)
    return Batch(
        token_ids=of_rows[0],
        positions=of_rows[1],
        row_blocks=of_rows[2],
        row_offsets=of_rows[3],
        block_tables=torch.tensor(tables, dtype=torch.int64, device=device),
        slot_in=slots[0],
        slot_out=slots[1],
        row_slots=None if row_slots is None else ids(row_slots),
        starts=tuple(s.start for s in rows),
        cu_rows=tuple(cu_rows),
        logit_rows=ids(logit_rows),
    )
