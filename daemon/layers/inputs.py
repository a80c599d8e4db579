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


def plan_batch(batch: Batch, block_size: int, tile: int, dtype: torch.dtype) -> AttentionPlan:
    """The attention work of a batch's rows."""
    return plan_attention(PagedRows(batch.block_tables, batch.starts, batch.cu_rows), block_size, tile, dtype)
