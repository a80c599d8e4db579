"""Which token each entry of a row's selection is, and where that token's rows lie.

A row's entries are its picks, each of `POOL` consecutive tokens, then the tail of its unfinished pool: width * POOL +
POOL - 1 entries, many of which may be absent. Picks are ascending, then -1.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """What each row attends to, for rows of several sequences."""

    picks: torch.Tensor  # [num_rows, width] int32 or int64: pools, ascending, then -1
    pool: int  # tokens of a pool
    positions: torch.Tensor  # [num_rows] int32: of the rows themselves; -1: a padding row, which attends to nothing
    row_seqs: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32 or int64

    @property
    def num_entries(self) -> int:
        """Of each row, present or not."""
        return self.picks.shape[1] * self.pool + self.pool - 1

    def check(self, num_rows: int) -> None:
        """Raises AssertionError where shapes, strides or dtypes do not fit."""
        assert self.picks.shape[0] == num_rows
        assert self.picks.dtype in (torch.int32, torch.int64)
        assert self.picks.stride(1) == 1
        assert self.positions.shape == self.row_seqs.shape == (num_rows,)
        assert self.positions.dtype == self.row_seqs.dtype == torch.int32
        assert self.block_tables.dtype in (torch.int32, torch.int64)
        assert self.block_tables.stride(1) == 1
        assert self.pool > 0


@triton.jit
def selected_tokens(picks_ptr, entries, position, width, POOL: tl.constexpr):
    """The token of each entry, -1 where it is absent. Absent too is a pick past the row's own position."""
    picked = entries < width * POOL
    pick = tl.load(picks_ptr + entries // POOL, mask=picked, other=-1).to(tl.int32)
    token = tl.where(pick >= 0, pick * POOL + entries % POOL, -1)
    if POOL > 1:
        tail = (position + 1) // POOL * POOL + entries - width * POOL
        token = tl.where(picked, token, tail)
    return tl.where(token <= position, token, -1)


@triton.jit
def selected_offsets(table_ptr, tokens, block_stride, token_stride, PAGE: tl.constexpr):
    """Offsets of the tokens' rows in a plane, int64; of absent tokens 0."""
    present = tokens >= 0
    blocks = tl.load(table_ptr + tokens // PAGE, mask=present, other=0).to(tl.int64)
    return tl.where(present, blocks * block_stride + tokens % PAGE * token_stride, 0)
