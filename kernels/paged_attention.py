"""Softmax attention of a batch's rows over keys and values that lie in pages.

The order of the arithmetic is part of the contract, because equality of bytes rests on it:

- Rows of a sequence with many rows (a prefill chunk) walk key tiles `[j * tile, (j + 1) * tile)` at absolute multiples
  of `tile`, in position order, merging (output, log-sum-exp) pairs in float32.
- Rows of a sequence with few rows (decode, verification) take key splits at absolute multiples of `split`, each
  computed by itself, merged by one weighted sum in position order.

Which blocks hold a page, what unheld or unwritten rows contain, and the order of the sequences change no byte.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise

import torch

MAX_NARROW_ROWS = 8  # a sequence with more rows is a chunk
SPLIT_TOKENS = 1024  # a decode split, or a tile where that is shorter
MAX_GATHER_TOKENS = 1 << 16  # most keys copied out of the pages at a time
WORD = torch.int64


def paged_attention_reference(
    q: torch.Tensor,  # [num_rows, num_heads, head_dim]
    k_plane: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_plane: torch.Tensor,  # as k_plane
    rows: "PagedRows",
    scale: float,
) -> torch.Tensor:
    """The plain mathematics in float64, a row at a time; returns float64 [num_rows, num_heads, head_dim]."""
    block_size = k_plane.shape[1]
    group = q.shape[1] // k_plane.shape[2]
    out = torch.empty_like(q, dtype=torch.float64)
    for s, (first, last) in enumerate(pairwise(rows.cu_rows)):
        for row in range(first, last):
            num_keys = rows.starts[s] + row - first + 1
            table = rows.block_tables[s, : -(-num_keys // block_size)]
            k = k_plane[table].flatten(0, 1)[:num_keys].double().repeat_interleave(group, 1)  # [num_keys, num_heads, D]
            v = v_plane[table].flatten(0, 1)[:num_keys].double().repeat_interleave(group, 1)
            weights = torch.softmax(torch.einsum("hd,khd->hk", q[row].double(), k) * scale, -1)
            out[row] = torch.einsum("hk,khd->hd", weights, v)
    return out


@dataclass(frozen=True, slots=True)
class GatedQueries:
    """Queries, and the gates whose sigmoid is the last factor of what they find: [num_rows, num_heads, head_dim]."""

    q: torch.Tensor
    gate: torch.Tensor  # rows and heads at any stride


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a batch's rows and their keys are: rows [cu_rows[s], cu_rows[s + 1]) sit at positions from starts[s]."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int64
    starts: tuple[int, ...]
    cu_rows: tuple[int, ...]
    # [num_rows] int64: where rows stand, for forms that read it on the device. Of a step that is to be replayed these
    # alone are true: its starts are the last positions that its tables have room for.
    positions: torch.Tensor | None = None

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one row."""
        return self.cu_rows[-1] == len(self.starts)


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys of one tile: the first `num_keys` rows of these blocks."""

    blocks: torch.Tensor  # int64
    num_keys: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first, last) of one chunk, all inside one key tile; history in order, then the tile they lie in."""

    first: int
    last: int
    history: tuple[Tile, ...]
    diagonal: Tile
    mask: torch.Tensor | None  # [rows, num_keys] additive; None where the rows begin at the tile's begin


@dataclass(frozen=True, slots=True)
class Splits:
    """Some key splits of decode rows, gathered together."""

    blocks: torch.Tensor  # [num_splits * width / block_size] int64, width a whole number of blocks
    rows: torch.Tensor | None  # [num_splits] int64: the batch row that each split belongs to; None: all rows in order
    num_splits: int
    num_keys: int  # of the split with most; at most width
    absent: torch.Tensor | None  # [num_splits, 1, num_keys, 1] bool: keys past the row's own; None where all count
    mask: torch.Tensor | None  # [num_splits, 1, 1, num_keys] additive, the same


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """All decode rows of a batch."""

    rows: torch.Tensor  # [num_narrow] int64, rising
    parts: tuple[Splits, ...]
    order: torch.Tensor | None  # [num_narrow, most_splits]: a row's splits in position order; None where each has one
    missing: torch.Tensor | None  # [num_narrow, most_splits] bool; None where all rows have as many


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What `paged_attention` does for a batch; made once a step and shared by all layers."""

    num_rows: int
    segments: tuple[Segment, ...]
    narrow: NarrowRows | None


def plan_attention(rows: PagedRows, block_size: int, tile: int, dtype: torch.dtype) -> AttentionPlan:
    """Lays out the work of a batch. `tile` is a multiple of `block_size`; `dtype` is that of the queries."""
    assert tile % block_size == 0, "a tile is a whole number of blocks"
    segments: list[Segment] = []
    narrow: list[tuple[int, int, int]] = []  # (sequence, row, num_keys)
    for s, (first, last) in enumerate(pairwise(rows.cu_rows)):
        start = rows.starts[s]
        if last - first <= MAX_NARROW_ROWS:
            narrow.extend((s, row, start + row - first + 1) for row in range(first, last))
            continue
        table = rows.block_tables[s]
        while first < last:
            end = min(last, first + tile - start % tile)
            segments.append(_segment(table, (first, end), start, (block_size, tile), dtype))
            start += end - first
            first = end
    decode = _plan_narrow(rows.block_tables, narrow, (block_size, tile, rows.cu_rows[-1]), dtype) if narrow else None
    return AttentionPlan(rows.cu_rows[-1], tuple(segments), decode)


def paged_attention(
    q: torch.Tensor,  # [num_rows, num_heads, head_dim]
    k_plane: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], blocks any distance apart
    v_plane: torch.Tensor,  # as k_plane
    plan: AttentionPlan,
    scale: float,
) -> Generator[None, None, torch.Tensor]:
    """Attends each row to its sequence's keys up to and including its own; yields between pieces of about 5 ms.

    Returns [num_rows, num_heads, head_dim] in q's dtype. The rows' own keys and values are already in the planes.
    """
    assert q.shape[0] == plan.num_rows, "the plan is of another batch"
    assert k_plane.shape == v_plane.shape
    assert q.shape[2] == k_plane.shape[3]
    assert q.shape[1] % k_plane.shape[2] == 0, "query heads are a multiple of key heads"
    assert q.dtype == k_plane.dtype == v_plane.dtype
    assert q.stride(2) == 1
    if plan.narrow is not None and not plan.segments:
        return (yield from _attend_narrow(q, k_plane, v_plane, plan.narrow, scale))
    if plan.narrow is None and len(plan.segments) == 1:
        return (yield from _attend_segment(q, k_plane, v_plane, plan.segments[0], scale))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for segment in plan.segments:
        out[segment.first : segment.last] = yield from _attend_segment(q, k_plane, v_plane, segment, scale)
        yield
    if plan.narrow is not None:
        out[plan.narrow.rows] = yield from _attend_narrow(q, k_plane, v_plane, plan.narrow, scale)
    return out


def _attend_segment(
    q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, segment: Segment, scale: float
) -> Generator[None, None, torch.Tensor]:
    num_kv_heads, head_dim = k_plane.shape[2:]
    num_rows = segment.last - segment.first
    # Key heads act as the batch and the queries that share one as its heads, so that nothing is repeated in memory.
    queries = q[segment.first : segment.last].view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    acc: torch.Tensor | None = None
    total = torch.empty(0)
    for tile in segment.history:
        out, lse = _attend(queries, _keys(k_plane, tile, queries), _keys(v_plane, tile, queries), scale)
        acc, total = (out.float(), lse) if acc is None else _merge(acc, total, out, lse)
        yield
    k = _keys(k_plane, segment.diagonal, queries)
    v = _keys(v_plane, segment.diagonal, queries)
    out, lse = _attend(queries, k, v, scale, causal=segment.mask is None, mask=segment.mask)
    if acc is not None:
        acc, _ = _merge(acc, total, out, lse)
        out = acc.to(q.dtype)
    return out.permute(2, 0, 1, 3).reshape(num_rows, -1, head_dim)


def _keys(plane: torch.Tensor, tile: Tile, queries: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, heads that share one, num_keys, head_dim]; only rows that were written are in it."""
    rows = plane.index_select(0, tile.blocks).flatten(0, 1)[: tile.num_keys]
    return rows.transpose(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1)


def _merge(
    acc: torch.Tensor, total: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a later tile to what earlier ones gave; acc is float32 and reused."""
    both = torch.logaddexp(total, lse)
    acc.mul_((total - both).exp_().unsqueeze(-1))
    acc.addcmul_(out.float(), (lse - both).exp_().unsqueeze(-1))
    return acc, both


def _attend_narrow(
    q: torch.Tensor, k_plane: torch.Tensor, v_plane: torch.Tensor, narrow: NarrowRows, scale: float
) -> Generator[None, None, torch.Tensor]:
    queries = q.view(q.shape[0], k_plane.shape[2], -1, q.shape[2])
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for part in narrow.parts:
        if outs:
            yield
        k, v = _copied(k_plane, part), _copied(v_plane, part)
        if part.absent is not None:
            # A row that was never written may be NaN, which no mask on scores and no weight of zero takes away.
            k.masked_fill_(part.absent, 0)
            v.masked_fill_(part.absent, 0)
        own = queries if part.rows is None else queries.index_select(0, part.rows)
        out, lse = _attend(own, k, v, scale, mask=part.mask)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs) if len(outs) > 1 else outs[0]  # [num_splits, num_kv_heads, group, head_dim]
    if narrow.order is not None:
        weights = (torch.cat(lses) if len(lses) > 1 else lses[0])[narrow.order]
        if narrow.missing is not None:
            weights = weights.masked_fill(narrow.missing[:, :, None, None], -math.inf)
        out = (out[narrow.order] * torch.softmax(weights, 1).unsqueeze(-1)).sum(1).to(q.dtype)
    return out.reshape(-1, q.shape[1], q.shape[2])


def _copied(plane: torch.Tensor, part: Splits) -> torch.Tensor:
    """The keys or values of some splits, a new tensor, seen as [num_splits, num_kv_heads, num_keys, head_dim].

    In words, since torch shares what has more than 32,768 elements among its threads: a short history is copied sooner
    than they meet, and on a busy machine waiting for them at 60 copies a step took a fifth of it. What is no tensor
    (the planes of a sequence that is larger than the device) copies in its own way.
    """
    num_kv_heads, head_dim = plane.shape[2:]
    if isinstance(plane, torch.Tensor) and head_dim * plane.itemsize % WORD.itemsize == 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        rows = plane.view(WORD).index_select(0, part.blocks).view(plane.dtype)
    else:
        rows = plane.index_select(0, part.blocks)
    shape = (part.num_splits, num_kv_heads, part.num_keys, head_dim)
    row = num_kv_heads * head_dim
    return rows.as_strided(shape, (rows.numel() // part.num_splits, head_dim, row, 1))


def _attend(
    q: torch.Tensor,  # [batch, heads, queries, head_dim]
    k: torch.Tensor,  # [batch, heads, keys, head_dim]
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over these keys alone: output as q, and the scores' float32 log-sum-exp [batch, heads, queries]."""
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return attend_plainly(q, k, v, scale, causal=causal, mask=mask)


def attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile or batch of splits on a device that has no faster form; arguments and results as `_attend`."""
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * scale
    if causal:
        ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(ahead, -math.inf)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, -1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp_(), v.float()).to(q.dtype), lse


def _segment(
    table: torch.Tensor, rows: tuple[int, int], start: int, sizes: tuple[int, int], dtype: torch.dtype
) -> Segment:
    block_size, tile = sizes
    first, last = rows
    begin = start - start % tile
    num_keys = start + last - first - begin
    per_tile = tile // block_size
    history = tuple(Tile(table[j * per_tile : (j + 1) * per_tile], tile) for j in range(begin // tile))
    blocks = table[begin // block_size : -(-(begin + num_keys) // block_size)]
    mask = None
    if start > begin:
        mask = torch.full((last - first, num_keys), -math.inf, dtype=dtype, device=table.device)
        mask.triu_(start - begin + 1)
    return Segment(first, last, history, Tile(blocks, num_keys), mask)


def _plan_narrow(
    tables: torch.Tensor, narrow: list[tuple[int, int, int]], sizes: tuple[int, int, int], dtype: torch.dtype
) -> NarrowRows:
    block_size, tile, num_rows = sizes  # num_rows of the whole batch
    per_split = _split_blocks(block_size, tile)
    split = per_split * block_size
    device = tables.device
    width = -(-max(keys for _, _, keys in narrow) // split)
    # Whole splits of all rows first, then each row's last one, so that what needs a mask lies together.
    whole = [(s, row, j) for s, row, keys in narrow for j in range((keys - 1) // split)]
    splits = whole + [(s, row, (keys - 1) // split) for s, row, keys in narrow]
    # Short decode rows, one of each sequence, are the commonest: their blocks are the tables' own beginnings.
    is_plain = not whole and [s for s, _, _ in narrow] == list(range(tables.shape[0]))
    seqs, split_rows, indices = torch.tensor(splits, device=device).unbind(1)
    held = [(keys - 1) % split + 1 for _, _, keys in narrow]
    most, least = max(held), min(held)  # of all rows, so that a gather's bound changes no shape
    step = max(1, MAX_GATHER_TOKENS // split)
    parts: list[Splits] = []
    for i in range(0, len(whole), step):
        at = slice(i, min(i + step, len(whole)))
        columns = indices[at, None] * per_split + torch.arange(per_split, device=device)
        blocks = tables[seqs[at, None], columns].flatten()
        parts.append(Splits(blocks, split_rows[at], at.stop - at.start, split, None, None))
    for i in range(0, len(narrow), step):
        own = held[i : i + step]
        at = slice(len(whole) + i, len(whole) + i + len(own))
        if is_plain:
            blocks = tables[i : i + len(own), : -(-most // block_size)].flatten()
        else:
            # A row's last split may reach past its table; its absent keys come from any block.
            columns = indices[at, None] * per_split + torch.arange(-(-most // block_size), device=device)
            blocks = tables[seqs[at, None], columns.clamp_max_(tables.shape[1] - 1)].flatten()
        absent = mask = None
        if least < most:
            missing_keys = torch.arange(most, device=device) >= torch.tensor(own, device=device)[:, None]
            mask = torch.zeros(missing_keys.shape, dtype=dtype, device=device).masked_fill_(missing_keys, -math.inf)
            absent, mask = missing_keys[:, None, :, None], mask[:, None, None, :]
        all_rows = len(own) == num_rows
        parts.append(Splits(blocks, None if all_rows else split_rows[at], len(own), most, absent, mask))
    rows = split_rows[len(whole) :]
    if width == 1:
        return NarrowRows(rows, tuple(parts), None, None)
    order: list[list[int]] = []
    counts: list[int] = []
    used = 0
    for i, (_, _, keys) in enumerate(narrow):
        before = (keys - 1) // split
        order.append([*range(used, used + before), len(whole) + i] + [0] * (width - before - 1))
        counts.append(before + 1)
        used += before
    missing = torch.arange(width, device=device) >= torch.tensor(counts, device=device)[:, None]
    return NarrowRows(rows, tuple(parts), torch.tensor(order, device=device), missing if min(counts) < width else None)


def _split_blocks(block_size: int, tile: int) -> int:
    """Blocks of one decode split: about SPLIT_TOKENS, a divisor of the tile."""
    blocks = max(1, min(tile, SPLIT_TOKENS) // block_size)
    while tile // block_size % blocks:
        blocks -= 1
    return blocks
