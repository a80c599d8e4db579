"""Paged copies of plain rows for kernel tests: shuffled blocks, everything unwritten poisoned with NaN."""

import torch


def paged(
    rows: torch.Tensor, rows_per_block: int, *, seed: int = 0, spare: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """A plane that holds `rows` [T, *shape] in shuffled blocks, and the block table; strided as pools make it."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-rows.shape[0] // rows_per_block)
    total = num_blocks + spare
    wide = torch.full((total, 2, rows_per_block, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    plane = wide[:, 1]
    table = torch.randperm(total, generator=generator)[:num_blocks]
    for block in range(num_blocks):
        part = rows[block * rows_per_block : (block + 1) * rows_per_block]
        plane[table[block], : part.shape[0]] = part
    return plane, table
