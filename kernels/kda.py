"""Kimi delta attention: the delta rule with a decay for every key channel (Kimi Linear, 2025, section 3).

kernels/delta_rule.py has the recurrence, which is this operation's reference, and its one-row step. Here are the
gates, and the chunk form. Its terms within an inner chunk are sums over channels of k_i k_j e^(G_i - G_j), which
neither factor into a matrix product of e^G_i and e^-G_j (the second overflows) nor may be formed for all pairs ([C,
C, dk] a head). They are formed by halves instead: a pair i > j is met in exactly one block of 2, 4, ... C rows in
which j lies in the first half and i in the second, and with G at the first half's last row as the origin both
exponents are at most 0.
"""

import torch

from kernels.delta_rule import (
    INNER,
    ChunkTerms,
    DeltaResult,
    DeltaRows,
    check_rows,
    cumulated,
    scan,
    solve_unit_lower,
    to_inner_chunks,
    unit,
)

SMALL_HALF = 4  # halves up to this length are multiplied element by element; a matrix product of them is all overhead
GROUP = 8  # inner chunks whose terms are formed at once: bounds the scratch to a few times one group's rows


def kda_decay(f: torch.Tensor, a_log: torch.Tensor) -> torch.Tensor:
    """Kimi's log decay = -exp(A_log) softplus(f), fp32. `f` is [rows, H, dk] with its bias added, `a_log` [H]."""
    return -a_log.float().exp()[:, None] * torch.nn.functional.softplus(f.float())


def kda_bounded_decay(f: torch.Tensor, a_log: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """GLM's log decay = lower_bound sigmoid(exp(A_log) f), fp32, with lower_bound < 0. Shapes as in `kda_decay`."""
    assert lower_bound < 0
    return lower_bound * torch.sigmoid(a_log.float().exp()[:, None] * f.float())


def kda_chunk(rows: DeltaRows, state: torch.Tensor) -> DeltaResult:
    """Rows of one sequence, any number of them, from `state` [H, dk, dv] fp32; returns the state after the last."""
    check_rows(rows, state)
    assert state.dim() == 3
    assert state.dtype == torch.float32
    assert rows.log_decay.shape[2] == rows.q.shape[2], "a decay per head belongs to kernels/gated_delta.py"
    assert rows.repeats == 1, "KDA has as many key heads as value heads"
    outs: list[torch.Tensor] = []
    for first in range(0, rows.num_rows, GROUP * INNER):
        part = slice(first, min(first + GROUP * INNER, rows.num_rows))
        group = DeltaRows(rows.q[part], rows.k[part], rows.v[part], rows.log_decay[part], rows.beta[part])
        result = scan(_terms(group), state, group.num_rows)
        outs.append(result.out)
        state = result.state
    if not outs:
        return DeltaResult(state.new_empty((0, *rows.v.shape[1:])), state.clone())
    return DeltaResult(torch.cat(outs) if len(outs) > 1 else outs[0], state)


def _terms(rows: DeltaRows) -> ChunkTerms:
    dk, dv = rows.q.shape[2], rows.v.shape[2]
    q = unit(to_inner_chunks(rows.q.float())).mul_(dk**-0.5)  # [H, n, C, dk]
    k = unit(to_inner_chunks(rows.k.float()))
    v = to_inner_chunks(rows.v.float())
    beta = to_inner_chunks(rows.beta.float()[..., None])  # [H, n, C, 1]
    total = cumulated(to_inner_chunks(rows.log_decay))  # [H, n, C, dk]

    products = _decayed_products(q, k, total)
    since_start = total.float().exp_()
    until_end = (total[:, :, -1:] - total).float().exp_()
    rhs = torch.cat((v * beta, k * beta * since_start), dim=-1)
    solved = solve_unit_lower(products[1] * beta, rhs)
    return ChunkTerms(
        read=torch.cat((solved[..., dv:], q * since_start), dim=2),
        write=(k * until_end).transpose(-1, -2),
        values=solved[..., :dv],
        within=products[0],
        decay=since_start[:, :, -1, :, None],
    )


def _decayed_products(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """[2, H, n, C, C]: sum over channels of q_i k_j e^(G_i - G_j) for j <= i, and of k_i k_j ... for j < i; else 0."""
    heads, num_chunks, _, dk = q.shape
    products = q.new_zeros((2, heads, num_chunks, INNER, INNER))
    products[0].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    qk = torch.stack((q, k))
    half = 1
    while half < INNER:
        blocks = (INNER // (2 * half), 2, half, dk)
        total_halves = total.unflatten(2, blocks[:3])  # [H, n, blocks, 2, half, dk]
        origin = total_halves[:, :, :, 0, -1:]
        late = qk.unflatten(3, blocks[:3])[:, :, :, :, 1] * (total_halves[:, :, :, 1] - origin).float().exp_()
        early = k.unflatten(2, blocks[:3])[:, :, :, 0] * (origin - total_halves[:, :, :, 0]).float().exp_()
        if half <= SMALL_HALF:
            pairs = (late[..., :, None, :] * early[..., None, :, :]).sum(-1)  # [2, H, n, blocks, half, half]
        else:
            pairs = late @ early.transpose(-1, -2)
        _block(products, half).copy_(pairs)
        half *= 2
    return products


def _block(products: torch.Tensor, half: int) -> torch.Tensor:
    """The view [2, H, n, blocks, half, half] of the places (second half, first half) of every block on the diagonal."""
    num_blocks = INNER // (2 * half)
    lead = products.shape[:3]
    row, column = products.stride(3), products.stride(4)
    return products.as_strided(
        (*lead, num_blocks, half, half),
        (*products.stride()[:3], 2 * half * (row + column), row, column),
        products.storage_offset() + half * row,
    )
