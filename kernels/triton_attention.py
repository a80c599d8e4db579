"""Attention of a mixed batch in Triton: what kernels/paged_attention.py is on a CPU, with its interface.

Sequences with many rows are chunks and walk their keys; sequences with few rows give decode rows, each by itself in
splits of a fixed length. The rule is the same as on a CPU, so a batch's rows are cut alike everywhere.
"""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.gluon_paged_prefill import ROWS_PER_TILE, grouped_prefill, is_fit
from kernels.paged_attention import MAX_NARROW_ROWS, GatedQueries, PagedRows
from kernels.triton_activate import gate_heads
from kernels.triton_paged_decode import SPLITS, DecodePlan, DecodeRows, paged_decode, plan_decode
from kernels.triton_paged_prefill import ChunkRows, PrefillPlan, paged_prefill, plan_prefill, prefill_tiles


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What `paged_attention` does for a batch; made once a step and shared by all layers."""

    num_rows: int
    decode: DecodePlan | None
    decode_rows: torch.Tensor | None  # [num_decode_rows] int64, rising; None: they are all rows, in order
    prefill: PrefillPlan | None
    prefill_by_groups: bool  # of warps, where the card and the model are fit for it


def plan_attention(rows: PagedRows, block_size: int, head_dim: int) -> TritonPlan:
    """Lays out the work of a batch. Raises AssertionError where a block table does not cover its rows."""
    device = rows.block_tables.device
    by_groups = is_fit(device, block_size=block_size, head_dim=head_dim)
    if rows.is_decode and rows.positions is not None:
        return TritonPlan(rows.cu_rows[-1], _plan_step(rows, rows.positions, block_size), None, None, by_groups)
    chunks: list[int] = []
    narrow: list[tuple[int, int, int]] = []  # (row, sequence, num_keys)
    for s, (first, last) in enumerate(pairwise(rows.cu_rows)):
        start = rows.starts[s]
        assert start + last - first <= rows.block_tables.shape[1] * block_size, "block table does not cover the rows"
        if last - first > MAX_NARROW_ROWS:
            chunks.append(s)
        else:
            narrow.extend((row, s, start + row - first + 1) for row in range(first, last))
    num_rows = rows.cu_rows[-1]
    prefill = None
    if chunks:
        chunk_rows = ChunkRows(rows.block_tables, rows.starts, rows.cu_rows)
        rows_per_tile = ROWS_PER_TILE if by_groups else prefill_tiles(head_dim).rows
        prefill = plan_prefill(chunk_rows, tuple(chunks), block_size=block_size, rows_per_tile=rows_per_tile)
    if not narrow:
        return TritonPlan(num_rows, None, None, prefill, by_groups)
    taken, seqs, num_keys = torch.tensor(narrow).unbind(1)
    decode = plan_decode(
        DecodeRows(rows.block_tables, num_keys.to(device, torch.int32), seqs.to(device, torch.int32)),
        block_size=block_size,
        rule=SPLITS,
        most_items=sum(SPLITS.most_splits(keys) for _, _, keys in narrow),
    )
    return TritonPlan(num_rows, decode, taken.to(device) if chunks else None, prefill, by_groups)


def _plan_step(rows: PagedRows, positions: torch.Tensor, block_size: int) -> DecodePlan:
    """One row of each sequence; the host says only how much room there is."""
    assert max(rows.starts) < rows.block_tables.shape[1] * block_size, "block table does not cover the rows"
    seqs = torch.arange(rows.cu_rows[-1], dtype=torch.int32, device=positions.device)
    return plan_decode(
        DecodeRows(rows.block_tables, positions.int() + 1, seqs),
        block_size=block_size,
        rule=SPLITS,
        most_items=sum(SPLITS.most_splits(start + 1) for start in rows.starts),
    )


def paged_attention(
    q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, plan: TritonPlan, scale: float
) -> Generator[None, None, torch.Tensor]:
    """Attends each row to its sequence's keys up to and including its own; yields between its launches.

    Args and result as kernels/paged_attention.py, in bfloat16.
    """
    assert q.shape[0] == plan.num_rows, "the plan is of another batch"
    if plan.prefill is None:
        assert plan.decode is not None
        return paged_decode(q, k_plane, v_plane, plan.decode, scale)
    attend = grouped_prefill if plan.prefill_by_groups else paged_prefill
    out = attend(q, k_plane, v_plane, plan.prefill, scale)
    if plan.decode is not None:
        yield
        assert plan.decode_rows is not None
        out[plan.decode_rows] = paged_decode(q[plan.decode_rows], k_plane, v_plane, plan.decode, scale)
    return out


def gated_attention(
    queries: GatedQueries, k_plane: torch.Tensor, v_plane: torch.Tensor, plan: TritonPlan, scale: float
) -> Generator[None, None, torch.Tensor]:
    """The same times sigmoid(gate), [num_rows, num_heads * head_dim]; a step's merge of splits takes the gate along."""
    if plan.prefill is None:
        assert plan.decode is not None
        return paged_decode(queries.q, k_plane, v_plane, plan.decode, scale, gate=queries.gate).flatten(1)
    found = yield from paged_attention(queries.q, k_plane, v_plane, plan, scale)
    return gate_heads(found, queries.gate)
