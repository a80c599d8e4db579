"""What all layers of one forward share: the batch, and what is worked out from it once."""

from dataclasses import dataclass

import torch

from daemon.batch import Batch
from kernels.dispatch import AttentionSizes, Kernels
from kernels.key_tiles import QUERY_TILE, AnySpan, Span
from kernels.paged_attention import PagedRows

Piece = tuple[slice, AnySpan]
"""Rows of a batch, and where they stand."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of each row's position, the sign of the half-rotation already in sin: [num_rows, 1, rotary_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class InputForm:
    """What of a model decides how a batch is laid out."""

    kernels: Kernels
    tile: int  # tokens; attention walks keys in tiles at absolute multiples of it
    dtype: torch.dtype
    head_dim: int | None  # of attention over whole keys; None: layers walk pieces


@dataclass(frozen=True, slots=True)
class Inputs:
    """Made at the beginning of a forward, read by every layer."""

    batch: Batch
    attention: object  # the plan of `attend` of the form; None where layers walk pieces
    rotary: Rotary | None  # None in a model without rotary positions
    steps: "tuple[RowStep, ...]"  # of a verification batch, else none
    pieces: tuple[Piece, ...] = ()  # work between two pauses, for layers that walk them


@dataclass(frozen=True, slots=True)
class RowStep:
    """One decode step of a verification batch: the rows that it takes, [num_taken] int64, as a batch of their own."""

    rows: torch.Tensor
    inputs: Inputs


def make_inputs(batch: Batch, block_size: int, form: InputForm, rotary: Rotary | None) -> Inputs:
    """Lays out the attention work of a batch's rows, and of each of its steps where it verifies."""
    steps: list[RowStep] = []
    if batch.row_slots is not None:
        for rows, step in batch.row_steps():
            turned = None if rotary is None else Rotary(rotary.cos[rows], rotary.sin[rows])
            steps.append(RowStep(rows, make_inputs(step, block_size, form, turned)))
    paged = PagedRows(batch.block_tables, batch.starts, batch.cu_rows, batch.positions)
    if form.head_dim is None:
        return Inputs(batch, None, rotary, tuple(steps), _pieces(batch, paged, block_size, form))
    sizes = AttentionSizes(block_size, form.tile, form.dtype, form.head_dim)
    return Inputs(batch, form.kernels.attention.plan(paged, sizes), rotary, tuple(steps))


def _pieces(batch: Batch, paged: PagedRows, block_size: int, form: InputForm) -> tuple[Piece, ...]:
    """Each sequence's rows in pieces as long as a query tile, or a decode step at once where the form takes it so.

    Attention cuts its query tiles from a chunk's first row too, so pieces give the bytes of the whole chunk.
    """
    whole = form.kernels.attention.span_batch(paged, block_size)
    if whole is not None:
        return ((slice(0, batch.num_rows), whole),)
    found: list[Piece] = []
    for s, start in enumerate(batch.starts):
        first, last = batch.cu_rows[s], batch.cu_rows[s + 1]
        for row in range(first, last, QUERY_TILE):
            rows = slice(row, min(row + QUERY_TILE, last))
            found.append((rows, Span(start + row - first, batch.block_tables[s], form.tile)))
    return tuple(found)
