"""Chunk attention with a role for each group of warps: two attend 64 rows each, one brings the blocks of keys.

The same computation as kernels/triton_paged_prefill.py, tile for tile. The groups meet at barriers in shared memory
only, so that one multiplies while the other takes its exponentials. It is written in Gluon, Triton's lower level, whose
interface is experimental; kernels/gluon_interface.py says whether this Triton has it.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from kernels.gluon_interface import bring_tile, head_blocks, is_available
from kernels.launch_table import Tunable, one_bucket
from kernels.triton_paged_prefill import SPLIT_STEP, PrefillOutput, PrefillPlan

BLOCK = 64  # tokens of a block
HEAD_DIMS = (64, 128, 256)
LN2 = gl.constexpr(0.6931471805599453)
ROWS_PER_TILE = 128  # of a program: two groups of GROUP_ROWS
GROUP_ROWS = gl.constexpr(64)


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """How a launch runs; blocks are folded one by one in any case."""

    num_stages: int  # blocks of keys and of values in flight


GROUPS = Tunable(
    "grouped_prefill", ("head_dim",), lambda head_dim: one_bucket(GroupTiles(2 if head_dim == 256 else 3)), neutral=True
)


def is_fit(device: torch.device, *, block_size: int, head_dim: int) -> bool:
    """Whether `grouped_prefill` runs there, for this model: its matrix instructions are those of sm_90 alone."""
    if device.type != "cuda" or not is_available() or block_size != BLOCK or head_dim not in HEAD_DIMS:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@gluon.jit
def _bring_blocks(k_bulk, v_bulk, table_ptr, num_tiles, kv_head, k_ring, v_ring, full, empty, STAGES: gl.constexpr):
    """Copies block after block of keys and values into the rings, as fast as their slots become free.

    `tile` counts from the first block of this program in all of these functions.
    """
    for tile in range(num_tiles):
        slot = tile % STAGES
        turn = (tile // STAGES) & 1
        block = gl.load(table_ptr + tile).to(gl.int32)
        place = [block, kv_head, 0, 0]
        mbarrier.wait(empty.index(2 * slot), turn ^ 1)
        mbarrier.expect(full.index(2 * slot), k_bulk.block_type.nbytes)
        bring_tile(k_bulk, place, full.index(2 * slot), k_ring.index(slot))
        mbarrier.wait(empty.index(2 * slot + 1), turn ^ 1)
        mbarrier.expect(full.index(2 * slot + 1), v_bulk.block_type.nbytes)
        bring_tile(v_bulk, place, full.index(2 * slot + 1), v_ring.index(slot))


@gluon.jit
def _fold_block(
    tile, q, k_ring, v_ring, full, empty, position, num_keys, scale, best, total, acc,
    LAST: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One block into the running softmax of a group's rows; LAST where some rows do not see all of it."""
    slot = tile % STAGES
    turn = (tile // STAGES) & 1
    zeros = gl.full([GROUP_ROWS, KEYS], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(full.index(2 * slot), turn)
    k = k_ring.index(slot).reshape([KEYS, DIM]).permute([1, 0])
    scores = warpgroup_mma(q, k, zeros, use_acc=False)
    mbarrier.arrive(empty.index(2 * slot))
    if LAST:
        keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
        positions = position + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S_LAYOUT))
        seen = (keys[None, :] <= positions[:, None]) & (keys < num_keys)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * scale)
    shares = gl.exp2(scores * scale - new_best[:, None])
    keep = gl.exp2(best - new_best)
    total = total * keep + gl.sum(shares, 1)
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(shares.to(gl.bfloat16), gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(full.index(2 * slot + 1), turn)
    v = v_ring.index(slot).reshape([KEYS, DIM])
    if LAST:  # noqa: SIM102 - decided while compiling
        if (tile + 1) * KEYS > num_keys:
            # Rows past the end may hold anything, NaN too, and a share of zero does not take that away. Both groups
            # write the same, so that it does not matter which comes first.
            copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            rows = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, copied))
            v.store(gl.where((rows < num_keys)[:, None], v.load(copied), 0.0))
            fence_async_shared()
    acc = warpgroup_mma(p, v, acc)
    mbarrier.arrive(empty.index(2 * slot + 1))
    return new_best, total, acc


@gluon.jit
def _attend_rows(
    q_ptr, out_ptr, lse_ptr, first, num_rows, position, num_keys, end, scale, q_row_stride, out_row_stride, q_shared,
    k_ring, v_ring, full, empty, STAGES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, Q_SHARED: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Rows [first, first + GROUP_ROWS) of a tile of `num_rows` rows, whose first is at `position`.

    `position`, `num_keys` and the `end` of the split count from the program's first key, as tiles do.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    read_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, read_layout))
    channels = gl.arange(0, DIM, gl.SliceLayout(0, read_layout))
    at = rows[:, None] * q_row_stride + channels[None, :]
    q_read = gl.load(q_ptr + at, mask=(rows < num_rows)[:, None], other=0.0)
    if Q_SHARED:
        q = q_shared
        q.store(q_read)
        fence_async_shared()
    else:
        q = gl.convert_layout(q_read, gl.DotOperandLayout(0, s_layout, 2))
    best = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.full([GROUP_ROWS, DIM], 0.0, gl.float32, o_layout)
    # Every row of the tile sees all of the blocks before this one.
    common = (position + 1) // KEYS
    if SPLIT:
        common = gl.minimum(common, end // KEYS)  # where it is not the last split, a whole number of blocks
    else:
        end = num_keys
    for tile in range(0, common):
        best, total, acc = _fold_block(
            tile, q, k_ring, v_ring, full, empty, position + first, num_keys, scale, best, total, acc,
            False, STAGES, KEYS, DIM, s_layout, o_layout,
        )  # fmt: skip
    for tile in range(common, (end + KEYS - 1) // KEYS):
        best, total, acc = _fold_block(
            tile, q, k_ring, v_ring, full, empty, position + first, num_keys, scale, best, total, acc,
            True, STAGES, KEYS, DIM, s_layout, o_layout,
        )  # fmt: skip
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    out_rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, o_layout))
    out_channels = gl.arange(0, DIM, gl.SliceLayout(0, o_layout))
    out_at = out_rows[:, None] * out_row_stride + out_channels[None, :]
    gl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=(out_rows < num_rows)[:, None])
    if SPLIT:
        lse_rows = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, s_layout))
        lse_at = lse_ptr + lse_rows * (out_row_stride // DIM)
        gl.store(lse_at, (best + gl.log2(total)) * LN2, mask=lse_rows < num_rows)


@gluon.jit
def _attend_chunk_kernel(
    q_ptr,  # [num_rows, num_heads, DIM]
    k_bulk,  # descriptors of [num_blocks, num_kv_heads, KEYS, DIM]
    v_bulk,
    items_ptr,
    tables_ptr,
    out_ptr,  # [num_rows, num_splits, num_heads, DIM]
    lse_ptr,  # [num_rows, num_splits, num_heads], written where SPLIT
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    num_splits,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    Q_SHARED: gl.constexpr,
    SPLIT: gl.constexpr,
):
    item_ptr = items_ptr + gl.program_id(0) * 7
    head = gl.program_id(1)
    begin = gl.load(item_ptr + 4) if SPLIT else 0
    table_ptr = tables_ptr + gl.load(item_ptr).to(gl.int64) * table_stride + begin // KEYS
    first_row = gl.load(item_ptr + 1).to(gl.int64)
    num_rows = gl.load(item_ptr + 2)
    position = gl.load(item_ptr + 3) - begin
    num_keys = position + num_rows
    end = gl.load(item_ptr + 5) - begin if SPLIT else num_keys
    q_ptr += first_row * q_row_stride + head * q_head_stride
    place = (first_row * num_splits + gl.load(item_ptr + 6)) * NUM_HEADS + head
    out_ptr += place * DIM
    out_row_stride = num_splits * NUM_HEADS * DIM
    if SPLIT:
        lse_ptr += place
    k_ring = gl.allocate_shared_memory(k_bulk.dtype, [STAGES, 1, 1, KEYS, DIM], k_bulk.layout)
    v_ring = gl.allocate_shared_memory(v_bulk.dtype, [STAGES, 1, 1, KEYS, DIM], v_bulk.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    Q_ROWS: gl.constexpr = GROUP_ROWS if Q_SHARED else 8
    q_shared = gl.allocate_shared_memory(k_bulk.dtype, [2, Q_ROWS, DIM], q_layout)
    # Even: keys, odd: values. Full once the bytes have come, empty once both groups are done with them.
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_attend_rows, (q_ptr, out_ptr, lse_ptr, 0, num_rows, position, num_keys, end, scale, q_row_stride,
                            out_row_stride, q_shared.index(0), k_ring, v_ring, full, empty, STAGES, KEYS, DIM,
                            Q_SHARED, SPLIT)),
            (_attend_rows, (q_ptr, out_ptr, lse_ptr, GROUP_ROWS, num_rows, position, num_keys, end, scale,
                            q_row_stride, out_row_stride, q_shared.index(1), k_ring, v_ring, full, empty, STAGES,
                            KEYS, DIM, Q_SHARED, SPLIT)),
            (_bring_blocks, (k_bulk, v_bulk, table_ptr, (end + KEYS - 1) // KEYS, head // GROUP, k_ring, v_ring,
                             full, empty, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def grouped_prefill(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    tiles: GroupTiles | None = None,
) -> torch.Tensor:
    """As `paged_prefill`, for what `is_fit` says and a plan with tiles of ROWS_PER_TILE rows."""
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_plane.shape[1:3]
    assert num_rows == plan.num_rows, "the plan is of another batch"
    assert plan.rows_per_tile == ROWS_PER_TILE, "the plan has other tiles"
    assert block_size == BLOCK
    assert head_dim in HEAD_DIMS
    assert scale > 0
    assert q.dtype == k_plane.dtype == v_plane.dtype == torch.bfloat16
    assert q.stride(2) == k_plane.stride(3) == 1
    assert k_plane.shape == v_plane.shape
    assert k_plane.stride() == v_plane.stride()
    assert k_plane.shape[3] == head_dim
    assert num_heads % num_kv_heads == 0, "query heads are a multiple of key heads"
    assert plan.block_tables.stride(1) == 1
    assert SPLIT_STEP % block_size == 0
    output = PrefillOutput.of(q, plan, out)
    tiles = tiles or GROUPS.look_up(q.device, head_dim=head_dim)
    k_bulk, v_bulk = (head_blocks(plane) for plane in (k_plane, v_plane))
    _attend_chunk_kernel[(plan.items.shape[0], num_heads)](
        q,
        k_bulk,
        v_bulk,
        plan.items,
        plan.block_tables,
        output.outs,
        output.lses,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        plan.block_tables.stride(0),
        plan.num_splits,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        KEYS=block_size,
        DIM=head_dim,
        STAGES=tiles.num_stages,
        Q_SHARED=head_dim == 256,
        SPLIT=output.lses is not None,
        num_warps=4,
    )
    return output.merged()
