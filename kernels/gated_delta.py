"""Gated delta net: the delta rule with one decay a value head (Gated Delta Networks, Yang et al. 2024, section 3.2).

kernels/delta_rule.py has the recurrence, which is this operation's reference, and its one-row step. Here are the
gates, and the chunk form: within an inner chunk of C rows the deltas solve a unit lower triangular system,

    (I + L) delta = beta (v - e^G k S),   L[i, j] = beta_i e^(G_i - G_j) k_i . k_j  for j < i,   G = sum of g to the row

which is solved for all inner chunks and heads at once, before the scan carries S from one to the next.
"""

import torch

from kernels.delta_rule import (
    INNER,
    ChunkTerms,
    DeltaResult,
    DeltaRows,
    check_rows,
    cumulated,
    pairwise_decay,
    scan,
    solve_unit_lower,
    to_inner_chunks,
    unit,
)


def gated_delta_decay(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """log decay = -exp(A_log) softplus(a + dt_bias), fp32. `a` is [rows, Hv], the rest [Hv]; returns [rows, Hv, 1]."""
    return (-a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()))[..., None]


def gated_delta_chunk(rows: DeltaRows, state: torch.Tensor) -> DeltaResult:
    """Rows of one sequence, any number of them, from `state` [Hv, dk, dv] fp32; returns the state after the last."""
    check_rows(rows, state)
    assert state.dim() == 3
    assert state.dtype == torch.float32
    assert rows.log_decay.shape[2] == 1, "a decay per channel belongs to kernels/kda.py"
    if rows.num_rows == 0:
        return DeltaResult(state.new_empty((0, *rows.v.shape[1:])), state.clone())
    return scan(_terms(rows), state, rows.num_rows)


def _terms(rows: DeltaRows) -> ChunkTerms:
    """Group and repeat are dimensions of their own ([Hk, R, n, C, ...]): q . k and k . k are formed once a key head."""
    k_heads, repeats = rows.q.shape[1], rows.repeats
    v_heads, dk, dv = rows.state_shape
    q = unit(to_inner_chunks(rows.q.float())).mul_(dk**-0.5)[:, None]  # [Hk, 1, n, C, dk]
    k = unit(to_inner_chunks(rows.k.float()))[:, None]
    v = to_inner_chunks(rows.v.float()).unflatten(0, (k_heads, repeats))  # [Hk, R, n, C, dv]
    beta = to_inner_chunks(rows.beta.float()[..., None]).unflatten(0, (k_heads, repeats))  # [Hk, R, n, C, 1]
    total = cumulated(to_inner_chunks(rows.log_decay)).unflatten(0, (k_heads, repeats))  # [Hk, R, n, C, 1]
    num_chunks = v.shape[2]

    between = pairwise_decay(total)  # [Hk, R, n, C, C]
    since_start = total.float().exp_()
    until_end = (total[..., -1:, :] - total).float().exp_()

    keys = k.transpose(-1, -2)
    within = (q @ keys) * between
    lower = between.mul_(k @ keys).mul_(beta)
    rhs = v.new_empty((k_heads, repeats, num_chunks, INNER, dv + dk))
    torch.mul(v, beta, out=rhs[..., :dv])
    torch.mul(k, beta * since_start, out=rhs[..., dv:])
    solved = solve_unit_lower(lower, rhs).flatten(0, 1)  # [Hv, n, C, dv + dk]
    read = v.new_empty((k_heads, repeats, num_chunks, 2 * INNER, dk))
    read[..., :INNER, :] = solved[..., dv:].view(k_heads, repeats, num_chunks, INNER, dk)
    torch.mul(q, since_start, out=read[..., INNER:, :])
    return ChunkTerms(
        read=read.flatten(0, 1),
        write=(k * until_end).flatten(0, 1).transpose(-1, -2),
        values=solved[..., :dv],
        within=within.flatten(0, 1),
        decay=since_start[..., -1:, :].reshape(v_heads, num_chunks, 1, 1),
    )
