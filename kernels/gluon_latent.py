"""Latent attention with a role for each group of warps, for rows of 512 latent and 64 rotated channels.

The same computation as kernels/triton_mla.py with heads as rows, 64 to a program. One group scores a tile of 64 keys
and weighs the left half of its latent channels; the second weighs the right half, by shares that it finds in shared
memory; the third brings queries and tiles: whole blocks by the copy engine where all keys are attended to, rows one by
one where they were selected. A tile stands in shared memory once and serves both products. Its halves are freed as soon
as they are weighed, and filled again while the next tile is attended to. Programs take items (a row's split) in turns,
and the copying group is ahead of the others, into the next item too.

Written in Gluon; see kernels/gluon_paged_prefill.py.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon_interface import is_available, tile_layout
from kernels.gluon_latent_tiles import (
    HALF,
    HEADS,
    KEYS,
    ROPE,
    STAGES,
    bring_blocks,
    gather_rows,
    keys_of,
    make_query,
    make_ring,
)
from kernels.triton_chain import chained, hand_over, hold
from kernels.triton_paged_decode import NUM_MULTIPROCESSORS, DecodePlan
from kernels.triton_selected import SelectedRows
from kernels.triton_softmax import LOG2E, Parts, merge_partials, merge_ragged

BLOCK = 64  # tokens of a block
LATENT_DIM, ROPE_DIM = 512, 64
SELECTED_SPLIT = 4096  # entries of a selection that are attended to at once; decides bytes
LN2 = gl.constexpr(0.6931471805599453)


def is_fit(device: torch.device, *, block_size: int, latent_dim: int, rope_dim: int) -> bool:
    """Whether the kernels run there, for this model: their matrix instructions are those of sm_90 alone."""
    if device.type != "cuda" or not is_available() or block_size != BLOCK:
        return False
    return (latent_dim, rope_dim) == (LATENT_DIM, ROPE_DIM) and torch.cuda.get_device_capability(device)[0] == 9


@gluon.jit
def _make_shares():
    """What the scoring group hands over: a tile's shares, factors of what is summed; barriers of handing and taking."""
    shares = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
    factors = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    return shares, factors, barriers.index(0), barriers.index(1)


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
def _store_half(out_ptr, acc, factors, num_heads, channel):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, layout))
    channels = channel + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    out = (acc * factors[:, None]).to(out_ptr.dtype.element_ty)
    at = heads[:, None] * (2 * HALF) + channels[None, :]
    if out.dtype == gl.float32:
        # The merge reads these next: they outlast the keys in the cache.
        gl.store(out_ptr + at, out, mask=(heads < num_heads)[:, None], eviction_policy="evict_last")
    else:
        gl.store(out_ptr + at, out, mask=(heads < num_heads)[:, None])


@gluon.jit
def _score_and_weigh_left(
    num_items, work, query, num_heads, heads_left, biases, scale, outs_ptr, lses_ptr, ring, handed,
    SPLIT: gl.constexpr, SELECTED: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """The running softmax, as in kernels/triton_softmax.py, and the left half of what it weighs."""
    lefts, rights, ropes, full, empty = ring
    q_left, q_right, q_rope, query_full, query_empty = query
    q_left = q_left.reshape([HEADS, HALF])
    q_right = q_right.reshape([HEADS, HALF])
    q_rope = q_rope.reshape([HEADS, ROPE])
    shares_shared, factors_shared, handed_over, taken = handed
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    zeros = gl.full([HEADS, KEYS], 0.0, gl.float32, s_layout)
    steps = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    step = 0
    query_turn = 0
    share_turn = 0
    for item in range(gl.program_id(1), num_items, gl.num_programs(1)):
        num_keys = keys_of(item, work, SPLIT, SELECTED)
        best = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        total = gl.full([HEADS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.full([HEADS, HALF], 0.0, gl.float32, o_layout)
        mbarrier.wait(query_full, query_turn)
        query_turn ^= 1
        for start in range(0, num_keys, KEYS):
            slot = step % STAGES
            turn = (step // STAGES) & 1
            left = lefts.index(slot).reshape([KEYS, HALF])
            right = rights.index(slot).reshape([KEYS, HALF])
            rope = ropes.index(slot).reshape([KEYS, ROPE])
            _wait_for_half(full.index(2 * slot), turn, SELECTED)
            scores = warpgroup_mma(q_left, left.permute([1, 0]), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma(q_rope, rope.permute([1, 0]), scores, is_async=True)
            _wait_for_half(full.index(2 * slot + 1), turn, SELECTED)
            scores = warpgroup_mma(q_right, right.permute([1, 0]), scores, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            keys_left = num_keys - start
            if keys_left <= KEYS:
                mbarrier.arrive(query_empty)
            if SELECTED:
                scores += biases.index(slot).load(gl.SliceLayout(0, s_layout))[None, :]
            else:
                if keys_left < KEYS:
                    scores = gl.where((steps < keys_left)[None, :], scores, float("-inf"))
                    _clear_rows(left, keys_left)
                    _clear_rows(right, keys_left)
            new_best = gl.maximum(best, gl.max(scores, 1) * scale)
            pivot = gl.where(new_best == float("-inf"), 0.0, new_best)
            shares = gl.exp2(scores * scale - pivot[:, None])
            factors = gl.exp2(best - pivot)
            best = new_best
            acc = acc * gl.convert_layout(factors, gl.SliceLayout(1, o_layout))[:, None]
            mbarrier.wait(taken, share_turn ^ 1)
            shares_shared.store(shares.to(gl.bfloat16))
            factors_shared.store(factors)
            fence_async_shared()
            mbarrier.arrive(handed_over)
            share_turn ^= 1
            weighed = warpgroup_mma(shares_shared, left, acc, is_async=True)
            total = total * factors + gl.sum(shares, 1)
            acc = warpgroup_mma_wait(0, [weighed])
            mbarrier.arrive(empty.index(2 * slot))
            step += 1
        divisor = gl.where(total > 0, total, 1.0)
        factors = 1.0 / divisor
        mbarrier.wait(taken, share_turn ^ 1)
        factors_shared.store(factors)
        mbarrier.arrive(handed_over)
        share_turn ^= 1
        place = item.to(gl.int64) * num_heads
        factors = gl.convert_layout(factors, gl.SliceLayout(1, o_layout))
        _store_half(outs_ptr + place * (2 * HALF), acc, factors, heads_left, 0)
        if WITH_LSE:
            heads = gl.arange(0, HEADS, gl.SliceLayout(1, s_layout))
            lse = gl.where(total > 0, (best + gl.log2(divisor)) * LN2, float("-inf"))
            gl.store(lses_ptr + place + heads, lse, mask=heads < heads_left)


@gluon.jit
def _weigh_right(
    num_items, work, num_heads, heads_left, outs_ptr, ring, handed, SPLIT: gl.constexpr, SELECTED: gl.constexpr
):
    """The right half of what is weighed, tile by tile as the shares come; last come the divisors."""
    _lefts, rights, _ropes, full, empty = ring
    shares_shared, factors_shared, handed_over, taken = handed
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    step = 0
    share_turn = 0
    for item in range(gl.program_id(1), num_items, gl.num_programs(1)):
        num_keys = keys_of(item, work, SPLIT, SELECTED)
        acc = gl.full([HEADS, HALF], 0.0, gl.float32, layout)
        for _start in range(0, num_keys, KEYS):
            slot = step % STAGES
            right = rights.index(slot).reshape([KEYS, HALF])
            mbarrier.wait(handed_over, share_turn)
            _wait_for_half(full.index(2 * slot + 1), (step // STAGES) & 1, SELECTED)
            acc = acc * factors_shared.load(gl.SliceLayout(1, layout))[:, None]
            acc = warpgroup_mma(shares_shared, right, acc)
            mbarrier.arrive(taken)
            mbarrier.arrive(empty.index(2 * slot + 1))
            share_turn ^= 1
            step += 1
        mbarrier.wait(handed_over, share_turn)
        factors = factors_shared.load(gl.SliceLayout(1, layout))
        mbarrier.arrive(taken)
        share_turn ^= 1
        _store_half(outs_ptr + item.to(gl.int64) * num_heads * (2 * HALF), acc, factors, heads_left, HALF)


@gluon.jit(do_not_specialize=["num_rows"])
def _attend_splits_kernel(
    q_half_bulk,  # descriptors of [num_rows, num_heads, 2 * HALF + ROPE]
    q_rope_bulk,
    half_bulk,  # descriptors of [num_blocks, KEYS, 2 * HALF + ROPE]
    rope_bulk,
    tables_ptr,
    first_ptr,
    items_ptr,
    outs_ptr,  # [most_items, num_heads, 2 * HALF] float32
    lses_ptr,  # [most_items, num_heads] float32
    num_rows,
    num_heads,
    scale,
    table_stride,
    CHAINED: gl.constexpr,
):
    hold(CHAINED)
    head = gl.program_id(0) * HEADS
    num_items = gl.load(first_ptr + num_rows)
    outs_ptr += head * (2 * HALF)
    lses_ptr += head
    query = make_query()
    ring = make_ring(1, 1)
    handed = _make_shares()
    gl.warp_specialize(
        [
            (_score_and_weigh_left, (num_items, items_ptr, query, num_heads, num_heads - head, None, scale, outs_ptr,
                                     lses_ptr, ring, handed, 0, False, True)),
            (_weigh_right, (num_items, items_ptr, num_heads, num_heads - head, outs_ptr, ring, handed, 0, False)),
            (bring_blocks, (num_items, items_ptr, q_half_bulk, q_rope_bulk, query, half_bulk, rope_bulk, tables_ptr,
                             table_stride, ring)),
        ],
        [4, 1],
        [208, 40],
    )  # fmt: skip
    hand_over(CHAINED)


@gluon.jit(do_not_specialize=["num_rows"])
def _attend_selected_kernel(
    q_half_bulk,  # descriptors of [num_rows, num_heads, 2 * HALF + ROPE]
    q_rope_bulk,
    plane_ptr,  # [num_blocks, PAGE, 2 * HALF + ROPE]
    picks_ptr,
    positions_ptr,
    row_seqs_ptr,
    tables_ptr,
    outs_ptr,  # [num_rows, num_splits, num_heads, 2 * HALF], float32 where WITH_LSE
    lses_ptr,  # [num_rows, num_splits, num_heads] float32, or anything where not WITH_LSE
    num_rows,
    num_splits,
    num_heads,
    scale,
    width,
    block_stride,
    token_stride,
    picks_stride,
    table_stride,
    PAGE: gl.constexpr,
    POOL: gl.constexpr,
    SPLIT: gl.constexpr,
    WITH_LSE: gl.constexpr,
    CHAINED: gl.constexpr,
):
    hold(CHAINED)
    head = gl.program_id(0) * HEADS
    num_items = num_rows * num_splits
    work = (num_splits, width * POOL + POOL - 1)
    plane = (plane_ptr, block_stride, token_stride)
    tables = (tables_ptr, row_seqs_ptr, table_stride)
    selection = (picks_ptr, positions_ptr, picks_stride, width)
    outs_ptr += head * (2 * HALF)
    if WITH_LSE:
        lses_ptr += head
    query = make_query()
    ring = make_ring(128 + 1, 128)  # each thread of the copying group arrives, and the group once for the biases
    biases = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    handed = _make_shares()
    gl.warp_specialize(
        [
            (_score_and_weigh_left, (num_items, work, query, num_heads, num_heads - head, biases, scale, outs_ptr,
                                     lses_ptr, ring, handed, SPLIT, True, WITH_LSE)),
            (_weigh_right, (num_items, work, num_heads, num_heads - head, outs_ptr, ring, handed, SPLIT, True)),
            (gather_rows, (num_items, work, q_half_bulk, q_rope_bulk, query, plane, tables, selection, biases, ring,
                            SPLIT, PAGE, POOL)),
        ],
        [4, 4],
        [200, 64],
    )  # fmt: skip
    hand_over(CHAINED)


def grouped_mla(q: torch.Tensor, plane: torch.Tensor, plan: DecodePlan, *, scale: float) -> torch.Tensor:
    """As `mla_decode`, for what `is_fit` says."""
    num_rows, num_heads = q.shape[:2]
    _check(q, plane, scale)
    assert num_rows == plan.rows.num_keys.shape[0], "the plan is of another batch"
    assert plan.step % BLOCK == 0
    assert plane.shape[1] == BLOCK
    outs = torch.empty((plan.most_items, num_heads, LATENT_DIM), dtype=torch.float32, device=q.device)
    lses = torch.empty((plan.most_items, num_heads), dtype=torch.float32, device=q.device)
    _attend_splits_kernel[_programs(num_heads, plan.most_items)](
        _descriptor(q, HEADS.value, HALF.value),
        _descriptor(q, HEADS.value, ROPE.value),
        _descriptor(plane, BLOCK, HALF.value),
        _descriptor(plane, BLOCK, ROPE.value),
        plan.rows.block_tables,
        plan.first_items,
        plan.items,
        outs,
        lses,
        num_rows,
        num_heads,
        scale * LOG2E.value,
        plan.rows.block_tables.stride(0),
        num_warps=4,
        **chained(),
    )
    out = torch.empty((num_rows, num_heads, LATENT_DIM), dtype=q.dtype, device=q.device)
    merge_ragged(outs, lses, Parts(plan.first_items, plan.num_items), out)
    return out


def grouped_sparse_mla(
    q: torch.Tensor, plane: torch.Tensor, selected: SelectedRows, *, scale: float, split: int = SELECTED_SPLIT
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
    _attend_selected_kernel[_programs(num_heads, num_rows * num_splits)](
        _descriptor(q, HEADS.value, HALF.value),
        _descriptor(q, HEADS.value, ROPE.value),
        plane,
        selected.picks,
        selected.positions,
        selected.row_seqs,
        selected.block_tables,
        outs,
        lses,
        num_rows,
        num_splits,
        num_heads,
        scale * LOG2E.value,
        selected.picks.shape[1],
        plane.stride(0),
        plane.stride(1),
        selected.picks.stride(0),
        selected.block_tables.stride(0),
        PAGE=plane.shape[1],
        POOL=selected.pool,
        SPLIT=split,
        WITH_LSE=lses is not None,
        num_warps=4,
        **chained(),
    )
    if lses is not None:
        merge_partials(outs, lses, out, None)
    return out


def _programs(num_heads: int, num_items: int) -> tuple[int, int]:
    """One for each multiprocessor, or each item where those are fewer; they share no multiprocessor."""
    tiles = -(-num_heads // HEADS.value)
    return tiles, min(num_items, max(1, NUM_MULTIPROCESSORS // tiles))


def _descriptor(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, width], tile_layout(3))


def _check(q: torch.Tensor, plane: torch.Tensor, scale: float) -> None:
    assert q.ndim == plane.ndim == 3
    assert q.shape[2] == plane.shape[2] == LATENT_DIM + ROPE_DIM
    assert q.dtype == plane.dtype == torch.bfloat16
    assert q.stride(2) == plane.stride(2) == 1
    assert scale > 0
