"""Latent and sparse attention in Triton, with the interfaces of the torch forms.

`mla_attention`, `select_keys`, `sparse_attention` and `sparse_mla` take what kernels/mla.py, kernels/indexer.py and
kernels/sparse_attention.py take: consecutive rows of one sequence. They take a `BatchSpan` as well, one row of each of
many sequences, whose positions are read on the device alone.
"""

from dataclasses import dataclass

import torch

from kernels.indexer import Selection
from kernels.key_tiles import AnySpan, BatchSpan, Span
from kernels.paged_attention import MAX_NARROW_ROWS, PagedRows
from kernels.triton_indexer import ScoreRows, index_scores
from kernels.triton_mla import latent_splits, mla_decode, sparse_mla_decode
from kernels.triton_paged_decode import DecodePlan, DecodeRows, SplitRule, plan_decode
from kernels.triton_selected import SelectedRows
from kernels.triton_sparse_decode import sparse_decode
from kernels.triton_topk import top_keys

WHOLE = SplitRule(1 << 20, 1 << 20)  # a row of a chunk walks so many keys at once


@dataclass(slots=True)
class StepSplits:
    """The splits of a decode step's rows: laid out by the first layer that attends to all keys, if one does."""

    rows: DecodeRows
    starts: tuple[int, ...]  # no row is at a later position
    block_size: int
    plan: DecodePlan | None = None

    def of(self, num_heads: int) -> DecodePlan:
        """Layers have equally many heads."""
        if self.plan is None:
            rule = latent_splits(num_heads)
            most = sum(rule.most_splits(start + 1) for start in self.starts)
            self.plan = plan_decode(self.rows, block_size=self.block_size, rule=rule, most_items=most)
        return self.plan


def span_batch(rows: PagedRows, block_size: int) -> BatchSpan | None:
    """The rows of a decode step, for all layers."""
    if not rows.is_decode or rows.positions is None:
        return None
    positions = rows.positions.int()
    row_seqs = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    splits = StepSplits(DecodeRows(rows.block_tables, positions + 1, row_seqs), rows.starts, block_size)
    return BatchSpan(rows.block_tables, positions, row_seqs, max(rows.starts) + 1, splits)


def mla_attention(
    queries: torch.Tensor, plane: torch.Tensor, span: AnySpan, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """[N, H, C] in bfloat16. Few rows take decode's splits; the many rows of a chunk each walk all of their keys."""
    num_rows = queries.shape[0]
    if isinstance(span, BatchSpan):
        assert isinstance(span.splits, StepSplits)
        plan = span.splits.of(queries.shape[1])
        return mla_decode(queries, plane, plan, latent_dim=latent_dim, scale=scale)
    rule = WHOLE if num_rows > MAX_NARROW_ROWS else latent_splits(queries.shape[1])
    num_keys = _positions(span, num_rows, queries.device) + 1
    rows = DecodeRows(span.table[None], num_keys, torch.zeros_like(num_keys))
    most = sum(rule.most_splits(span.start + row + 1) for row in range(num_rows))
    plan = plan_decode(rows, block_size=plane.shape[1], rule=rule, most_items=most)
    return mla_decode(queries, plane, plan, latent_dim=latent_dim, scale=scale)


def select_keys(
    queries: torch.Tensor, weights: torch.Tensor, plane: torch.Tensor, span: AnySpan, *, pool: int, count: int
) -> Selection:
    """The keys that rows attend to; see kernels/indexer.py."""
    num_rows = queries.shape[0]
    if isinstance(span, BatchSpan):
        visible, most_keys = (span.positions + 1) // pool, span.most_tokens // pool
        rows = ScoreRows(span.block_tables, visible, span.row_seqs)
    else:
        visible = (_positions(span, num_rows, queries.device) + 1) // pool
        most_keys = (span.start + num_rows) // pool
        rows = ScoreRows(span.table[None], visible, None)
    if most_keys == 0:
        picks = torch.full((num_rows, count), -1, dtype=torch.int64, device=queries.device)
        return Selection(picks, pool)
    scores = index_scores(queries, weights.float(), plane, rows, most_keys=most_keys)
    return Selection(top_keys(scores, visible, count).long(), pool)


def sparse_attention(
    queries: torch.Tensor,
    key_plane: torch.Tensor,
    value_plane: torch.Tensor,
    span: AnySpan,
    selection: Selection,
    *,
    scale: float,
) -> torch.Tensor:
    """[N, H, D] in bfloat16: attention over what was selected for each of a sequence's consecutive rows."""
    return sparse_decode(queries, key_plane, value_plane, _selected(queries, span, selection), scale)


def sparse_mla(
    queries: torch.Tensor,
    plane: torch.Tensor,
    span: AnySpan,
    selection: Selection,
    *,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """As `sparse_attention` over a latent plane: queries [N, H, C + R] to [N, H, C]."""
    selected = _selected(queries, span, selection)
    return sparse_mla_decode(queries, plane, selected, latent_dim=latent_dim, scale=scale)


def _positions(span: Span, num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(span.start, span.start + num_rows, dtype=torch.int32, device=device)


def _selected(queries: torch.Tensor, span: AnySpan, selection: Selection) -> SelectedRows:
    if isinstance(span, BatchSpan):
        return SelectedRows(selection.picks, selection.pool, span.positions, span.row_seqs, span.block_tables)
    positions = _positions(span, queries.shape[0], queries.device)
    return SelectedRows(selection.picks, selection.pool, positions, torch.zeros_like(positions), span.table[None])
