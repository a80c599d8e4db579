"""Attention over the keys that an indexer selected, and the tail of the unfinished pool: grouped heads and MLA latents.

Two forms, chosen by the chunk's own shape alone. Where the selection covers a good part of the context, key tiles are
walked as in dense attention with the rest masked; where it does not, each query's rows are gathered. MLA is the case of
one key head whose values are the first part of the key.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.indexer import Selection
from kernels.key_tiles import ReadTile, Span, attend_tiles, gather_picked, gather_rows

DENSE_FACTOR = 2  # contexts up to this many times the selection are walked whole
GATHER_ELEMENTS = 1 << 23  # of keys gathered at a time


def selected_mask(selection: Selection, positions: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """[N, last - first] bool: tokens in [first, last) that queries at `positions` [N] attend to, causality included."""
    pool = selection.pool
    pool_first = first // pool
    num_pools = -(-last // pool) - pool_first
    local = selection.picks - pool_first
    inside = (selection.picks >= 0) & (local >= 0) & (local < num_pools)
    hit = torch.zeros((positions.shape[0], num_pools + 1), dtype=torch.bool, device=positions.device)
    hit.scatter_(1, torch.where(inside, local, num_pools), True)
    hit = hit[:, :num_pools].repeat_interleave(pool, dim=1)[:, first - pool_first * pool :][:, : last - first]
    tokens = torch.arange(first, last, device=positions.device)[None, :]
    tail_start = ((positions + 1) // pool * pool)[:, None]
    return (hit | (tokens >= tail_start)) & (tokens <= positions[:, None])


def selected_tokens(selection: Selection, positions: torch.Tensor) -> torch.Tensor:
    """[N, width * pool + pool - 1] int64: the tokens that queries at `positions` attend to; -1 where there is none."""
    pool = selection.pool
    steps = torch.arange(pool, device=positions.device)
    picked = selection.picks[:, :, None] * pool + steps
    picked = picked.masked_fill(selection.picks[:, :, None] < 0, -1).flatten(1)
    tail = ((positions + 1) // pool * pool)[:, None] + steps[: pool - 1]
    return torch.cat((picked, tail.masked_fill(tail > positions[:, None], -1)), dim=1)


def sparse_attention_reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selection: Selection, scale: float
) -> torch.Tensor:
    """The plain mathematics: all keys [T, H, D] scored, the unselected masked; the queries are the last N positions."""
    num_rows, num_keys = queries.shape[0], keys.shape[0]
    positions = torch.arange(num_keys - num_rows, num_keys)
    seen = selected_mask(selection, positions, 0, num_keys)
    group = queries.shape[1] // keys.shape[1]
    scores = torch.einsum("nhd,thd->nht", queries, keys.repeat_interleave(group, dim=1)) * scale
    shares = scores.masked_fill(~seen[:, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("nht,thd->nhd", shares, values.repeat_interleave(group, dim=1))


def sparse_attention(
    queries: torch.Tensor,
    key_plane: torch.Tensor,
    value_plane: torch.Tensor,
    span: Span,
    selection: Selection,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention of one sequence's consecutive rows over what was selected for them.

    Args:
        queries: [N, H, D] at positions [start, start + N).
        key_plane: [num_blocks, block_size, Hkv, D], rows [0, start + N) of the sequence written.
        value_plane: [num_blocks, block_size, Hkv, Dv].
        span: where the queries stand.
        selection: for these N rows.
        scale: factor of the scores.

    Returns:
        [N, H, Dv] in the dtype of `queries`.
    """
    num_rows, num_heads, width = queries.shape
    num_kv_heads = key_plane.shape[2]
    assert key_plane.ndim == 4
    assert value_plane.ndim == 4
    assert key_plane.shape[:3] == value_plane.shape[:3]
    assert key_plane.shape[3] == width
    assert num_heads % num_kv_heads == 0
    assert selection.picks.shape[0] == num_rows
    assert span.table.dtype == torch.int64
    grouped = queries.view(num_rows, num_kv_heads, num_heads // num_kv_heads, width)

    def read(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_rows(key_plane, span.table, first, last), gather_rows(value_plane, span.table, first, last)

    def pick(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_picked(key_plane, span.table, tokens), gather_picked(value_plane, span.table, tokens)

    out = _attend_selected(grouped, _Keys(read, pick), span, selection, scale)
    return out.reshape(num_rows, num_heads, -1).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values of a sequence, each [.., Hkv, D]: of consecutive tokens, or of tokens by index."""

    read: ReadTile
    pick: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _attend_selected(
    grouped: torch.Tensor, keys: _Keys, span: Span, selection: Selection, scale: float
) -> torch.Tensor:
    """[N, Hkv, G, Dv] fp32 from queries [N, Hkv, G, D]."""
    num_rows, num_kv_heads, _, width = grouped.shape
    positions = torch.arange(span.start, span.start + num_rows, device=grouped.device)
    num_tokens = selection.picks.shape[1] * selection.pool + selection.pool - 1
    if span.start + num_rows <= DENSE_FACTOR * num_tokens:

        def visible(rows: slice, first: int, last: int) -> torch.Tensor:
            return selected_mask(Selection(selection.picks[rows], selection.pool), positions[rows], first, last)

        return attend_tiles(grouped, keys.read, visible, span, scale)
    tokens = selected_tokens(selection, positions)
    step = max(1, GATHER_ELEMENTS // (num_tokens * num_kv_heads * width))
    parts: list[torch.Tensor] = []
    for row in range(0, num_rows, step):
        rows = slice(row, row + step)
        parts.append(_attend_gathered(grouped[rows].float() * scale, keys, tokens[rows]))
    return torch.cat(parts)


def _attend_gathered(queries: torch.Tensor, keys: _Keys, tokens: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, G, Dv] fp32 over each row's own tokens [n, W]; a -1 is read as token 0 and masked."""
    picked, values = keys.pick(tokens.clamp(min=0))  # [n, W, Hkv, D]
    scores = queries @ picked.float().permute(0, 2, 3, 1)
    shares = scores.masked_fill((tokens < 0)[:, None, None, :], -torch.inf).softmax(dim=-1)
    return shares @ values.float().transpose(1, 2)


def sparse_mla(
    queries: torch.Tensor,
    plane: torch.Tensor,
    span: Span,
    selection: Selection,
    *,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """As `sparse_attention` over a latent plane [num_blocks, block_size, C + R]: queries [N, H, C + R] to [N, H, C]."""
    assert plane.ndim == 3
    assert 0 < latent_dim <= plane.shape[2]
    assert span.table.dtype == torch.int64

    def read(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = gather_rows(plane, span.table, first, last)[:, None, :]
        return rows, rows[..., :latent_dim]

    def pick(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = gather_picked(plane, span.table, tokens)[:, :, None, :]
        return rows, rows[..., :latent_dim]

    out = _attend_selected(queries[:, None], _Keys(read, pick), span, selection, scale)
    return out[:, 0].to(queries.dtype)
