"""Reading a sequence's paged rows, and attention that walks them in tiles at absolute positions.

A plane is [num_blocks, rows_per_block, *row_shape]; a sequence's row r lies in block `table[r // rows_per_block]`. Key
tiles begin at absolute multiples of a fixed length and are walked in position order with running (m, l, acc) in fp32,
and query tiles are cut from the chunk's first row: so the bytes of a result depend on the chunk and on what the rows
hold, never on which blocks hold them, on a batch, or on what was resident.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

QUERY_TILE = 128  # queries of a chunk that walk together

ReadTile = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
VisibleTile = Callable[[slice, int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence: where they begin, and where the sequence's planes lie."""

    start: int  # position of the first row
    table: torch.Tensor  # [num_blocks] int64: the sequence's blocks, those past its end unread
    tile: int  # keys; tiles begin at absolute multiples of it


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """One row of each of several sequences, at once: for forms that read positions on the device."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int64
    positions: torch.Tensor  # [num_seqs] int32
    row_seqs: torch.Tensor  # [num_seqs] int32: 0, 1, 2, ...
    most_tokens: int  # no row is at this position or past it, and the tables have room for as many
    splits: object  # what the form's layers share


AnySpan = Span | BatchSpan


def gather_rows(plane: torch.Tensor, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Rows [start, end) of one sequence: [end - start, *row_shape]. `table` is its block ids, int64."""
    assert 0 <= start <= end
    per_block = plane.shape[1]
    first = start // per_block
    last = -(-end // per_block)
    assert last <= table.shape[0], "block table does not cover the rows"
    blocks = plane.index_select(0, table[first:last])
    offset = start - first * per_block
    return blocks.flatten(0, 1)[offset : offset + end - start]


def gather_picked(plane: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of one sequence by index, any shape of int64 >= 0: [*rows.shape, *row_shape]."""
    per_block = plane.shape[1]
    return plane[table[rows // per_block], rows % per_block]


def scatter_rows(plane: torch.Tensor, table: torch.Tensor, start: int, rows: torch.Tensor) -> None:
    """Writes rows [start, start + len(rows)) of one sequence."""
    assert rows.shape[1:] == plane.shape[2:]
    per_block = plane.shape[1]
    places = torch.arange(start, start + rows.shape[0], device=plane.device)
    assert start + rows.shape[0] <= table.shape[0] * per_block, "block table does not cover the rows"
    plane[table[places // per_block], places % per_block] = rows.to(plane.dtype)


def attend_tiles(
    queries: torch.Tensor, read: ReadTile, visible: VisibleTile | None, span: Span, scale: float
) -> torch.Tensor:
    """Causal attention of consecutive queries at positions [start, start + N) over keys [0, start + N).

    Args:
        queries: [N, num_kv_heads, group, D]: the query heads that share a key head lie together.
        read: `read(first, last)` gives keys [last - first, num_kv_heads, D] and values [.., Dv] at those positions.
        visible: `visible(rows, first, last)` gives [rows, last - first] bool, which keys these query rows may attend to
            beside causality; None: all. A row that sees nothing at all gives NaN.
        span: where the queries stand.
        scale: factor of the scores.

    Returns:
        [N, num_kv_heads, group, Dv] fp32.
    """
    parts: list[torch.Tensor] = []
    for row in range(0, queries.shape[0], QUERY_TILE):
        rows = slice(row, min(row + QUERY_TILE, queries.shape[0]))
        parts.append(_attend_query_tile(queries[rows].float() * scale, read, visible, rows, span))
    return torch.cat(parts)


def _attend_query_tile(
    queries: torch.Tensor, read: ReadTile, visible: VisibleTile | None, rows: slice, span: Span
) -> torch.Tensor:
    num_rows, num_heads, group, width = queries.shape
    start = span.start + rows.start
    end = start + num_rows
    positions = torch.arange(start, end, device=queries.device)
    packed = queries.permute(1, 0, 2, 3).reshape(num_heads, num_rows * group, width)
    best = packed.new_full((num_heads, num_rows * group, 1), -torch.inf)
    total = torch.zeros_like(best)
    acc: torch.Tensor | None = None
    for first in range(0, end, span.tile):
        last = min(first + span.tile, end)
        keys, values = read(first, last)
        scores = packed @ keys.float().permute(1, 2, 0)  # [heads, rows * group, keys]
        hidden = causally_hidden(positions, start, first, last)
        if visible is not None:
            unseen = ~visible(rows, first, last)
            hidden = unseen if hidden is None else hidden | unseen
        if hidden is not None:
            scores = scores.view(num_heads, num_rows, group, last - first)
            scores = scores.masked_fill(hidden[None, :, None, :], -torch.inf).flatten(1, 2)
        new_best = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        pivot = new_best.masked_fill(new_best == -torch.inf, 0.0)  # a row that has seen nothing yet stays empty
        shares = torch.exp(scores - pivot)
        keep = torch.exp(best - pivot)
        total = total * keep + shares.sum(dim=-1, keepdim=True)
        added = shares @ values.float().transpose(0, 1)
        acc = added if acc is None else acc * keep + added
        best = new_best
    assert acc is not None
    out = (acc / total).view(num_heads, num_rows, group, -1)
    return out.permute(1, 0, 2, 3)


def causally_hidden(positions: torch.Tensor, start: int, first: int, last: int) -> torch.Tensor | None:
    """[N, last - first] bool, True where a key lies after its query; None where queries from `start` on see all."""
    if last - 1 <= start:
        return None
    return torch.arange(first, last, device=positions.device)[None, :] > positions[:, None]
