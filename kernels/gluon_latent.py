"""Latent attention with a role for each group of warps, for rows of 512 latent and 64 rotated channels.

The same computation as kernels/triton_mla.py with heads as rows, 64 to a program. One group scores a tile of 64 keys
and weighs the left half of its latent channels; the second weighs the right half, by shares that it finds in shared
memory; the third brings tiles: whole blocks by the copy engine where all keys are attended to, rows one by one where
they were selected. A tile stands in shared memory once and serves both products. Its halves are freed as soon as they
are weighed and filled again while the next tile is attended to. Written in Gluon; see kernels/gluon_paged_prefill.py.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon_paged_prefill import is_available
from kernels.triton_paged_decode import DecodePlan
from kernels.triton_selected import SelectedRows
from kernels.triton_softmax import LOG2E, Parts, merge_partials, merge_ragged

BLOCK = 64  # tokens of a block
LATENT_DIM, ROPE_DIM = 512, 64
KEYS = gl.constexpr(64)  # of a tile
HEADS = gl.constexpr(64)  # of a program
HALF = gl.constexpr(256)  # of the latent channels
ROPE = gl.constexpr(64)
STAGES = gl.constexpr(2)  # tiles in shared memory
LN2 = gl.constexpr(0.6931471805599453)


def is_fit(device: torch.device, *, block_size: int, latent_dim: int, rope_dim: int) -> bool:
    """Whether the kernels run there, for this model: their matrix instructions are those of sm_90 alone."""
    if device.type != "cuda" or not is_available() or block_size != BLOCK:
        return False
    return (latent_dim, rope_dim) == (LATENT_DIM, ROPE_DIM) and torch.cuda.get_device_capability(device)[0] == 9


@gluon.jit
def _make_ring(COPIES: gl.constexpr):
    """Tiles in shared memory, and their barriers: even ones of left halves and rope parts, odd ones of right halves.

    A half is full once `COPIES` have arrived, and empty once its reader is done with it.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    lefts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, HALF], layout)
    rights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, HALF], layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, ROPE], layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=COPIES)
        mbarrier.init(empty.index(i), count=1)
    return lefts, rights, ropes, full, empty


@gluon.jit
def _make_shares():
    """What the scoring group hands to the other: a tile's shares, the factors of what is summed already, barriers."""
    shares = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
    factors = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    return shares, factors, barriers.index(0), barriers.index(1)


@gluon.jit
def _bring_blocks(half_bulk, rope_bulk, table_ptr, num_tiles, ring):
    """Copies block after block into the ring, as fast as its slots become free."""
    lefts, rights, ropes, full, empty = ring
    for tile in range(num_tiles):
        slot = tile % STAGES
        turn = (tile // STAGES) & 1
        block = gl.load(table_ptr + tile).to(gl.int32)
        left_full = full.index(2 * slot)
        right_full = full.index(2 * slot + 1)
        mbarrier.wait(empty.index(2 * slot), turn ^ 1)
        mbarrier.expect(left_full, half_bulk.block_type.nbytes + rope_bulk.block_type.nbytes)
        tma.async_copy_global_to_shared(half_bulk, [block, 0, 0], left_full, lefts.index(slot))
        tma.async_copy_global_to_shared(rope_bulk, [block, 0, 2 * HALF], left_full, ropes.index(slot))
        mbarrier.wait(empty.index(2 * slot + 1), turn ^ 1)
        mbarrier.expect(right_full, half_bulk.block_type.nbytes)
        tma.async_copy_global_to_shared(half_bulk, [block, 0, HALF], right_full, rights.index(slot))


@gluon.jit
def _tokens(picks_ptr, entries, position, width, POOL: gl.constexpr):
    """As `selected_tokens` of kernels/triton_selected.py."""
    picked = entries < width * POOL
    pick = gl.load(picks_ptr + entries // POOL, mask=picked, other=-1).to(gl.int32)
    token = gl.where(pick >= 0, pick * POOL + entries % POOL, -1)
    if POOL > 1:
        tail = (position + 1) // POOL * POOL + entries - width * POOL
        token = gl.where(picked, token, tail)
    return gl.where(token <= position, token, -1)


@gluon.jit
def _gather_rows(
    plane_ptr, block_stride, token_stride, table_ptr, selection, num_tiles, ring, PAGE: gl.constexpr,
    POOL: gl.constexpr,
):  # fmt: skip
    """Copies the rows of the selected tokens into the ring; 0 where there is none."""
    lefts, rights, ropes, full, empty = ring
    picks_ptr, position, width, begin = selection
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entries = begin + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    channels = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    turning = gl.arange(0, ROPE, gl.SliceLayout(0, layout))[None, :]
    tokens = _tokens(picks_ptr, entries, position, width, POOL)
    for tile in range(num_tiles):
        slot = tile % STAGES
        turn = (tile // STAGES) & 1
        present = tokens >= 0
        blocks = gl.load(table_ptr + tokens // PAGE, mask=present, other=0).to(gl.int64)
        rows = plane_ptr + (blocks * block_stride + tokens % PAGE * token_stride)[:, None]
        held = present[:, None]
        tokens = _tokens(picks_ptr, entries + (tile + 1) * KEYS, position, width, POOL)
        left = lefts.index(slot).reshape([KEYS, HALF])
        right = rights.index(slot).reshape([KEYS, HALF])
        rope = ropes.index(slot).reshape([KEYS, ROPE])
        mbarrier.wait(empty.index(2 * slot), turn ^ 1)
        async_copy.async_copy_global_to_shared(left, rows + channels, mask=held)
        async_copy.async_copy_global_to_shared(rope, rows + 2 * HALF + turning, mask=held)
        async_copy.mbarrier_arrive(full.index(2 * slot), increment_count=False)
        mbarrier.wait(empty.index(2 * slot + 1), turn ^ 1)
        async_copy.async_copy_global_to_shared(right, rows + HALF + channels, mask=held)
        async_copy.mbarrier_arrive(full.index(2 * slot + 1), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _wait_for_half(full, turn, SELECTED: gl.constexpr):
    mbarrier.wait(full, turn)
    if SELECTED:
        fence_async_shared()  # rows come by ordinary copies, which matrix instructions do not see of themselves


@gluon.jit
def _clear_rows(half, num_keys):
    """Zeros from row `num_keys` on: they may hold anything, NaN too, and a share of zero does not take that away."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    half.store(gl.where((rows < num_keys)[:, None], half.load(layout), 0.0))


@gluon.jit
def _load_query(q_ptr, q_head_stride, num_heads, channel, WIDTH: gl.constexpr):
    """[HEADS, WIDTH] of the query from a channel on, in shared memory; 0 where there is no head."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, layout))
    channels = channel + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    q = gl.load(
        q_ptr + heads[:, None] * q_head_stride + channels[None, :], mask=(heads < num_heads)[:, None], other=0.0
    )
    return gl.allocate_shared_memory(gl.bfloat16, [HEADS, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2), q)


@gluon.jit
def _store_half(out_ptr, acc, factors, num_heads, channel):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, layout))
    channels = channel + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    out = (acc * factors[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + heads[:, None] * (2 * HALF) + channels[None, :], out, mask=(heads < num_heads)[:, None])


@gluon.jit
def _score_and_weigh_left(
    q_ptr, q_head_stride, num_heads, selection, num_keys, num_tiles, scale, out_ptr, lses_ptr, ring, handed,
    SELECTED: gl.constexpr, POOL: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """The running softmax, as in kernels/triton_softmax.py, and the left half of what it weighs."""
    q_left = _load_query(q_ptr, q_head_stride, num_heads, 0, HALF)
    q_right = _load_query(q_ptr, q_head_stride, num_heads, HALF, HALF)
    q_rope = _load_query(q_ptr, q_head_stride, num_heads, 2 * HALF, ROPE)
    fence_async_shared()
    lefts, rights, ropes, full, empty = ring
    shares_shared, factors_shared, handed_over, taken = handed
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    best = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.full([HEADS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    zeros = gl.full([HEADS, KEYS], 0.0, gl.float32, s_layout)
    acc = gl.full([HEADS, HALF], 0.0, gl.float32, o_layout)
    steps = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    for tile in range(num_tiles):
        slot = tile % STAGES
        turn = (tile // STAGES) & 1
        left = lefts.index(slot).reshape([KEYS, HALF])
        right = rights.index(slot).reshape([KEYS, HALF])
        rope = ropes.index(slot).reshape([KEYS, ROPE])
        if SELECTED:
            picks_ptr, position, width, begin = selection
            seen = _tokens(picks_ptr, begin + tile * KEYS + steps, position, width, POOL) >= 0
        _wait_for_half(full.index(2 * slot), turn, SELECTED)
        scores = warpgroup_mma(q_left, left.permute([1, 0]), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_rope, rope.permute([1, 0]), scores, is_async=True)
        _wait_for_half(full.index(2 * slot + 1), turn, SELECTED)
        scores = warpgroup_mma(q_right, right.permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        if SELECTED:
            scores = gl.where(seen[None, :], scores, float("-inf"))
        else:
            keys_left = num_keys - tile * KEYS
            if keys_left < KEYS:
                scores = gl.where((steps < keys_left)[None, :], scores, float("-inf"))
                _clear_rows(left, keys_left)
                _clear_rows(right, keys_left)
        new_best = gl.maximum(best, gl.max(scores, 1) * scale)
        pivot = gl.where(new_best == float("-inf"), 0.0, new_best)
        shares = gl.exp2(scores * scale - pivot[:, None])
        factors = gl.exp2(best - pivot)
        best = new_best
        mbarrier.wait(taken, (tile & 1) ^ 1)
        shares_shared.store(shares.to(gl.bfloat16))
        factors_shared.store(factors)
        fence_async_shared()
        mbarrier.arrive(handed_over)
        total = total * factors + gl.sum(shares, 1)
        acc = acc * gl.convert_layout(factors, gl.SliceLayout(1, o_layout))[:, None]
        acc = warpgroup_mma(shares_shared, left, acc)
        mbarrier.arrive(empty.index(2 * slot))
    divisor = gl.where(total > 0, total, 1.0)
    mbarrier.wait(taken, (num_tiles & 1) ^ 1)
    factors_shared.store(1.0 / divisor)
    mbarrier.arrive(handed_over)
    _store_half(out_ptr, acc, gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout)), num_heads, 0)
    if WITH_LSE:
        heads = gl.arange(0, HEADS, gl.SliceLayout(1, s_layout))
        lse = gl.where(total > 0, (best + gl.log2(divisor)) * LN2, float("-inf"))
        gl.store(lses_ptr + heads, lse, mask=heads < num_heads)


@gluon.jit
def _weigh_right(num_heads, num_tiles, out_ptr, ring, handed, SELECTED: gl.constexpr):
    """The right half of what is weighed, tile by tile as the shares come."""
    _, rights, _, full, empty = ring
    shares_shared, factors_shared, handed_over, taken = handed
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    acc = gl.full([HEADS, HALF], 0.0, gl.float32, layout)
    for tile in range(num_tiles):
        slot = tile % STAGES
        right = rights.index(slot).reshape([KEYS, HALF])
        mbarrier.wait(handed_over, tile & 1)
        _wait_for_half(full.index(2 * slot + 1), (tile // STAGES) & 1, SELECTED)
        acc = acc * factors_shared.load(gl.SliceLayout(1, layout))[:, None]
        acc = warpgroup_mma(shares_shared, right, acc)
        mbarrier.arrive(taken)
        mbarrier.arrive(empty.index(2 * slot + 1))
    mbarrier.wait(handed_over, num_tiles & 1)
    _store_half(out_ptr, acc, factors_shared.load(gl.SliceLayout(1, layout)), num_heads, HALF)


@gluon.jit(do_not_specialize=["num_rows"])
def _attend_splits_kernel(
    q_ptr,  # [num_rows, num_heads, 2 * HALF + ROPE]
    half_bulk,  # descriptors of [num_blocks, KEYS, 2 * HALF + ROPE]
    rope_bulk,
    tables_ptr,
    num_keys_ptr,
    row_seqs_ptr,
    first_ptr,
    item_rows_ptr,
    outs_ptr,  # [most_items, num_heads, 2 * HALF] float32
    lses_ptr,  # [most_items, num_heads] float32
    num_rows,
    num_heads,
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    SPLIT: gl.constexpr,
):
    head = gl.program_id(0) * HEADS
    item = gl.program_id(1)
    here = item < gl.load(first_ptr + num_rows)
    row = gl.load(item_rows_ptr + item, mask=here, other=0)
    begin = (item - gl.load(first_ptr + row)) * SPLIT
    num_keys = gl.minimum(SPLIT, gl.load(num_keys_ptr + row) - begin)
    # Groups of warps start and end together: a program without an item walks no tile and stores no head.
    num_tiles = gl.where(here, (num_keys + KEYS - 1) // KEYS, 0)
    heads_left = gl.where(here, num_heads - head, 0)
    table_ptr = tables_ptr + gl.load(row_seqs_ptr + row).to(gl.int64) * table_stride + begin // KEYS
    q_ptr += row.to(gl.int64) * q_row_stride + head * q_head_stride
    place = item.to(gl.int64) * num_heads + head
    outs_ptr += place * (2 * HALF)
    lses_ptr += place
    ring = _make_ring(1)
    handed = _make_shares()
    gl.warp_specialize(
        [
            (_score_and_weigh_left, (q_ptr, q_head_stride, heads_left, None, num_keys, num_tiles, scale, outs_ptr,
                                     lses_ptr, ring, handed, False, 1, True)),
            (_weigh_right, (heads_left, num_tiles, outs_ptr, ring, handed, False)),
            (_bring_blocks, (half_bulk, rope_bulk, table_ptr, num_tiles, ring)),
        ],
        [4, 1],
        [216, 24],
    )  # fmt: skip


@gluon.jit
def _attend_selected_kernel(
    q_ptr,  # [num_rows, num_heads, 2 * HALF + ROPE]
    plane_ptr,  # [num_blocks, PAGE, 2 * HALF + ROPE]
    picks_ptr,
    positions_ptr,
    row_seqs_ptr,
    tables_ptr,
    outs_ptr,  # [num_rows, num_splits, num_heads, 2 * HALF], float32 where WITH_LSE
    lses_ptr,  # [num_rows, num_splits, num_heads] float32, or anything where not WITH_LSE
    num_heads,
    scale,
    width,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    picks_stride,
    table_stride,
    PAGE: gl.constexpr,
    POOL: gl.constexpr,
    SPLIT: gl.constexpr,
    WITH_LSE: gl.constexpr,
):
    head = gl.program_id(0) * HEADS
    split = gl.program_id(1)
    row = gl.program_id(2)
    begin = split * SPLIT
    num_tiles = (gl.minimum(SPLIT, width * POOL + POOL - 1 - begin) + KEYS - 1) // KEYS
    table_ptr = tables_ptr + gl.load(row_seqs_ptr + row).to(gl.int64) * table_stride
    selection = (picks_ptr + row.to(gl.int64) * picks_stride, gl.load(positions_ptr + row), width, begin)
    q_ptr += row.to(gl.int64) * q_row_stride + head * q_head_stride
    place = (row.to(gl.int64) * gl.num_programs(1) + split) * num_heads + head
    outs_ptr += place * (2 * HALF)
    if WITH_LSE:
        lses_ptr += place
    ring = _make_ring(128)  # each thread of the copying group arrives
    handed = _make_shares()
    gl.warp_specialize(
        [
            (_score_and_weigh_left, (q_ptr, q_head_stride, num_heads - head, selection, SPLIT, num_tiles, scale,
                                     outs_ptr, lses_ptr, ring, handed, True, POOL, WITH_LSE)),
            (_weigh_right, (num_heads - head, num_tiles, outs_ptr, ring, handed, True)),
            (_gather_rows, (plane_ptr, block_stride, token_stride, table_ptr, selection, num_tiles, ring, PAGE, POOL)),
        ],
        [4, 4],
        [200, 64],
    )  # fmt: skip


def grouped_mla(q: torch.Tensor, plane: torch.Tensor, plan: DecodePlan, *, scale: float) -> torch.Tensor:
    """As `mla_decode`, for what `is_fit` says."""
    num_rows, num_heads = q.shape[:2]
    _check(q, plane, scale)
    assert num_rows == plan.rows.num_keys.shape[0], "the plan is of another batch"
    assert plan.split % BLOCK == 0
    assert plane.shape[1] == BLOCK
    outs = torch.empty((plan.most_items, num_heads, LATENT_DIM), dtype=torch.float32, device=q.device)
    lses = torch.empty((plan.most_items, num_heads), dtype=torch.float32, device=q.device)
    _attend_splits_kernel[(triton.cdiv(num_heads, HEADS.value), plan.most_items)](
        q,
        _descriptor(plane, HALF.value),
        _descriptor(plane, ROPE.value),
        plan.rows.block_tables,
        plan.rows.num_keys,
        plan.rows.row_seqs,
        plan.first_items,
        plan.item_rows,
        outs,
        lses,
        num_rows,
        num_heads,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(1),
        plan.rows.block_tables.stride(0),
        SPLIT=plan.split,
        num_warps=4,
    )
    out = torch.empty((num_rows, num_heads, LATENT_DIM), dtype=q.dtype, device=q.device)
    merge_ragged(outs, lses, Parts(plan.first_items, plan.num_items), out)
    return out


def grouped_sparse_mla(
    q: torch.Tensor, plane: torch.Tensor, selected: SelectedRows, *, scale: float, split: int = 4096
) -> torch.Tensor:
    """As `sparse_mla_decode`, for what `is_fit` says. A selection of one split needs no merge."""
    num_rows, num_heads = q.shape[:2]
    _check(q, plane, scale)
    selected.check(num_rows)
    assert split % KEYS.value == 0
    num_splits = triton.cdiv(selected.num_entries, split)
    out = torch.empty((num_rows, num_heads, LATENT_DIM), dtype=q.dtype, device=q.device)
    outs, lses = out, None
    if num_splits > 1:
        outs = torch.empty((num_rows, num_splits, num_heads, LATENT_DIM), dtype=torch.float32, device=q.device)
        lses = torch.empty((num_rows, num_splits, num_heads), dtype=torch.float32, device=q.device)
    _attend_selected_kernel[(triton.cdiv(num_heads, HEADS.value), num_splits, num_rows)](
        q,
        plane,
        selected.picks,
        selected.positions,
        selected.row_seqs,
        selected.block_tables,
        outs,
        lses,
        num_heads,
        scale * LOG2E.value,
        selected.picks.shape[1],
        q.stride(0),
        q.stride(1),
        plane.stride(0),
        plane.stride(1),
        selected.picks.stride(0),
        selected.block_tables.stride(0),
        PAGE=plane.shape[1],
        POOL=selected.pool,
        SPLIT=split,
        WITH_LSE=lses is not None,
        num_warps=4,
    )
    if lses is not None:
        merge_partials(outs, lses, out, None)
    return out


def _descriptor(plane: torch.Tensor, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    return TensorDescriptor(plane, list(plane.shape), list(plane.stride()), [1, plane.shape[1], width], layout)


def _check(q: torch.Tensor, plane: torch.Tensor, scale: float) -> None:
    assert q.ndim == plane.ndim == 3
    assert q.shape[2] == plane.shape[2] == LATENT_DIM + ROPE_DIM
    assert q.dtype == plane.dtype == torch.bfloat16
    assert q.stride(2) == plane.stride(2) == 1
    assert scale > 0
