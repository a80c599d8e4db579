"""What all layers of one forward share: the batch, and what is worked out from it once."""

from dataclasses import dataclass

import torch

from daemon.batch import Batch
from kernels.paged_attention import AttentionPlan, PagedRows, plan_attention


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of each row's position, the sign of the half-rotation already in sin: [num_rows, 1, rotary_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Made at the beginning of a forward, read by every layer."""

    batch: Batch
    attention: AttentionPlan
    rotary: Rotary | None  # None in a model without rotary positions
    steps: "tuple[RowStep, ...]"  # of a verification batch, else none


@dataclass(frozen=True, slots=True)
class RowStep:
    """One decode step of a verification batch: the rows that it takes, [num_taken] int64, as a batch of their own."""

    rows: torch.Tensor
    inputs: Inputs


def make_inputs(batch: Batch, block_size: int, tile: int, dtype: torch.dtype, rotary: Rotary | None) -> Inputs:
    """Lays out the attention work of a batch's rows, and of each of its steps where it verifies."""
    steps: list[RowStep] = []
    if batch.row_slots is not None:
        for rows, step in batch.row_steps():
            turned = None if rotary is None else Rotary(rotary.cos[rows], rotary.sin[rows])
            steps.append(RowStep(rows, make_inputs(step, block_size, tile, dtype, turned)))
    plan = plan_attention(PagedRows(batch.block_tables, batch.starts, batch.cu_rows), block_size, tile, dtype)
    return Inputs(batch, plan, rotary, tuple(steps))
