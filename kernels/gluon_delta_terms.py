"""What the scan of GDN and KDA needs of every inner chunk, with each thread's part of a chunk chosen by hand.

The same terms as in kernels/triton_delta_chunk.py, for a decay a head, or one a channel that has a bound. With a decay
a channel a thread has four channels of a strip of 16 rows, so that sums of log decays need no other thread. Pairs of
rows then meet in three products, of which each place takes one:
- within a strip, relative to its middle, from where no factor leaves the range of bfloat16;
- of the second strip with the first, and of the fourth with the third, relative to the end of the earlier one;
- of the last two strips with the first two, relative to the row between them.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.delta_mixer import DeltaMixer, ProjectedRows
from kernels.delta_rule import UNIT_EPS
from kernels.gluon_delta_scan import KEY_DIM, row_tiles, square_tiles
from kernels.gluon_interface import barrier, bring_tile, take_tile
from kernels.triton_delta_scan import DeltaTerms

C = gl.constexpr(64)  # rows of an inner chunk
DK = gl.constexpr(128)
STRIP = gl.constexpr(16)
HALF_STRIP = gl.constexpr(8)
Q_SCALE = gl.constexpr(128**-0.5)
EPS = gl.constexpr(UNIT_EPS)
LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-60.0)  # log decay: exp of it is 1e-26, and sums over a chunk keep three digits after the point
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of [C, C]
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _sigmoid(x):
    return _reciprocal(1.0 + _exp2(x * -LOG2E))


@gluon.jit
def _softplus(x):
    return gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x)))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _places():
    """Row and column of every place of a square."""
    row = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None]
    return row, gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]


@gluon.jit
def _product(a, b, is_async: gl.constexpr = True):
    """a b^T of tiles [C, keys]."""
    zeros = gl.full([C, C], 0.0, gl.float32, SQUARE)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=is_async)


@gluon.jit
def _invert_unit_lower(lower, lower_tile, half_tile):
    """(I + lower)^-1 of a strictly lower triangle, by doubling as in kernels/triton_delta_scan.py.

    With X the inverse of the blocks on the diagonal, X - X L X is that of blocks twice as long, where exactly one of
    row and column lies in a block's second half; everywhere else X stays.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    row, column = _places()
    apart = row ^ column
    zeros = gl.full([C, C], 0.0, gl.float32, SQUARE)
    lower_tile.store(lower.to(gl.float16))
    x = gl.where(apart == 0, 1.0, gl.where(apart == 1, -lower, 0.0))
    for level in range(1, 6):
        half = x.to(gl.float16)
        half_tile.store(half)
        fence_async_shared()
        met = warpgroup_mma(gl.convert_layout(half, left), lower_tile, zeros, use_acc=False)
        met = warpgroup_mma(gl.convert_layout(met.to(gl.float16), left), half_tile, zeros, use_acc=False)
        x = gl.where((apart >> level) == 1, x - met, x)
    return x


@gluon.jit
def _send_square(bulk, place, tile, values):
    tile.store(values.to(gl.bfloat16))
    fence_async_shared()
    take_tile(bulk, [place * C, 0], tile)


@gluon.jit
def _diagonal(product):
    row, column = _places()
    return gl.sum(gl.where(row == column, product, 0.0), 1)


@gluon.jit
def _grouped_head_terms_kernel(
    q_bulk,  # descriptors of [num_rows, key heads * DK]
    k_bulk,
    beta_ptr,  # [num_rows, HEADS]
    decay_ptr,
    a_log_ptr,
    dt_bias_ptr,
    solve_bulk,  # of [num_chunks * HEADS * C, C]
    within_bulk,
    factors_ptr,  # [num_chunks, HEADS, 4, C]
    num_rows,
    BETA_STRIDE: gl.constexpr,
    DECAY_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    REPEATS: gl.constexpr,
):
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every group of 32 threads has all rows
    down: gl.constexpr = gl.SliceLayout(1, SQUARE)
    across: gl.constexpr = gl.SliceLayout(0, SQUARE)
    key_head = gl.program_id(0)
    chunk = gl.program_id(1)
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    lower_tile = gl.allocate_shared_memory(gl.float16, [C, C], TILE)
    half_tile = gl.allocate_shared_memory(gl.float16, [C, C], TILE)
    within_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], TILE)
    solve_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], TILE)
    came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(came, count=1)
    mbarrier.expect(came, 2 * k_bulk.block_type.nbytes)
    bring_tile(k_bulk, [chunk * C, key_head * DK], came, k_tile)
    bring_tile(q_bulk, [chunk * C, key_head * DK], came, q_tile)
    row, column = _places()
    step = gl.arange(0, C, line)
    inside = step < num_rows - chunk * C
    at = (chunk * C + step).to(gl.int64)
    mbarrier.wait(came, 0)
    kk, qk, qq = _product(k_tile, k_tile), _product(q_tile, k_tile), _product(q_tile, q_tile)
    kk, qk, qq = warpgroup_mma_wait(0, deps=[kk, qk, qq])
    # Lengths are what rows give with themselves.
    unit_k = gl.rsqrt(_diagonal(kk) + EPS)
    unit_q = gl.rsqrt(_diagonal(qq) + EPS) * Q_SCALE
    unit_k_across = gl.convert_layout(unit_k, across)[None, :]
    kk = kk * unit_k[:, None] * unit_k_across
    qk = qk * unit_q[:, None] * unit_k_across
    unit_k = gl.convert_layout(unit_k, line)
    unit_q = gl.convert_layout(unit_q, line)
    for repeat in range(REPEATS):
        head = key_head * REPEATS + repeat
        place = chunk * HEADS + head
        f = gl.load(decay_ptr + at * DECAY_STRIDE + head, mask=inside, other=0.0).to(gl.float32)
        beta = gl.load(beta_ptr + at * BETA_STRIDE + head, mask=inside, other=0.0).to(gl.float32)
        beta = gl.where(inside, _sigmoid(beta), 0.0)
        g = -gl.exp(gl.load(a_log_ptr + head)) * _softplus(f + gl.load(dt_bias_ptr + head))
        g = gl.where(inside, gl.maximum(g, LEAST), 0.0)
        sums = gl.associative_scan(g, 0, _add)
        whole = gl.sum(g, 0)
        since = gl.exp(sums)
        to_ptr = factors_ptr + place * (4 * C) + step
        gl.store(to_ptr, since * unit_q)
        gl.store(to_ptr + C, since * unit_k)
        gl.store(to_ptr + 2 * C, gl.exp(whole - sums) * unit_k)
        gl.store(to_ptr + 3 * C, gl.exp(whole + sums * 0.0))
        between = gl.convert_layout(sums, down)[:, None] - gl.convert_layout(sums, across)[None, :]
        between = gl.exp(gl.where(row >= column, between, float("-inf")))
        tma.store_wait(0)
        _send_square(within_bulk, place, within_tile, qk * between)
        lower = gl.where(row > column, kk * between * gl.convert_layout(beta, down)[:, None], 0.0)
        solve = _invert_unit_lower(lower, lower_tile, half_tile) * gl.convert_layout(beta, across)[None, :]
        _send_square(solve_bulk, place, solve_tile, solve)
    tma.store_wait(0)


@gluon.jit
def _met(near, far, k_same, k_next, k_far):
    """Products of all pairs of rows, each relative to a row between them; above the diagonal nothing of use."""
    same, following, others = _product(near, k_same), _product(near, k_next), _product(far, k_far)
    same, following, others = warpgroup_mma_wait(0, deps=[same, following, others])
    row, column = _places()
    apart = row ^ column
    return gl.where(apart < STRIP, same, gl.where(apart < 2 * STRIP, following, others))


@gluon.jit
def _put(tile, values):
    tile.store(gl.reshape(values.to(gl.bfloat16), [C, DK]))


@gluon.jit
def _grouped_channel_terms_kernel(
    q_ptr,  # [num_rows, HEADS, DK]
    k_ptr,
    beta_ptr,  # [num_rows, HEADS]
    decay_ptr,  # [num_rows, HEADS, DK]
    a_log_ptr,
    dt_bias_ptr,
    solve_bulk,  # descriptors of [num_chunks * HEADS * C, C]
    within_bulk,
    keep_ptr,  # [num_chunks, HEADS, DK]
    made_ptr,  # [3, num_rows, HEADS, DK]: rows that read by q, that read by k, and that are written
    num_rows,
    part_stride,  # between the three
    lower_bound,
    QK_STRIDE: gl.constexpr,
    BETA_STRIDE: gl.constexpr,
    DECAY_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
):
    cube: gl.constexpr = gl.BlockedLayout([1, 16, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0])  # strips, their rows, channels
    flat: gl.constexpr = gl.SliceLayout(1, cube)
    head = gl.program_id(0)
    chunk = gl.program_id(1).to(gl.int64)
    place = gl.program_id(1) * HEADS + head
    rows_left = num_rows - gl.program_id(1) * C
    strip = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None, None]
    step = gl.arange(0, STRIP, gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :, None]
    channel = gl.arange(0, DK, gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, None, :]
    row = strip * STRIP + step
    inside = (row < rows_left) & (channel < DK)
    qk_at = chunk * (C * QK_STRIDE) + head * DK
    f_ptr = decay_ptr + chunk * (C * DECAY_STRIDE) + head * DK
    f = gl.load(f_ptr + row * DECAY_STRIDE + channel, mask=inside, other=0.0)
    q = gl.load(q_ptr + qk_at + row * QK_STRIDE + channel, mask=inside, other=0.0)
    k = gl.load(k_ptr + qk_at + row * QK_STRIDE + channel, mask=inside, other=0.0)
    rate = gl.exp(gl.load(a_log_ptr + head))
    g = lower_bound * LOG2E * _sigmoid((f.to(gl.float32) + gl.load(dt_bias_ptr + head * DK + channel)) * rate)
    g = gl.where(inside, g, 0.0)
    # Log decays, to base 2, from a strip's beginning to each row, to the strip's middle and to its end.
    sums = gl.associative_scan(g, 1, _add)
    middle = gl.sum(gl.where(step < HALF_STRIP, g, 0.0), 1)
    whole = gl.sum(g, 1)
    since = _exp2(sums - middle[:, None, :])

    # Every strip's threads take what they need of the others.
    shared = gl.allocate_shared_memory(gl.float32, [2, 4, DK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    shared.index(0).store(whole)
    shared.index(1).store(middle)
    whole_0, whole_1 = shared.index(0).slice(0, 1, 0).load(flat), shared.index(0).slice(1, 1, 0).load(flat)
    whole_2, whole_3 = shared.index(0).slice(2, 1, 0).load(flat), shared.index(0).slice(3, 1, 0).load(flat)
    middle_1, middle_3 = shared.index(1).slice(1, 1, 0).load(flat), shared.index(1).slice(3, 1, 0).load(flat)
    n = gl.arange(0, 4, gl.SliceLayout(1, flat))[:, None]
    before = gl.where(n > 0, whole_0, 0.0) + gl.where(n > 1, whole_1, 0.0) + gl.where(n > 2, whole_2, 0.0)
    after = gl.where(n < 1, whole_1, 0.0) + gl.where(n < 2, whole_2, 0.0) + gl.where(n < 3, whole_3, 0.0)
    rest = whole - middle
    to_next = _exp2(rest + gl.where(n == 0, middle_1, gl.where(n == 2, middle_3, 0.0)))[:, None, :]
    from_half = _exp2(middle + gl.where(n == 3, whole_2, 0.0))[:, None, :]
    to_half = _exp2(rest + gl.where(n == 0, whole_1, 0.0))[:, None, :]
    from_start = _exp2(middle + before)[:, None, :]
    to_end = _exp2(rest + after)[:, None, :]
    keep_at = place * DK + gl.arange(0, DK, gl.SliceLayout(0, flat))[None, :]
    gl.store(keep_ptr + keep_at, _exp2(whole_0 + whole_1 + whole_2 + whole_3))

    q_near = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    q_far = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    k_near = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    k_far = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    k_same = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    k_next = gl.allocate_shared_memory(gl.bfloat16, [C, DK], TILE)
    made_ptr += chunk * (C * HEADS * DK) + head * DK + row * (HEADS * DK) + channel
    q = q.to(gl.float32)
    q = q * since * (gl.rsqrt(gl.sum(q * q, 2) + EPS) * Q_SCALE)[:, :, None]
    _put(q_near, q)
    _put(q_far, q * from_half)
    gl.store(made_ptr, (q * from_start).to(gl.bfloat16), mask=inside)
    barrier()  # q is done with before k begins: both at once do not fit into the registers
    k = k.to(gl.float32)
    k = k * gl.rsqrt(gl.sum(k * k, 2) + EPS)[:, :, None]
    k_since = k * since
    _put(k_near, k_since)
    gl.store(made_ptr + part_stride, (k_since * from_start).to(gl.bfloat16), mask=inside)
    barrier()
    k_until = k * _reciprocal(since)
    _put(k_far, gl.where(strip < 2, k_until * to_half, k_since * from_half))
    _put(k_same, k_until)
    _put(k_next, k_until * to_next)
    gl.store(made_ptr + 2 * part_stride, (k_until * to_end).to(gl.bfloat16), mask=inside)
    fence_async_shared()
    barrier()

    i = gl.arange(0, C, gl.SliceLayout(1, SQUARE))
    beta_ptr += chunk * (C * BETA_STRIDE) + head
    beta = gl.load(beta_ptr + i * BETA_STRIDE, mask=i < rows_left, other=0.0).to(gl.float32)
    beta = gl.where(i < rows_left, _sigmoid(beta), 0.0)
    down, right = _places()
    qk = gl.where(down >= right, _met(q_near, q_far, k_same, k_next, k_far), 0.0)
    lower = gl.where(down > right, _met(k_near, k_far, k_same, k_next, k_far) * beta[:, None], 0.0)
    barrier()  # all products are done: the tiles may hold other things
    _send_square(within_bulk, place, q_near._reinterpret(gl.bfloat16, [C, C], TILE), qk)
    lower_tile = k_near._reinterpret(gl.float16, [C, C], TILE)
    solve = _invert_unit_lower(lower, lower_tile, k_same._reinterpret(gl.float16, [C, C], TILE))
    solve = solve * gl.convert_layout(beta, gl.SliceLayout(0, SQUARE))[None, :]
    _send_square(solve_bulk, place, q_far._reinterpret(gl.bfloat16, [C, C], TILE), solve)
    tma.store_wait(0)


def fill_head_terms(
    rows: ProjectedRows, mixer: DeltaMixer, qk: tuple[torch.Tensor, torch.Tensor], terms: DeltaTerms
) -> None:
    """Works out `terms` of rows, q and k [rows, key heads, DK] being their keys; where the scan's `is_fit` says so."""
    q, k = qk
    assert k.shape[2] == KEY_DIM
    num_chunks, heads = terms.solve.shape[:2]
    _grouped_head_terms_kernel[(k.shape[1], num_chunks)](
        *(row_tiles(x, KEY_DIM) for x in qk),
        *(rows.beta, rows.decay, mixer.a_log, mixer.dt_bias),
        *(square_tiles(x) for x in (terms.solve, terms.within)),
        *(terms.factors, q.shape[0]),
        BETA_STRIDE=rows.beta.stride(0),
        DECAY_STRIDE=rows.decay.stride(0),
        HEADS=heads,
        REPEATS=heads // k.shape[1],
        num_warps=4,
    )


def fill_channel_terms(
    rows: ProjectedRows, mixer: DeltaMixer, qk: tuple[torch.Tensor, torch.Tensor], terms: DeltaTerms
) -> None:
    """The same with a decay a channel, which has a bound of at least LEAST_STRIP_DECAY a row."""
    q, k = qk
    assert k.shape[2] == KEY_DIM
    num_chunks, heads = terms.solve.shape[:2]
    part_stride = terms.read_k.storage_offset() - terms.read_q.storage_offset()
    assert part_stride == terms.write_k.storage_offset() - terms.read_k.storage_offset(), "three parts of one tensor"
    _grouped_channel_terms_kernel[(heads, num_chunks)](
        *(q, k, rows.beta, rows.decay, mixer.a_log, mixer.dt_bias),
        *(square_tiles(x) for x in (terms.solve, terms.within)),
        *(terms.factors, terms.read_q, q.shape[0], part_stride, mixer.lower_bound),
        QK_STRIDE=k.stride(0),
        BETA_STRIDE=rows.beta.stride(0),
        DECAY_STRIDE=rows.decay.stride(0),
        HEADS=heads,
        num_warps=4,
    )
