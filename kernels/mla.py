"""Multi-head latent attention in absorbed form: every head reads the one paged latent, no key or value is expanded.

A row of the plane is [latent | rotated rope part]. W_UK is folded into the query and W_UV applied after attention, so
that attention is that of one key head shared by all query heads, with keys of the whole row and values of its latent
part (arXiv 2405.04434, section 2.1). One call serves a prefill chunk over its paged history, a decode row and k verify
rows.
"""

import torch

from kernels.key_tiles import Span, attend_tiles, gather_rows


def absorb_query(nope: torch.Tensor, rope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Queries against latent rows: [N, H, C + R] from nope [N, H, Dn], rope [N, H, R] and w_uk [H, Dn, C]."""
    assert nope.shape[1:] == w_uk.shape[:2]
    assert rope.shape[:2] == nope.shape[:2]
    return torch.cat((torch.einsum("nhd,hdc->nhc", nope, w_uk), rope), dim=-1)


def expand_values(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Head outputs [N, H, Dv] from attended latents [N, H, C] and w_uv [H, Dv, C]."""
    assert latent.shape[1] == w_uv.shape[0]
    assert latent.shape[2] == w_uv.shape[2]
    return torch.einsum("nhc,hdc->nhd", latent, w_uv)


def mla_reference(
    nope: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor, scale: float
) -> torch.Tensor:
    """The plain mathematics: keys and values expanded from rows [T, C + R]; the queries are the last N positions."""
    latent, key_rope = rows[:, : w_uk.shape[2]], rows[:, w_uk.shape[2] :]
    keys = torch.einsum("tc,hdc->thd", latent, w_uk)
    values = torch.einsum("tc,hdc->thd", latent, w_uv)
    scores = torch.einsum("nhd,thd->nht", nope, keys) + torch.einsum("nhr,tr->nht", rope, key_rope)
    num_rows, num_keys = nope.shape[0], rows.shape[0]
    future = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 1)
    shares = (scores * scale).masked_fill(future[:, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("nht,thd->nhd", shares, values)


def mla_attention(
    queries: torch.Tensor, plane: torch.Tensor, span: Span, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """Attention of one sequence's consecutive rows over its paged latents, theirs included.

    Args:
        queries: [N, H, C + R] from `absorb_query`, at positions [start, start + N).
        plane: [num_blocks, block_size, C + R], with rows [0, start + N) of the sequence written.
        span: where the queries stand.
        latent_dim: C.
        scale: factor of the scores.

    Returns:
        [N, H, C] in the dtype of `queries`, for `expand_values`.
    """
    assert queries.ndim == 3
    assert plane.ndim == 3
    assert queries.shape[2] == plane.shape[2]
    assert 0 < latent_dim <= plane.shape[2]
    assert span.table.dtype == torch.int64

    def read(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = gather_rows(plane, span.table, first, last)[:, None, :]
        return rows, rows[..., :latent_dim]

    out = attend_tiles(queries[:, None], read, None, span, scale)
    return out[:, 0].to(queries.dtype)
