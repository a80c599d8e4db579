"""GDN and KDA over a chunk of one sequence: what the scan of kernels/triton_delta_scan.py needs of every inner chunk.

Gates, normalising and all that lies within an inner chunk is done here, for all chunks and key heads side by side; the
formulas are those of kernels/gated_delta.py and kernels/kda.py. With a decay a head, q and k are used as they are and
their lengths and decays multiply the small results. With a decay a channel, pairs of rows are met by halves: i in the
second half and j in the first of exactly one block on the diagonal, with the decays relative to the row between.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

import torch
import triton
import triton.language as tl

from kernels.delta_mixer import DecayKind, DeltaMixer, ProjectedRows, split_heads
from kernels.delta_rule import INNER, MIN_LOG_DECAY, UNIT_EPS
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_delta_decode import softplus
from kernels.triton_delta_scan import SCAN_TILES, DeltaTerms, ScanTiles, invert_unit_lower, scan

# exp of it is 1e-26: nothing beside a value of this row. Sums over an inner chunk keep four digits after the point.
LEAST_CHANNEL_DECAY = -60.0


@triton.jit
def _head_terms_kernel(
    q_ptr,  # [num_rows, HEADS // REPEATS, DK]
    k_ptr,
    beta_ptr,  # [num_rows, HEADS]
    decay_ptr,
    a_log_ptr,
    dt_bias_ptr,
    solve_ptr,
    within_ptr,
    factors_ptr,
    num_rows,
    QK_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    LEAST: tl.constexpr,
    EPS: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    keys = tl.arange(0, DK)[None, :]
    inside = i < num_rows - tl.program_id(1) * C
    begin = chunk * C * QK_STRIDE + (head // REPEATS) * DK
    at = i[:, None] * QK_STRIDE + keys
    k = tl.load(k_ptr + begin + at, mask=inside[:, None], other=0.0)
    wide = k.to(tl.float32)
    unit_k = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
    beta_at = chunk * C * BETA_STRIDE + head + i * BETA_STRIDE
    beta = tl.sigmoid(tl.load(beta_ptr + beta_at, mask=inside, other=0.0).to(tl.float32))
    beta = tl.where(inside, beta, 0.0)
    f_at = chunk * C * DECAY_STRIDE + head + i * DECAY_STRIDE
    f = tl.load(decay_ptr + f_at, mask=inside, other=0.0).to(tl.float32)
    g = -tl.exp(tl.load(a_log_ptr + head)) * softplus(f + tl.load(dt_bias_ptr + head))
    # In float64, since differences of the sums are exponentiated: a strong decay would blur all rows after it.
    g = tl.where(inside, tl.maximum(g, LEAST), 0.0).to(tl.float64)
    sums = tl.cumsum(g, 0)
    until_end = (tl.sum(g, 0) - sums).to(tl.float32)
    whole = tl.sum(g, 0).to(tl.float32)
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    between = tl.exp(tl.where(i[:, None] >= i[None, :], between, float("-inf")))
    place = chunk * HEADS + head
    square = place * (C * C) + i[:, None] * C + i[None, :]

    kk = tl.dot(k, tl.trans(k)) * unit_k[None, :] * (unit_k * beta)[:, None]
    lower = tl.where(i[:, None] > i[None, :], kk * between, 0.0)
    solve = invert_unit_lower(lower) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))
    q = tl.load(q_ptr + begin + at, mask=inside[:, None], other=0.0)
    wide = q.to(tl.float32)
    unit_q = tl.rsqrt(tl.sum(wide * wide, 1) + EPS) * (DK**-0.5)
    qk = tl.dot(q, tl.trans(k)) * unit_q[:, None] * unit_k[None, :]
    tl.store(within_ptr + square, (qk * between).to(within_ptr.dtype.element_ty))
    since = tl.exp(high)
    factors_ptr += place * (4 * C)
    tl.store(factors_ptr + i, since * unit_q)
    tl.store(factors_ptr + C + i, since * unit_k)
    tl.store(factors_ptr + 2 * C + i, tl.exp(until_end) * unit_k)
    tl.store(factors_ptr + 3 * C + i, tl.exp(whole + high * 0.0))


@triton.jit
def _channel_log_decay(f, rate, lower_bound, BOUNDED: tl.constexpr):
    return lower_bound * tl.sigmoid(rate * f) if BOUNDED else -rate * softplus(f)


@triton.jit
def _met_by_halves(q, k, sums, row, column, level):
    """Decayed q . k and k . k of the pairs that meet in blocks of 2 halves of 2^level rows; 0 for all others.

    Of unit vectors and factors of at most 1: float16 has more digits for them than bfloat16.
    """
    origin = ((row >> (level + 1)) << (level + 1)) + (1 << level) - 1
    from_origin = sums - tl.gather(sums, tl.broadcast_to(origin, sums.shape), 0)
    late = ((row >> level) & 1) == 1
    factor = tl.exp(tl.where(late, from_origin, -from_origin))
    decayed = (k * factor).to(tl.float16)
    met = ((row >> (level + 1)) == (column >> (level + 1))) & late & (((column >> level) & 1) == 0)
    qk = tl.dot((q * factor).to(tl.float16), tl.trans(decayed))
    kk = tl.dot(decayed, tl.trans(decayed))
    return tl.where(met, qk, 0.0), tl.where(met, kk, 0.0)


@triton.jit
def _channel_terms_kernel(
    q_ptr,  # [num_rows, HEADS, DK]
    k_ptr,
    beta_ptr,  # [num_rows, HEADS]
    decay_ptr,  # [num_rows, HEADS, DK]
    a_log_ptr,
    dt_bias_ptr,
    solve_ptr,
    within_ptr,
    keep_ptr,  # [n, HEADS, DK]
    read_q_ptr,  # [num_rows, HEADS, DK], contiguous, and so are the two below
    read_k_ptr,
    write_k_ptr,
    num_rows,
    lower_bound,
    QK_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    BOUNDED: tl.constexpr,
    LEAST: tl.constexpr,
    EPS: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    row = i[:, None]
    column = i[None, :]
    inside = i < num_rows - tl.program_id(1) * C
    held = inside[:, None]
    q_ptr += chunk * C * QK_STRIDE + head * DK
    k_ptr += chunk * C * QK_STRIDE + head * DK
    decay_ptr += chunk * C * DECAY_STRIDE + head * DK
    dt_bias_ptr += head * DK
    place = chunk * HEADS + head
    read_q_ptr += (chunk * C * HEADS + head) * DK
    read_k_ptr += (chunk * C * HEADS + head) * DK
    write_k_ptr += (chunk * C * HEADS + head) * DK
    rate = tl.exp(tl.load(a_log_ptr + head))
    at = row * QK_STRIDE + tl.arange(0, DK)[None, :]
    whole_q = tl.load(q_ptr + at, mask=held, other=0.0).to(tl.float32)
    whole_k = tl.load(k_ptr + at, mask=held, other=0.0).to(tl.float32)
    unit_q = tl.rsqrt(tl.sum(whole_q * whole_q, 1) + EPS) * (DK**-0.5)
    unit_k = tl.rsqrt(tl.sum(whole_k * whole_k, 1) + EPS)
    qk = tl.where(row == column, (tl.sum(whole_q * whole_k, 1) * unit_q * unit_k)[:, None], 0.0)
    kk = tl.zeros((C, C), tl.float32)
    for first in range(0, DK, KEYS):  # a part of the channels at a time, so that it all fits into registers
        keys = first + tl.arange(0, KEYS)[None, :]
        q = tl.load(q_ptr + row * QK_STRIDE + keys, mask=held, other=0.0).to(tl.float32) * unit_q[:, None]
        k = tl.load(k_ptr + row * QK_STRIDE + keys, mask=held, other=0.0).to(tl.float32) * unit_k[:, None]
        f = tl.load(decay_ptr + row * DECAY_STRIDE + keys, mask=held, other=0.0).to(tl.float32)
        f += tl.load(dt_bias_ptr + keys)
        g = _channel_log_decay(f, rate, lower_bound, BOUNDED)
        g = tl.where(held, tl.maximum(g, LEAST), 0.0)
        sums = tl.cumsum(g, 0)
        whole = tl.sum(g, 0)[None, :]
        for level in range(6):
            met_qk, met_kk = _met_by_halves(q, k, sums, row, column, level)
            qk += met_qk
            kk += met_kk
        since = tl.exp(sums)
        to = row * (HEADS * DK) + keys
        tl.store(read_q_ptr + to, (q * since).to(read_q_ptr.dtype.element_ty), mask=held)
        tl.store(read_k_ptr + to, (k * since).to(read_k_ptr.dtype.element_ty), mask=held)
        tl.store(write_k_ptr + to, (k * tl.exp(whole - sums)).to(write_k_ptr.dtype.element_ty), mask=held)
        tl.store(keep_ptr + place * DK + keys, tl.exp(whole))
    beta_at = chunk * C * BETA_STRIDE + head + i * BETA_STRIDE
    beta = tl.sigmoid(tl.load(beta_ptr + beta_at, mask=inside, other=0.0).to(tl.float32))
    beta = tl.where(inside, beta, 0.0)
    square = place * (C * C) + row * C + column
    tl.store(within_ptr + square, qk.to(within_ptr.dtype.element_ty))
    solve = invert_unit_lower(kk * beta[:, None]) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))


def delta_chunk(
    rows: ProjectedRows,
    mixer: DeltaMixer,
    slots: RecurrentSlots,
    *,
    tiles: ScanTiles = SCAN_TILES,
    terms_warps: int | None = None,
) -> torch.Tensor:
    """Rows of one sequence, any number of them; the state is read at slot_in and written at slot_out, each [1] int64.

    Args:
        rows: `mixed` as the convolution left it; `gate` is not read.
        mixer: its convolution, norm and gate are not read.
        slots: tails are not touched; slot_out may equal slot_in.
        tiles: of the scan.
        terms_warps: of the kernel before it.

    Returns:
        [rows, Hv, dv] in the dtype of `mixed`, before the output norm.
    """
    num_rows, channels = rows.mixed.shape
    heads, dk, dv = slots.states.shape[1:]
    k_heads = (channels - heads * dv) // (2 * dk)
    slots.check(1)
    assert rows.mixed.dtype == torch.bfloat16
    assert channels == 2 * k_heads * dk + heads * dv
    assert heads % k_heads == 0, f"{k_heads} key heads do not divide {heads} value heads"
    assert not mixer.per_channel or k_heads == heads, "a decay a channel has a key head for every value head"
    assert mixer.a_log.shape == (heads,)
    assert mixer.dt_bias.shape == ((heads * dk,) if mixer.per_channel else (heads,))
    assert mixer.a_log.dtype == mixer.dt_bias.dtype == torch.float32
    assert rows.beta.shape == (num_rows, heads)
    assert rows.decay.shape == (num_rows, mixer.dt_bias.shape[0])
    for part in (rows.mixed, rows.beta, rows.decay):
        assert part.stride(1) == 1, "columns are side by side"
    q, k, v = split_heads(rows.mixed, slots.states.shape[1:])
    terms = (_channel_terms if mixer.per_channel else _head_terms)(rows, mixer, (q, k), heads, terms_warps)
    return scan(terms, v, slots, tiles)


def _empty_squares(num_chunks: int, heads: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_chunks, heads, INNER, INNER)
    return like.new_empty(shape), like.new_empty(shape)


def _head_terms(
    rows: ProjectedRows,
    mixer: DeltaMixer,
    qk: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    num_warps: int | None,
) -> DeltaTerms:
    q, k = qk
    num_rows, k_heads, dk = k.shape
    num_chunks = triton.cdiv(num_rows, INNER)
    solve, within = _empty_squares(num_chunks, heads, rows.mixed)
    factors = torch.empty((num_chunks, heads, 4, INNER), dtype=torch.float32, device=k.device)
    if num_chunks:
        _head_terms_kernel[(heads, num_chunks)](
            *(q, k, rows.beta, rows.decay, mixer.a_log, mixer.dt_bias, solve, within, factors, num_rows),
            QK_STRIDE=k.stride(0),
            BETA_STRIDE=rows.beta.stride(0),
            DECAY_STRIDE=rows.decay.stride(0),
            HEADS=heads,
            REPEATS=heads // k_heads,
            DK=dk,
            C=INNER,
            LEAST=MIN_LOG_DECAY,
            EPS=UNIT_EPS,
            num_warps=num_warps or 4,
        )
    return DeltaTerms(solve, within, factors, read_q=q, read_k=k, write_k=k)


def _channel_terms(
    rows: ProjectedRows,
    mixer: DeltaMixer,
    qk: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    num_warps: int | None,
) -> DeltaTerms:
    q, k = qk
    num_rows, _, dk = k.shape
    num_chunks = triton.cdiv(num_rows, INNER)
    solve, within = _empty_squares(num_chunks, heads, rows.mixed)
    keep = torch.empty((num_chunks, heads, dk), dtype=torch.float32, device=k.device)
    read_q, read_k, write_k = (rows.mixed.new_empty((num_rows, heads, dk)) for _ in range(3))
    if num_chunks:
        _channel_terms_kernel[(heads, num_chunks)](
            *(q, k, rows.beta, rows.decay, mixer.a_log, mixer.dt_bias, solve, within, keep, read_q, read_k, write_k),
            *(num_rows, mixer.lower_bound),
            QK_STRIDE=k.stride(0),
            BETA_STRIDE=rows.beta.stride(0),
            DECAY_STRIDE=rows.decay.stride(0),
            HEADS=heads,
            DK=dk,
            KEYS=min(64, dk),
            C=INNER,
            BOUNDED=mixer.decay is DecayKind.CHANNEL_BOUNDED,
            LEAST=LEAST_CHANNEL_DECAY,
            EPS=UNIT_EPS,
            num_warps=num_warps or 8,
        )
    return DeltaTerms(solve, within, keep, read_q, read_k, write_k)
