"""What the gated delta rule is, whatever shape its decay has: the recurrence itself, one row at a time and in chunks.

Per head, with q and k normalised to length 1 and q scaled by dk^-1/2 (Gated Delta Networks, Yang et al. 2024, eq. 10;
Kimi Linear, section 3, for a decay of its own per key channel):

    S <- exp(g) S;  delta = beta (v - S^T k);  S <- S + k delta^T;  o = S^T q        S is [dk, dv], fp32

kernels/gated_delta.py (one decay a head) and kernels/kda.py (one a channel) differ only in how the terms within an
inner chunk are formed; the step of decode rows and the scan over inner chunks are here, shared. An inner chunk is
always `INNER` rows, padded with rows that change nothing, so that equal rows and an equal state always run through
equal shapes.
"""

from dataclasses import dataclass

import torch

INNER = 64  # rows of an inner chunk; a constant, since the bytes of a result depend on it
UNIT_EPS = 1e-6  # added to the squared length of q and k before the root
MIN_LOG_DECAY = -1e4  # exp of it is 0 in every format, and sums of it stay finite


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of one sequence (chunk) or one row of each of several (step).

    Key head h serves value heads [h R, (h + 1) R).
    q and k come as the convolution left them; normalising and scaling them is part of the operation.
    """

    q: torch.Tensor  # [rows, Hk, dk]
    k: torch.Tensor  # [rows, Hk, dk]
    v: torch.Tensor  # [rows, Hv, dv]
    log_decay: torch.Tensor  # [rows, Hv, 1] or [rows, Hv, dk] fp32, at most 0
    beta: torch.Tensor  # [rows, Hv]

    @property
    def num_rows(self) -> int:
        return self.q.shape[0]

    @property
    def repeats(self) -> int:
        """Value heads that share a key head."""
        return self.v.shape[1] // self.q.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(Hv, dk, dv)."""
        return self.v.shape[1], self.q.shape[2], self.v.shape[2]


@dataclass(frozen=True, slots=True)
class DeltaResult:
    """The outputs and the state after the rows."""

    out: torch.Tensor  # [rows, Hv, dv] fp32
    state: torch.Tensor  # after the last row [Hv, dk, dv], or after every row [rows, Hv, dk, dv], as the operation says


@dataclass(frozen=True, slots=True)
class ChunkTerms:
    """What the scan needs of every inner chunk; n counts inner chunks, C = INNER. All fp32."""

    read: torch.Tensor  # [Hv, n, 2 C, dk]: what reads the state before the chunk, delta's rows first, then the outputs'
    write: torch.Tensor  # [Hv, n, dk, C]: keys, decayed to the chunk's end
    values: torch.Tensor  # [Hv, n, C, dv]: delta, as if the state before the chunk were 0
    within: torch.Tensor  # [Hv, n, C, C]: from the chunk's deltas to its outputs, lower triangular
    decay: torch.Tensor  # [Hv, n, dk or 1, 1]: of the state over the chunk


def check_rows(rows: DeltaRows, state: torch.Tensor) -> None:
    """Asserts the shapes and dtypes of an operation's arguments; `state` may have a leading dimension."""
    num_rows, k_heads, dk = rows.q.shape
    v_heads, dv = rows.v.shape[1:]
    assert rows.k.shape == rows.q.shape, f"k is {tuple(rows.k.shape)}, q {tuple(rows.q.shape)}"
    assert rows.v.shape[0] == num_rows
    assert v_heads % k_heads == 0, f"{k_heads} key heads do not divide {v_heads} value heads"
    assert rows.log_decay.shape in ((num_rows, v_heads, 1), (num_rows, v_heads, dk))
    assert rows.beta.shape == (num_rows, v_heads)
    assert state.shape[-3:] == (v_heads, dk, dv), f"state is {tuple(state.shape)}"
    assert rows.log_decay.dtype == state.dtype
    assert state.dtype in (torch.float32, torch.float64)


def delta_reference(rows: DeltaRows, state: torch.Tensor) -> DeltaResult:
    """The recurrence as written above, in the state's dtype; returns the state after every row."""
    check_rows(rows, state)
    q = unit(rows.q.to(state.dtype)).repeat_interleave(rows.repeats, 1) * rows.q.shape[2] ** -0.5
    k = unit(rows.k.to(state.dtype)).repeat_interleave(rows.repeats, 1)
    v, beta = rows.v.to(state.dtype), rows.beta.to(state.dtype)
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for t in range(rows.num_rows):
        state = state * rows.log_decay[t].exp()[:, :, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], delta)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    if not outs:
        return DeltaResult(v.new_empty(v.shape), state.new_empty((0, *state.shape)))
    return DeltaResult(torch.stack(outs), torch.stack(states))


def delta_step(rows: DeltaRows, states: torch.Tensor) -> DeltaResult:
    """One row of each of several sequences. `states` is [rows, Hv, dk, dv]; returns the state after every row."""
    check_rows(rows, states)
    assert states.shape[0] == rows.num_rows
    assert states.dtype == torch.float32
    qk = unit(torch.stack((rows.k, rows.q), dim=2).float())  # [rows, Hk, 2, dk]
    qk[:, :, 1].mul_(rows.q.shape[2] ** -0.5)
    if rows.repeats > 1:
        qk = qk.repeat_interleave(rows.repeats, 1)
    states = states * rows.log_decay.clamp(min=MIN_LOG_DECAY).exp()[..., None]
    read = qk @ states  # [rows, Hv, 2, dv]: both read the state before delta is written
    delta = (rows.v.float() - read[:, :, 0]) * rows.beta.float()[..., None]
    k, q = qk[:, :, 0], qk[:, :, 1]
    out = torch.addcmul(read[:, :, 1], (k * q).sum(-1, keepdim=True), delta)
    return DeltaResult(out, torch.addcmul(states, k[..., None], delta[..., None, :]))


def delta_verify(rows: DeltaRows, state: torch.Tensor) -> DeltaResult:
    """Consecutive rows of one sequence through `delta_step`, so that any of them can be the last one kept.

    `state` is [Hv, dk, dv]; returns the state after every row. The bytes are those of as many one-row decodes.
    """
    steps: list[DeltaResult] = []
    for t in range(rows.num_rows):
        row = DeltaRows(*(x[t : t + 1] for x in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta)))
        steps.append(delta_step(row, (steps[-1].state if steps else state[None])))
    return DeltaResult(torch.cat([s.out for s in steps]), torch.cat([s.state for s in steps]))


def unit(x: torch.Tensor) -> torch.Tensor:
    """x over its length in the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def to_inner_chunks(x: torch.Tensor) -> torch.Tensor:
    """[rows, H, d] to [H, n, INNER, d], contiguous, the last chunk filled up with zeros."""
    num_rows, heads, d = x.shape
    num_chunks = -(-num_rows // INNER)
    if num_rows % INNER:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, num_chunks * INNER - num_rows))
    return x.view(num_chunks, INNER, heads, d).permute(2, 0, 1, 3).contiguous()


def cumulated(log_decay: torch.Tensor) -> torch.Tensor:
    """Sums of log decays over each inner chunk [H, n, C, d], each row's own included, in fp64.

    Differences of these are what gets exponentiated; in fp32 one row of strong decay would blur all rows after it.
    """
    return log_decay.clamp(min=MIN_LOG_DECAY).double().cumsum(2)


def solve_unit_lower(lower: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """(I + strict lower triangle of `lower`)^-1 rhs by forward substitution: powers of `lower` overflow and cancel.

    Solved in transposed form, since the solver works columns first: contiguous in, contiguous out, nothing copied.
    """
    return torch.linalg.solve_triangular(lower.mT, rhs.mT, upper=True, left=False, unitriangular=True).mT


def pairwise_decay(total: torch.Tensor) -> torch.Tensor:
    """e^(G_i - G_j) for j <= i, else 0, fp32 [..., C, C], from `cumulated` sums [..., C, 1]."""
    return (total - total.mT).float().exp_().tril_()  # above the diagonal exp may overflow; tril_ writes zeros there


def scan(terms: ChunkTerms, state: torch.Tensor, num_rows: int) -> DeltaResult:
    """Carries the state over the inner chunks; only this is sequential. Returns the state after the last row."""
    heads, num_chunks, _, dv = terms.values.shape
    deltas = terms.values.new_empty(terms.values.shape)
    out = terms.values.new_empty(terms.values.shape)
    state = state.clone()
    for n in range(num_chunks):
        read = terms.read[:, n] @ state  # [Hv, 2 C, dv]
        torch.sub(terms.values[:, n], read[:, :INNER], out=deltas[:, n])
        out[:, n] = read[:, INNER:]
        state = torch.baddbmm(state * terms.decay[:, n], terms.write[:, n], deltas[:, n])
    out += terms.within @ deltas
    rows_first = out.view(heads, num_chunks * INNER, dv).transpose(0, 1)
    return DeltaResult(rows_first[:num_rows].contiguous(), state)
