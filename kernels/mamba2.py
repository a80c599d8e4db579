"""Mamba2: a state space with one scalar decay a head (Transformers are SSMs, Dao and Gu 2024, section 6).

Per head, with B and C shared by the heads of a group:

    dt = max(softplus(dt + dt_bias), time_step_min);  S <- exp(dt A) S + B (dt x)^T;  y = S^T C + D x

S is [N, P], fp32.

The clamp holds in prefill and decode alike, so that a cached sequence equals an uncached one. The recurrence is
linear in S, so the chunk form computes what every inner chunk adds to the state at once, and carries the state by a
product and a sum.
"""

from dataclasses import dataclass

import torch

from kernels.delta_rule import INNER, cumulated, pairwise_decay, to_inner_chunks


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """A mixer's per-head parameters, each [H] fp32."""

    a: torch.Tensor  # -exp(A_log)
    d: torch.Tensor
    dt_bias: torch.Tensor
    time_step_min: float


@dataclass(frozen=True, slots=True)
class Mamba2Rows:
    """Rows of one sequence (chunk) or one row of each of several (step), as the convolution left them.

    Group g serves heads [g R, (g + 1) R).
    """

    x: torch.Tensor  # [rows, H, P]
    dt: torch.Tensor  # [rows, H], before bias and softplus
    b: torch.Tensor  # [rows, G, N]
    c: torch.Tensor  # [rows, G, N]

    @property
    def num_rows(self) -> int:
        return self.x.shape[0]

    @property
    def repeats(self) -> int:
        """Heads that share a group."""
        return self.x.shape[1] // self.b.shape[1]


@dataclass(frozen=True, slots=True)
class Mamba2Result:
    """The outputs and the state after the rows."""

    out: torch.Tensor  # [rows, H, P] fp32
    state: torch.Tensor  # after the last row [H, N, P], or after every row [rows, H, N, P], as the operation says


def mamba2_reference(rows: Mamba2Rows, weights: Mamba2Weights, state: torch.Tensor) -> Mamba2Result:
    """The recurrence as written above, in the state's dtype; returns the state after every row."""
    _check(rows, weights, state)
    x, b, c = (t.to(state.dtype) for t in (rows.x, rows.b, rows.c))
    b, c = b.repeat_interleave(rows.repeats, 1), c.repeat_interleave(rows.repeats, 1)
    dt = torch.nn.functional.softplus(rows.dt.to(state.dtype) + weights.dt_bias).clamp(min=weights.time_step_min)
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for t in range(rows.num_rows):
        state = state * (dt[t] * weights.a).exp()[:, None, None] + torch.einsum("hn,h,hp->hnp", b[t], dt[t], x[t])
        outs.append(torch.einsum("hnp,hn->hp", state, c[t]) + weights.d[:, None] * x[t])
        states.append(state)
    if not outs:
        return Mamba2Result(x.new_empty(x.shape), state.new_empty((0, *state.shape)))
    return Mamba2Result(torch.stack(outs), torch.stack(states))


def mamba2_step(rows: Mamba2Rows, weights: Mamba2Weights, states: torch.Tensor) -> Mamba2Result:
    """One row of each of several sequences. `states` is [rows, H, N, P]; returns the state after every row."""
    _check(rows, weights, states)
    assert states.shape[0] == rows.num_rows
    assert states.dtype == torch.float32
    x, b, c = rows.x.float(), rows.b.float(), rows.c.float()
    if rows.repeats > 1:
        b, c = b.repeat_interleave(rows.repeats, 1), c.repeat_interleave(rows.repeats, 1)
    dt = _time_step(rows.dt, weights)[..., None]  # [rows, H, 1]
    states = states * (dt * weights.a[:, None]).exp()[..., None]
    states = torch.addcmul(states, b[..., None], (x * dt)[..., None, :])
    read = (c[..., None, :] @ states)[..., 0, :]
    return Mamba2Result(torch.addcmul(read, x, weights.d[:, None]), states)


def mamba2_verify(rows: Mamba2Rows, weights: Mamba2Weights, state: torch.Tensor) -> Mamba2Result:
    """Consecutive rows of one sequence through `mamba2_step`, so that any of them can be the last one kept.

    `state` is [H, N, P]; returns the state after every row. The bytes are those of as many one-row decodes.
    """
    steps: list[Mamba2Result] = []
    for t in range(rows.num_rows):
        row = Mamba2Rows(*(part[t : t + 1] for part in (rows.x, rows.dt, rows.b, rows.c)))
        steps.append(mamba2_step(row, weights, steps[-1].state if steps else state[None]))
    return Mamba2Result(torch.cat([s.out for s in steps]), torch.cat([s.state for s in steps]))


def mamba2_chunk(rows: Mamba2Rows, weights: Mamba2Weights, state: torch.Tensor) -> Mamba2Result:
    """Rows of one sequence, any number of them, from `state` [H, N, P] fp32; returns the state after the last."""
    _check(rows, weights, state)
    assert state.dim() == 3
    assert state.dtype == torch.float32
    num_rows, heads, p = rows.x.shape
    if num_rows == 0:
        return Mamba2Result(state.new_empty((0, heads, p)), state.clone())
    groups, repeats = rows.b.shape[1], rows.repeats
    step = _time_step(rows.dt, weights)  # [rows, H]
    # Rows that fill up the last inner chunk get dt = 0 here, after the clamp: decay 1 and nothing added.
    total = cumulated(to_inner_chunks((step * weights.a)[..., None])).unflatten(0, (groups, repeats))  # [G, R, n, C, 1]
    x = to_inner_chunks(rows.x.float() * step[..., None]).unflatten(0, (groups, repeats))  # [G, R, n, C, P]: dt x
    b = to_inner_chunks(rows.b.float())[:, None]  # [G, 1, n, C, N]
    c = to_inner_chunks(rows.c.float())[:, None]
    num_chunks = x.shape[2]

    out = pairwise_decay(total).mul_(c @ b.mT) @ x  # [G, R, n, C, P]

    until_end = (total[..., -1:, :] - total).float().exp_()
    added = b.mT @ (x * until_end)  # [G, R, n, N, P]
    chunk_decay = total[..., -1:, :].float().exp_()  # [G, R, n, 1, 1]
    before = torch.empty_like(added)  # the state before each inner chunk
    carried = state.view(groups, repeats, *state.shape[1:])
    for n in range(num_chunks):
        before[:, :, n] = carried
        carried = torch.addcmul(added[:, :, n], carried, chunk_decay[:, :, n])
    out.addcmul_(c @ before, total.float().exp_())
    rows_first = out.view(heads, num_chunks * INNER, p).transpose(0, 1)[:num_rows]
    return Mamba2Result(torch.addcmul(rows_first, rows.x.float(), weights.d[:, None]), carried.reshape(state.shape))


def _time_step(dt: torch.Tensor, weights: Mamba2Weights) -> torch.Tensor:
    return torch.nn.functional.softplus(dt.float() + weights.dt_bias).clamp(min=weights.time_step_min)


def _check(rows: Mamba2Rows, weights: Mamba2Weights, state: torch.Tensor) -> None:
    num_rows, heads, p = rows.x.shape
    groups, n = rows.b.shape[1:]
    assert rows.dt.shape == (num_rows, heads)
    assert rows.b.shape == rows.c.shape == (num_rows, groups, n)
    assert heads % groups == 0, f"{groups} groups do not divide {heads} heads"
    assert weights.a.shape == weights.d.shape == weights.dt_bias.shape == (heads,)
    assert state.shape[-3:] == (heads, n, p), f"state is {tuple(state.shape)}"
    assert state.dtype in (torch.float32, torch.float64)
    assert weights.a.dtype == weights.d.dtype == weights.dt_bias.dtype == state.dtype
