"""Indexers of sparse attention: score every visible key cheaply, keep the best, always the same ones.

A key covers `pool` tokens: 1 where tokens are selected, more where pools or blocks are. A query at position
p sees the (p + 1) // pool keys whose last token it sees; the tokens after them are its tail, attended always. A key is
written once its pool is complete; raw rows of an unfinished pool wait in a slot.

Ties go to the lowest index: relu makes many scores exactly 0, and no two top-k routines break such ties alike.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.key_tiles import QUERY_TILE, Span, gather_rows


@dataclass(frozen=True, slots=True)
class Selection:
    """Keys that each query of a chunk attends to, beside the tail of its unfinished pool."""

    picks: torch.Tensor  # [N, width] int64: key indices, ascending, then -1
    pool: int  # tokens a key covers


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Raw rows sorted into pools by `fill_pools`."""

    complete: torch.Tensor  # [P, pool, D]: pools that these rows completed
    first: int  # index of the first of them
    unfinished: torch.Tensor  # [pool - 1, D]: rows of the open pool, then zeros


def index_scores_reference(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """score(n, t) = sum_h w_nh relu(q_nh . k_t d^-1/2): [N, T] from [N, H, D], [N, H] and [T, D]."""
    dots = torch.einsum("nhd,td->nht", queries, keys) * queries.shape[-1] ** -0.5
    return torch.einsum("nh,nht->nt", weights, dots.relu())


def top_keys_reference(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """The plain rule: of the first visible[n] keys of row n the `count` best, on ties the lower index; [N, count]."""
    picks = torch.full((scores.shape[0], count), -1, dtype=torch.int64)
    for n, num_keys in enumerate(visible.tolist()):
        order = sorted(range(num_keys), key=lambda t: (-float(scores[n, t]), t))
        best = sorted(order[:count])
        picks[n, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return picks


def top_keys(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """As `top_keys_reference`, by a threshold: everything above the last kept score, then equals from the left.

    Args:
        scores: [N, T] fp32.
        visible: [N] int64, how many keys each row sees.
        count: the most that a row keeps; may exceed T.

    Returns:
        [N, count] int64, ascending, then -1.
    """
    assert scores.ndim == 2
    assert visible.shape == (scores.shape[0],)
    assert count > 0
    num_rows, num_keys = scores.shape
    picks = torch.full((num_rows, count), -1, dtype=torch.int64, device=scores.device)
    if num_keys == 0:
        return picks
    seen = torch.arange(num_keys, device=scores.device)[None, :] < visible[:, None]
    chosen = seen
    if num_keys > count:
        masked = scores.masked_fill(~seen, -torch.inf)
        last_kept = masked.topk(count, dim=-1).values[:, -1:]
        above = masked > last_kept
        equal = (masked == last_kept) & seen
        free = count - above.sum(dim=-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(dim=-1) <= free))
    rows, keys = chosen.nonzero(as_tuple=True)
    places = chosen.cumsum(dim=-1)[rows, keys] - 1
    picks[rows, places] = keys
    return picks


def select_keys(
    queries: torch.Tensor,
    weights: torch.Tensor,
    plane: torch.Tensor,
    span: Span,
    *,
    pool: int,
    count: int,
) -> Selection:
    """The keys of one sequence that its consecutive queries at positions [start, start + N) attend to.

    Args:
        queries: [N, H, D], normed and rotated as the family wants.
        weights: [N, H] of the heads, every constant factor but d^-1/2 inside.
        plane: [num_blocks, block_size / pool, D] keys, one a pool, those that the last query sees written.
        span: where the queries stand.
        pool: tokens a key covers.
        count: the most keys that a query keeps.
    """
    assert queries.ndim == 3
    assert weights.shape == queries.shape[:2]
    assert plane.ndim == 3
    assert plane.shape[2] == queries.shape[2]
    assert pool > 0
    parts: list[torch.Tensor] = []
    for row in range(0, queries.shape[0], QUERY_TILE):
        rows = slice(row, min(row + QUERY_TILE, queries.shape[0]))
        end = span.start + rows.stop
        visible = (torch.arange(span.start + rows.start, end, device=queries.device) + 1) // pool
        scores = _score_tiles(queries[rows].float(), weights[rows].float(), plane, span, end // pool)
        parts.append(top_keys(scores, visible, count))
    return Selection(torch.cat(parts), pool)


def _score_tiles(
    queries: torch.Tensor, weights: torch.Tensor, plane: torch.Tensor, span: Span, num_keys: int
) -> torch.Tensor:
    """[N, num_keys] fp32, a tile of keys at absolute multiples at a time."""
    num_rows, num_heads, width = queries.shape
    scores = queries.new_empty((num_rows, num_keys))
    scaled = queries.flatten(0, 1) * width**-0.5
    for first in range(0, num_keys, span.tile):
        last = min(first + span.tile, num_keys)
        keys = gather_rows(plane, span.table, first, last).float()
        dots = functional.relu(scaled @ keys.T).view(num_rows, num_heads, last - first)
        scores[:, first:last] = (weights[:, None, :] @ dots)[:, 0]
    return scores


def fill_pools(unfinished: torch.Tensor, rows: torch.Tensor, *, start: int, pool: int) -> PoolRows:
    """Sorts raw rows at positions [start, start + N) into pools, beginning with what was left open.

    `unfinished` is [pool - 1, D], of which the first start % pool rows count; `rows` is [N, D].
    """
    assert unfinished.shape == (pool - 1, rows.shape[1])
    carried = start % pool
    joined = torch.cat((unfinished[:carried].to(rows.dtype), rows))
    num_complete = joined.shape[0] // pool
    rest = joined[num_complete * pool :]
    left = torch.zeros_like(unfinished)
    left[: rest.shape[0]] = rest
    complete = joined[: num_complete * pool].view(num_complete, pool, rows.shape[1])
    return PoolRows(complete, start // pool, left)


@dataclass(frozen=True, slots=True)
class PoolStep:
    """One row of each of several sequences, taken into its pool."""

    complete: torch.Tensor  # [N, pool, D]: the pool with the row in it, of meaning where it is complete
    is_complete: torch.Tensor  # [N] bool
    unfinished: torch.Tensor  # [N, pool - 1, D]: what is left open, zeros past it


def step_pools(unfinished: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, pool: int) -> PoolStep:
    """`fill_pools` for a row [N, D] of each sequence at positions [N], after `unfinished` [N, pool - 1, D].

    Reads the device alone, so that it can be replayed.
    """
    assert unfinished.shape == (rows.shape[0], pool - 1, rows.shape[1])
    place = positions % pool
    places = torch.arange(pool, device=rows.device)
    padded = torch.cat((unfinished.to(rows.dtype), rows[:, None]), 1)  # the row stands last, where a pool ends
    joined = torch.where((places == place[:, None])[..., None], rows[:, None], padded)
    is_complete = place == pool - 1
    is_open = (places[:-1] <= place[:, None]) & ~is_complete[:, None]
    left = torch.where(is_open[..., None], joined[:, :-1], 0).to(unfinished.dtype)
    return PoolStep(joined, is_complete, left)


def gated_pool_keys(keys: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """Gated pools: one key each, sum over its tokens of softmax(gate + ape) k, per channel.

    `keys` and `gates` are [P, pool, D], `ape` [pool, D]; the softmax is fp32. Gives [P, D] in the dtype of `keys`.
    """
    assert keys.shape == gates.shape
    assert ape.shape == keys.shape[1:]
    shares = (gates.float() + ape.float()).softmax(dim=1).to(keys.dtype)
    return (shares * keys).sum(dim=1)


def mean_pool_keys(keys: torch.Tensor) -> torch.Tensor:
    """Mean pools: the mean of a block's raw keys in fp32, [P, pool, D] to [P, D]; norm and RoPE follow in the layer."""
    return keys.float().mean(dim=1).to(keys.dtype)
