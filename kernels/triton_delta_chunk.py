"""GDN and KDA over a chunk of one sequence: what the scan of kernels/triton_delta_scan.py needs of every inner chunk.

Gates, normalising and all that lies within an inner chunk is done here, for all chunks and key heads side by side; the
formulas are those of kernels/gated_delta.py and kernels/kda.py. With a decay a head, q and k are used as they are and
their lengths and decays multiply the small results. With a decay a channel, pairs of rows are met by halves: i in the
second half and j in the first of exactly one block on the diagonal, with the decays relative to the row between. Sums
of log decays over all such ranges of rows are matrix products with 0 and 1. Where a decay has a bound, pairs within
`STRIP` rows are met at once: relative to the row in their middle, no factor leaves the range of float32.

On cards of the Hopper generation, for heads of 128 keys, kernels/gluon_delta_terms.py and kernels/gluon_delta_scan.py
compute the same.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from functools import partial
from itertools import accumulate

import torch
import triton
import triton.language as tl

from kernels.delta_mixer import DecayKind, DeltaMixer, ProjectedRows, split_heads
from kernels.delta_rule import INNER, MIN_LOG_DECAY, UNIT_EPS
from kernels.gluon_delta_scan import grouped_scan, is_fit
from kernels.gluon_delta_terms import fill_channel_terms, fill_head_terms
from kernels.gluon_interface import shrinks_tiles
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_delta_decode import softplus
from kernels.triton_delta_scan import SCAN_TILES, DeltaTerms, ScanTiles, invert_unit_lower, scan
from kernels.triton_softmax import LOG2E

# exp of it is 1e-26: nothing beside a value of this row. Sums over an inner chunk keep four digits after the point.
LEAST_CHANNEL_DECAY = -60.0
STRIP = 16  # rows of a block on the diagonal that a bounded decay meets at once
LEAST_PIECE_CHUNKS = 64  # inner chunks that are worth a launch of their own
PIECES = 6  # of a long sequence: terms of one are worked out beside the scan of the one before
KEYS_AT_ONCE = 32  # channels that a program of a decay a channel takes at once
LEAST_STRIP_DECAY = -5.0  # a row: 8 of them to either side are e^40, and their products e^80


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
def _summed(ranges, high, low):
    """Sums of log decays over the ranges [rows, rows] of 0, 1 and -1; `high` + `low` [rows, keys] are the decays."""
    ranges = ranges.to(tl.float16)
    return tl.dot(ranges, low, tl.dot(ranges, high))


@triton.jit
def _met_by_halves(q, k, high, low, row, column, level):
    """Decayed q . k and k . k of the pairs that meet in blocks of 2 halves of 2^level rows; 0 for all others.

    Of unit vectors and factors of at most 1: float16 has more digits for them than bfloat16.
    """
    origin = ((row >> (level + 1)) << (level + 1)) + (1 << level) - 1
    # Over (origin, row] in the second half, over (row, origin] in the first.
    between = (column > tl.minimum(origin, row)) & (column <= tl.maximum(origin, row))
    factor = tl.math.exp2(_summed(between, high, low))
    late = ((row >> level) & 1) == 1
    decayed = (k * factor).to(tl.float16)
    met = ((row >> (level + 1)) == (column >> (level + 1))) & late & (((column >> level) & 1) == 0)
    qk = tl.dot((q * factor).to(tl.float16), tl.trans(decayed))
    kk = tl.dot(decayed, tl.trans(decayed))
    return tl.where(met, qk, 0.0), tl.where(met, kk, 0.0)


@triton.jit
def _met_in_strips(q, k, high, low, row, column, LEVEL: tl.constexpr):
    """The same of all pairs within blocks of 2^LEVEL rows, q . k of a row with itself too."""
    origin = ((row >> LEVEL) << LEVEL) + (1 << (LEVEL - 1)) - 1
    between = (column > tl.minimum(origin, row)) & (column <= tl.maximum(origin, row))
    since = _summed(tl.where(between, tl.where(row > origin, 1.0, -1.0), 0.0), high, low)
    factor = tl.math.exp2(since)
    until = k * tl.math.exp2(-since)
    near = (row >> LEVEL) == (column >> LEVEL)
    qk = tl.dot(q * factor, tl.trans(until), input_precision="tf32")
    kk = tl.dot(k * factor, tl.trans(until), input_precision="tf32")
    return tl.where(near & (row >= column), qk, 0.0), tl.where(near & (row > column), kk, 0.0)


@triton.jit(do_not_specialize=["num_rows"])
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
    made_ptr,  # [3, num_rows, HEADS, DK]: rows that read by q, that read by k, and that are written
    num_rows,
    part_stride,  # between the three
    lower_bound,
    QK_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    BOUNDED: tl.constexpr,
    STRIP_LEVEL: tl.constexpr,  # log2 of the rows that are met at once; 0: only a row with itself
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
    made_ptr += (chunk * C * HEADS + head) * DK
    rate = tl.exp(tl.load(a_log_ptr + head))
    unit_q = tl.full((C,), EPS, tl.float32)
    unit_k = tl.full((C,), EPS, tl.float32)
    itself = tl.zeros((C,), tl.float32)
    for first in range(0, DK, KEYS):
        at = row * QK_STRIDE + first + tl.arange(0, KEYS)[None, :]
        q = tl.load(q_ptr + at, mask=held, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at, mask=held, other=0.0).to(tl.float32)
        unit_q += tl.sum(q * q, 1)
        unit_k += tl.sum(k * k, 1)
        itself += tl.sum(q * k, 1)
    unit_q = tl.rsqrt(unit_q) * (DK**-0.5)
    unit_k = tl.rsqrt(unit_k)
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    if STRIP_LEVEL == 0:
        qk += tl.where(row == column, (itself * unit_q * unit_k)[:, None], 0.0)
    # A part of the channels at a time, and nothing kept from one to the next, so that it all fits into registers.
    for first in tl.range(0, DK, KEYS, disable_licm=True):
        keys = first + tl.arange(0, KEYS)[None, :]
        q = tl.load(q_ptr + row * QK_STRIDE + keys, mask=held, other=0.0).to(tl.float32) * unit_q[:, None]
        k = tl.load(k_ptr + row * QK_STRIDE + keys, mask=held, other=0.0).to(tl.float32) * unit_k[:, None]
        f = tl.load(decay_ptr + row * DECAY_STRIDE + keys, mask=held, other=0.0).to(tl.float32)
        f += tl.load(dt_bias_ptr + keys)
        g = _channel_log_decay(f, rate, lower_bound, BOUNDED)
        g = tl.where(held, tl.maximum(g, LEAST), 0.0) * LOG2E
        high = g.to(tl.float16)
        low = (g - high.to(tl.float32)).to(tl.float16)
        # Which pairs meet is worked out where it is needed: `none` is 0, which a compiler does not know, and so it
        # does not keep a matrix of flags for each level in registers all along.
        none = (num_rows < first - DK).to(tl.int32)
        row = tl.arange(0, C)[:, None] + none
        column = tl.arange(0, C)[None, :] + none
        tl.store(keep_ptr + place * DK + keys, tl.math.exp2(tl.sum(g, 0)[None, :]))
        since = tl.math.exp2(_summed(column <= row, high, low))
        to = made_ptr + row * (HEADS * DK) + keys
        tl.store(to, (q * since).to(made_ptr.dtype.element_ty), mask=held)
        tl.store(to + part_stride, (k * since).to(made_ptr.dtype.element_ty), mask=held)
        until = tl.math.exp2(_summed(column > row, high, low))
        tl.store(to + 2 * part_stride, (k * until).to(made_ptr.dtype.element_ty), mask=held)
        if STRIP_LEVEL > 0:
            met_qk, met_kk = _met_in_strips(q, k, high, low, row, column, STRIP_LEVEL)
            qk += met_qk
            kk += met_kk
        for level in range(STRIP_LEVEL, 6):
            met_qk, met_kk = _met_by_halves(q, k, high, low, row, column, level)
            qk += met_qk
            kk += met_kk
    beta_at = chunk * C * BETA_STRIDE + head + i * BETA_STRIDE
    beta = tl.sigmoid(tl.load(beta_ptr + beta_at, mask=inside, other=0.0).to(tl.float32))
    beta = tl.where(inside, beta, 0.0)
    square = place * (C * C) + i[:, None] * C + i[None, :]
    tl.store(within_ptr + square, qk.to(within_ptr.dtype.element_ty))
    solve = invert_unit_lower(kk * beta[:, None]) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))


def delta_chunk(
    rows: ProjectedRows,
    mixer: DeltaMixer,
    slots: RecurrentSlots,
    *,
    pieces: int = PIECES,
    tiles: ScanTiles = SCAN_TILES,
) -> torch.Tensor:
    """Rows of one sequence, any number of them; the state is read at slot_in and written at slot_out, each [1] int64.

    Args:
        rows: `mixed` as the convolution left it; `gate` is not read.
        mixer: its convolution, norm and gate are not read.
        slots: tails are not touched; slot_out may equal slot_in.
        pieces: that a long sequence is cut into; no byte depends on it.
        tiles: of the scan of cards and heads that `is_fit` does not take.

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
    out = rows.mixed.new_empty((num_rows, heads, dv))
    if num_rows == 0:
        slots.states.index_copy_(0, slots.slot_out, slots.states.index_select(0, slots.slot_in))
        return out
    q, k, v = split_heads(rows.mixed, slots.states.shape[1:])
    terms = (_empty_channel_terms if mixer.per_channel else _empty_terms)(q, k, heads)
    grouped = is_fit(rows.mixed.device, dk=dk, dv=dv)
    if mixer.per_channel:
        fits = grouped and shrinks_tiles() and _has_strips(mixer)
        fill = fill_channel_terms if fits else _fill_channel_terms
    else:
        fill = fill_head_terms if grouped else _fill_terms
    carry = grouped_scan if grouped else partial(scan, tiles=tiles)
    cuts = _pieces(num_rows, pieces) if rows.mixed.is_cuda else [(0, num_rows)]
    if len(cuts) == 1:
        fill(rows, mixer, (q, k), terms)
        carry(terms, v, out, slots)
        return out
    # The scan leaves many multiprocessors idle: they work out the terms of the pieces after it on another stream.
    main, side = torch.cuda.current_stream(q.device), torch.cuda.Stream(q.device)
    side.wait_stream(main)
    for begin, end in cuts:
        of_piece = terms.piece(begin, end)
        with torch.cuda.stream(side):
            rows_of_piece = ProjectedRows(*(x[begin:end] for x in (rows.mixed, rows.gate, rows.beta, rows.decay)))
            fill(rows_of_piece, mixer, (q[begin:end], k[begin:end]), of_piece)
        main.wait_stream(side)
        carry(of_piece, v[begin:end], out[begin:end], slots)
        slots = RecurrentSlots(slots.tails, slots.states, slots.slot_out, slots.slot_out)
    return out


def _pieces(num_rows: int, most: int) -> list[tuple[int, int]]:
    """Cuts rows [0, num_rows) into `most` pieces of whole inner chunks, or fewer where they would be short.

    The first one's terms and the last one's scan have nothing beside them: these two are two thirds as long.
    """
    num_chunks = -(-num_rows // INNER)
    count = max(1, min(most, num_chunks // LEAST_PIECE_CHUNKS))
    shares = [2, *[3] * (count - 2), 2] if count > 1 else [1]
    ends = [min(num_rows, INNER * -(-num_chunks * part // sum(shares))) for part in accumulate(shares)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _has_strips(mixer: DeltaMixer) -> bool:
    """Whether all pairs of rows within STRIP can be met at once."""
    return mixer.decay is DecayKind.CHANNEL_BOUNDED and mixer.lower_bound >= LEAST_STRIP_DECAY


def _empty_squares(num_chunks: int, heads: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_chunks, heads, INNER, INNER)
    return like.new_empty(shape), like.new_empty(shape)


def _empty_terms(q: torch.Tensor, k: torch.Tensor, heads: int) -> DeltaTerms:
    num_chunks = triton.cdiv(k.shape[0], INNER)
    factors = torch.empty((num_chunks, heads, 4, INNER), dtype=torch.float32, device=k.device)
    return DeltaTerms(*_empty_squares(num_chunks, heads, k), factors, read_q=q, read_k=k, write_k=k)


def _empty_channel_terms(q: torch.Tensor, k: torch.Tensor, heads: int) -> DeltaTerms:
    num_rows, _, dk = k.shape
    num_chunks = triton.cdiv(num_rows, INNER)
    keep = torch.empty((num_chunks, heads, dk), dtype=torch.float32, device=k.device)
    return DeltaTerms(*_empty_squares(num_chunks, heads, q), keep, *q.new_empty((3, num_rows, heads, dk)))


def _fill_terms(
    rows: ProjectedRows, mixer: DeltaMixer, qk: tuple[torch.Tensor, torch.Tensor], terms: DeltaTerms
) -> None:
    q, k = qk
    num_chunks, heads = terms.solve.shape[:2]
    _head_terms_kernel[(heads, num_chunks)](
        *(q, k, rows.beta, rows.decay, mixer.a_log, mixer.dt_bias, terms.solve, terms.within, terms.factors),
        k.shape[0],
        QK_STRIDE=k.stride(0),
        BETA_STRIDE=rows.beta.stride(0),
        DECAY_STRIDE=rows.decay.stride(0),
        HEADS=heads,
        REPEATS=heads // k.shape[1],
        DK=k.shape[2],
        C=INNER,
        LEAST=MIN_LOG_DECAY,
        EPS=UNIT_EPS,
        num_warps=4,
    )


def _fill_channel_terms(
    rows: ProjectedRows, mixer: DeltaMixer, qk: tuple[torch.Tensor, torch.Tensor], terms: DeltaTerms
) -> None:
    q, k = qk
    num_chunks, heads = terms.solve.shape[:2]
    part_stride = terms.read_k.storage_offset() - terms.read_q.storage_offset()
    assert part_stride == terms.write_k.storage_offset() - terms.read_k.storage_offset(), "three parts of one tensor"
    _channel_terms_kernel[(heads, num_chunks)](
        *(q, k, rows.beta, rows.decay, mixer.a_log, mixer.dt_bias, terms.solve, terms.within, terms.factors),
        *(terms.read_q, k.shape[0], part_stride, mixer.lower_bound),
        QK_STRIDE=k.stride(0),
        BETA_STRIDE=rows.beta.stride(0),
        DECAY_STRIDE=rows.decay.stride(0),
        HEADS=heads,
        DK=k.shape[2],
        KEYS=min(KEYS_AT_ONCE, k.shape[2]),
        C=INNER,
        BOUNDED=mixer.decay is DecayKind.CHANNEL_BOUNDED,
        STRIP_LEVEL=(STRIP - 1).bit_length() if _has_strips(mixer) else 0,
        LEAST=LEAST_CHANNEL_DECAY,
        EPS=UNIT_EPS,
        num_warps=4,
    )
