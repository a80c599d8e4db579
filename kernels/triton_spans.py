"""Latent and sparse attention of one sequence's consecutive rows in Triton, with the interfaces of the torch forms.

`mla_attention`, `select_keys`, `sparse_attention` and `sparse_mla` take what kernels/mla.py, kernels/indexer.py and
kernels/sparse_attention.py take. Rows of many sequences go to the functions below these at once.
"""

from dataclasses import replace

import torch

from kernels.indexer import Selection
from kernels.key_tiles import Span
from kernels.paged_attention import MAX_NARROW_ROWS
from kernels.triton_indexer import ScoreRows, index_scores
from kernels.triton_mla import latent_tiles, mla_decode, sparse_mla_decode
from kernels.triton_paged_decode import DecodeRows, num_splits, plan_decode
from kernels.triton_selected import SelectedRows
from kernels.triton_sparse_decode import sparse_decode
from kernels.triton_topk import top_keys

WHOLE_SPLIT = 1 << 20  # keys that a row of a chunk walks at once; a multiple of every tile


def mla_attention(
    queries: torch.Tensor, plane: torch.Tensor, span: Span, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """[N, H, C] in bfloat16. Few rows take decode's splits; the many rows of a chunk each walk all of their keys."""
    num_rows = queries.shape[0]
    tiles = latent_tiles(queries.shape[1])
    if num_rows > MAX_NARROW_ROWS:
        tiles = replace(tiles, split=WHOLE_SPLIT)
    num_keys = _positions(span, num_rows, queries.device) + 1
    rows = DecodeRows(span.table[None], num_keys, torch.zeros_like(num_keys))
    most = sum(num_splits(span.start + row + 1, tiles.split) for row in range(num_rows))
    plan = plan_decode(rows, block_size=plane.shape[1], split=tiles.split, most_items=most)
    return mla_decode(queries, plane, plan, latent_dim=latent_dim, scale=scale, tiles=tiles)


def select_keys(
    queries: torch.Tensor, weights: torch.Tensor, plane: torch.Tensor, span: Span, *, pool: int, count: int
) -> Selection:
    """The keys that consecutive queries at positions [start, start + N) attend to; see kernels/indexer.py."""
    num_rows = queries.shape[0]
    visible = (_positions(span, num_rows, queries.device) + 1) // pool
    most_keys = (span.start + num_rows) // pool
    if most_keys == 0:
        picks = torch.full((num_rows, count), -1, dtype=torch.int64, device=queries.device)
        return Selection(picks, pool)
    scores = index_scores(
        queries, weights.float(), plane, ScoreRows(span.table[None], visible, None), most_keys=most_keys
    )
    return Selection(top_keys(scores, visible, count).long(), pool)


def sparse_attention(
    queries: torch.Tensor,
    key_plane: torch.Tensor,
    value_plane: torch.Tensor,
    span: Span,
    selection: Selection,
    *,
    scale: float,
) -> torch.Tensor:
    """[N, H, D] in bfloat16: attention over what was selected for each of a sequence's consecutive rows."""
    return sparse_decode(queries, key_plane, value_plane, _selected(queries, span, selection), scale)


def sparse_mla(
    queries: torch.Tensor,
    plane: torch.Tensor,
    span: Span,
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


def _selected(queries: torch.Tensor, span: Span, selection: Selection) -> SelectedRows:
    positions = _positions(span, queries.shape[0], queries.device)
    return SelectedRows(selection.picks, selection.pool, positions, torch.zeros_like(positions), span.table[None])
