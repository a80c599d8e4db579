"""Inputs of the kernel benchmark: pages of sequences of equal length, and what is picked of them."""

from dataclasses import dataclass

import torch

from ops.bench.kernels_timing import DEVICE, seeded

BLOCK = 64


@dataclass(frozen=True, slots=True)
class Pages:
    """A plane [num_blocks, rows_per_block, *row] and the tables of sequences of equal length."""

    q: torch.Tensor
    planes: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    length: int
    picks: torch.Tensor | None

    def rows(self, plane: torch.Tensor, s: int) -> torch.Tensor:
        """All rows of one sequence, copied out."""
        return plane[self.tables[s].long()].flatten(0, 1)

    def ints(self, value: int) -> torch.Tensor:
        """[num_seqs] int32, all the same."""
        return torch.full((self.tables.shape[0],), value, dtype=torch.int32, device=DEVICE)

    def seqs(self) -> torch.Tensor:
        return torch.arange(self.tables.shape[0], dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True, slots=True)
class Layout:
    """What `make_pages` makes."""

    num_seqs: int
    length: int  # rows of a sequence
    row: tuple[int, ...]
    query: tuple[int, ...]
    num_planes: int = 1
    dtype: torch.dtype = torch.bfloat16
    num_picks: int = 0
    num_pools: int = 0  # to pick from


def make_pages(layout: Layout, seed: int) -> Pages:
    """Shuffled blocks; each plane is one part of an image with a gap."""
    seeded(seed)
    per_seq = layout.length // BLOCK
    size = BLOCK * torch.Size(layout.row).numel()
    num_blocks = layout.num_seqs * per_seq
    images = torch.empty((num_blocks, layout.num_planes + 1, size), dtype=layout.dtype, device=DEVICE)
    for block in range(0, num_blocks, 1024):
        piece = images[block : block + 1024]
        piece.copy_(torch.randn(piece.shape, device=DEVICE))
    planes = tuple(images[:, i].view(num_blocks, BLOCK, *layout.row) for i in range(layout.num_planes))
    tables = torch.randperm(num_blocks, device=DEVICE, dtype=torch.int32).view(layout.num_seqs, per_seq)
    q = torch.randn((layout.num_seqs, *layout.query), device=DEVICE).bfloat16()
    picks = None
    if layout.num_picks:
        order = torch.rand((layout.num_seqs, layout.num_pools), device=DEVICE).argsort(1)[:, : layout.num_picks]
        picks = order.sort(1).values.int()
    return Pages(q, planes, tables, layout.length, picks)


def as_pages(inputs: object) -> Pages:
    assert isinstance(inputs, Pages)
    return inputs
