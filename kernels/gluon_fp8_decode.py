"""Splits of single rows' histories in float8_e4m3fn, with a role for each group of warps.

The same splits as kernels/triton_paged_decode.py. A program stays on its multiprocessor and takes split after split:
one warp brings blocks of keys and values, ahead by as many as the rings hold and over the borders of splits, and a
group of four attends to them. Keys are the rows of the products and query heads their columns.

Two neighbouring channels are one 16-bit word, and words are what is copied and what the matrix instructions' own loads
bring into registers, transposed for values. There each becomes float16, which holds every float8: the channels of two
keys come apart into two operands, so scores are the sum of two products and outputs have two halves. It is written in
Gluon, as kernels/gluon_paged_prefill.py is.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass

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

from kernels.gluon_interface import bring_tile, head_blocks, is_available
from kernels.triton_chain import chained, hand_over, hold
from kernels.triton_softmax import LN2, LOG2E

BLOCK = 64  # tokens of a block
MOST_GROUP = 16  # query heads of a key head that shared memory has room for
NUM_MULTIPROCESSORS = 132  # of the card that it was measured on

# Two words, four channels: the first two, and the last two.
IN_ORDER = gl.constexpr("""{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")
# Two words: the low bytes of both, and the high ones.
APART = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 sorted;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def _num_programs(num_work):
    """How many programs take work: so many that all take as much."""
    rounds = gl.maximum((num_work + gl.num_programs(0) - 1) // gl.num_programs(0), 1)
    return gl.maximum((num_work + rounds - 1) // rounds, 1)


@gluon.jit
def _bring_blocks(
    k_bulk, v_bulk, tables_ptr, items_ptr, num_items, table_stride, k_ring, v_ring, full, empty,
    NUM_KV_HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the blocks of split after split into the rings, as fast as their slots become free."""
    num_work = num_items * NUM_KV_HEADS
    step = _num_programs(num_work)
    work = gl.program_id(0)
    n = 0
    if work < step:
        item_ptr = items_ptr + work // NUM_KV_HEADS * 4
        begin = gl.load(item_ptr + 1)
        end = gl.load(item_ptr + 2)
        table_ptr = tables_ptr + gl.load(item_ptr + 3).to(gl.int64) * table_stride
        block = gl.load(table_ptr + begin // KEYS)
        for now in range(work, num_work, step):
            # What comes next is looked up one split ahead, and its first block one block ahead.
            item_ptr = items_ptr + gl.minimum(now + step, num_work - 1) // NUM_KV_HEADS * 4
            next_begin = gl.load(item_ptr + 1)
            next_end = gl.load(item_ptr + 2)
            next_table_ptr = tables_ptr + gl.load(item_ptr + 3).to(gl.int64) * table_stride
            head = now % NUM_KV_HEADS
            first = begin // KEYS
            last = (end - 1) // KEYS
            tiles = (last - first + 2) // 2 * 2  # they are attended to in pairs; the last one may come twice
            for tile in range(first, first + tiles):
                slot = n % STAGES
                turn = (n // STAGES) & 1
                n += 1
                place = [block.to(gl.int32), head, 0, 0]
                ahead_ptr = table_ptr + gl.minimum(tile + 1, last)
                if tile + 1 == first + tiles:
                    ahead_ptr = next_table_ptr + next_begin // KEYS
                block = gl.load(ahead_ptr)
                mbarrier.wait(empty.index(2 * slot), turn ^ 1)
                mbarrier.expect(full.index(2 * slot), k_bulk.block_type.nbytes)
                bring_tile(k_bulk, place, full.index(2 * slot), k_ring.index(slot))
                mbarrier.wait(empty.index(2 * slot + 1), turn ^ 1)
                mbarrier.expect(full.index(2 * slot + 1), v_bulk.block_type.nbytes)
                bring_tile(v_bulk, place, full.index(2 * slot + 1), v_ring.index(slot))
            begin = next_begin
            end = next_end
            table_ptr = next_table_ptr


@gluon.jit
def _float16(words, HOW: gl.constexpr):
    return gl.inline_asm_elementwise(HOW, "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _score_block(
    n, q_shared, k_ring, full, empty, KEYS: gl.constexpr, DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr
):
    """Starts the products of one block of keys with the query."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    slot = n % STAGES
    mbarrier.wait(full.index(2 * slot), (n // STAGES) & 1)
    words = k_ring.index(slot).reshape([KEYS, DIM]).load(gl.DotOperandLayout(0, mma, 2))
    mbarrier.arrive(empty.index(2 * slot))
    first, second = _float16(words, IN_ORDER)
    scores = gl.full([KEYS, N], 0.0, gl.float32, mma)
    scores = warpgroup_mma(first, q_shared.index(0).permute([1, 0]), scores, use_acc=False, is_async=True)
    return warpgroup_mma(second, q_shared.index(1).permute([1, 0]), scores, is_async=True)


@gluon.jit
def _weigh_block(
    n, start, end, p_shared, v_ring, full, empty, low, high,
    KEYS: gl.constexpr, DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds one block of values, weighed by the shares in `p_shared`, to both halves of the output."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = n % STAGES
    mbarrier.wait(full.index(2 * slot + 1), (n // STAGES) & 1)
    v = v_ring.index(slot).reshape([KEYS, DIM])
    if start + KEYS > end:
        # Rows past the end may hold anything, NaN too, and a share of zero does not take that away.
        rows = start + gl.arange(0, KEYS, gl.SliceLayout(1, copied))
        v.store(gl.where((rows < end)[:, None], v.load(copied), 0))
        fence_async_shared()  # before the slot is filled again
    words = v.permute([1, 0]).load(gl.DotOperandLayout(0, mma, 2))
    mbarrier.arrive(empty.index(2 * slot + 1))
    even, odd = _float16(words, APART)
    low = warpgroup_mma(even, p_shared.permute([1, 0]), low, is_async=True)
    high = warpgroup_mma(odd, p_shared.permute([1, 0]), high, is_async=True)
    return warpgroup_mma_wait(0, deps=(low, high))


@gluon.jit
def _attend_blocks(
    q_ptr, items_ptr, num_items, outs_ptr, lses_ptr, scale, q_row_stride, q_head_stride, q_shared,
    p_shared, k_ring, v_ring, full, empty, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr,
    DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The running softmax of split after split, two blocks at once; DIM counts words."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    of_keys: gl.constexpr = gl.SliceLayout(1, mma)
    of_heads: gl.constexpr = gl.SliceLayout(0, mma)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = 0
    num_work = num_items * NUM_KV_HEADS
    step = _num_programs(num_work)
    for work in range(gl.where(gl.program_id(0) < step, gl.program_id(0), num_work), num_work, step):
        item = work // NUM_KV_HEADS
        head = work % NUM_KV_HEADS
        row = gl.load(items_ptr + 4 * item).to(gl.int64)
        begin = gl.load(items_ptr + 4 * item + 1)
        end = gl.load(items_ptr + 4 * item + 2)
        group = gl.arange(0, N, gl.SliceLayout(1, copied))
        words = gl.arange(0, DIM, gl.SliceLayout(0, copied))
        q_at = row * q_row_stride + (head * GROUP + group)[:, None] * q_head_stride
        q_at += (words // 2 * 4 + words % 2)[None, :]  # the channels of IN_ORDER
        first = gl.load(q_ptr + q_at, mask=(group < GROUP)[:, None], other=0.0).to(gl.float32)
        second = gl.load(q_ptr + q_at + 2, mask=(group < GROUP)[:, None], other=0.0).to(gl.float32)
        # float16 holds the query once that is divided by its largest value.
        most = gl.maximum(gl.max(gl.max(gl.maximum(gl.abs(first), gl.abs(second)), 1), 0), 1e-30)
        q_shared.index(0).store((first / most).to(gl.float16))
        q_shared.index(1).store((second / most).to(gl.float16))
        fence_async_shared()
        factor = scale * most
        best = gl.full([N], float("-inf"), gl.float32, of_heads)
        totals = gl.full([KEYS, N], 0.0, gl.float32, mma)
        low = gl.full([DIM, N], 0.0, gl.float32, mma)
        high = gl.full([DIM, N], 0.0, gl.float32, mma)
        keys = gl.arange(0, KEYS, of_keys)
        for start in range(begin, end, 2 * KEYS):
            a = _score_block(n, q_shared, k_ring, full, empty, KEYS, DIM, N, STAGES)
            b = _score_block(n + 1, q_shared, k_ring, full, empty, KEYS, DIM, N, STAGES)
            a, b = warpgroup_mma_wait(0, deps=(a, b))
            a = gl.where((start + keys < end)[:, None], a * factor, float("-inf"))
            b = gl.where((start + KEYS + keys < end)[:, None], b * factor, float("-inf"))
            # Every pair of blocks has a key that is seen, so `best` is a number from the first one on.
            new_best = gl.maximum(best, gl.max(gl.maximum(a, b), 0))
            a = gl.exp2(a - new_best[None, :])
            b = gl.exp2(b - new_best[None, :])
            keep = gl.exp2(best - new_best)[None, :]
            best = new_best
            totals = totals * keep + (a + b)
            p_shared.index(0).permute([1, 0]).store(a.to(gl.float16))
            p_shared.index(1).permute([1, 0]).store(b.to(gl.float16))
            fence_async_shared()
            low, high = _weigh_block(
                n, start, end, p_shared.index(0), v_ring, full, empty, low * keep, high * keep, KEYS, DIM, N, STAGES
            )
            low, high = _weigh_block(
                n + 1, start + KEYS, end, p_shared.index(1), v_ring, full, empty, low, high, KEYS, DIM, N, STAGES
            )
            n += 2
        total = gl.sum(totals, 0)
        heads = gl.arange(0, N, of_heads)
        place = item.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + heads
        at = place[None, :] * (2 * DIM) + 2 * gl.arange(0, DIM, of_keys)[:, None]
        gl.store(outs_ptr + at, low / total[None, :], mask=(heads < GROUP)[None, :], eviction_policy="evict_last")
        gl.store(outs_ptr + at + 1, high / total[None, :], mask=(heads < GROUP)[None, :], eviction_policy="evict_last")
        gl.store(lses_ptr + place, (best + gl.log2(total)) * LN2, mask=heads < GROUP, eviction_policy="evict_last")


@gluon.jit(do_not_specialize=["num_rows"])
def _attend_splits_kernel(
    q_ptr,  # [num_rows, NUM_KV_HEADS * GROUP, 2 * DIM]
    k_bulk,  # descriptors of [num_blocks, num_kv_heads, KEYS, DIM] words
    v_bulk,
    tables_ptr,
    first_ptr,
    items_ptr,
    outs_ptr,  # [most_items, NUM_KV_HEADS * GROUP, 2 * DIM] float32
    lses_ptr,  # [most_items, NUM_KV_HEADS * GROUP] float32
    num_rows,
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    CHAINED: gl.constexpr,
):
    hold(CHAINED)
    num_items = gl.load(first_ptr + num_rows)
    k_ring = gl.allocate_shared_memory(k_bulk.dtype, [STAGES, 1, 1, KEYS, DIM], k_bulk.layout)
    v_ring = gl.allocate_shared_memory(v_bulk.dtype, [STAGES, 1, 1, KEYS, DIM], v_bulk.layout)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_shared = gl.allocate_shared_memory(gl.float16, [2, N, DIM], rows_layout)
    p_shared = gl.allocate_shared_memory(gl.float16, [2, N, KEYS], rows_layout)
    # Even: keys, odd: values. Full once the bytes have come, empty once they were attended to.
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_attend_blocks, (q_ptr, items_ptr, num_items, outs_ptr, lses_ptr, scale, q_row_stride, q_head_stride,
                              q_shared, p_shared, k_ring, v_ring, full, empty, NUM_KV_HEADS, GROUP, KEYS, DIM, N,
                              STAGES)),
            (_bring_blocks, (k_bulk, v_bulk, tables_ptr, items_ptr, num_items, table_stride, k_ring, v_ring, full,
                             empty, NUM_KV_HEADS, KEYS, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip
    hand_over(CHAINED)


@dataclass(frozen=True, slots=True)
class Splits:
    """What there is to do, and where results go."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32 or int64
    first_items: torch.Tensor  # [num_rows + 1] int32; the last one: how many items there are
    items: torch.Tensor  # [most_items, 4] int32: row, first key (a multiple of BLOCK), key after the last, sequence
    outs: torch.Tensor  # [most_items, num_heads, head_dim] float32
    lses: torch.Tensor  # [most_items, num_heads] float32


@dataclass(frozen=True, slots=True)
class Residency:
    """How many programs stay on a multiprocessor, and what each has. No byte depends on it."""

    programs: int
    stages: int  # blocks of keys and of values that its rings hold


def residency(head_dim: int) -> Residency:
    """What was fastest on an H200."""
    return Residency(4, 2) if head_dim == 128 else Residency(2, 2)


def is_fit(q: torch.Tensor, k_plane: torch.Tensor) -> bool:
    """Whether `attend_splits` runs on such tensors: its matrix instructions are those of sm_90 alone."""
    block_size, num_kv_heads, head_dim = k_plane.shape[1:]
    if not q.is_cuda or not is_available() or k_plane.dtype != torch.float8_e4m3fn or block_size != BLOCK:
        return False
    if head_dim not in (128, 256) or q.shape[1] > MOST_GROUP * num_kv_heads:
        return False
    return torch.cuda.get_device_capability(q.device)[0] == 9


def attend_splits(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    splits: Splits,
    scale: float,
    *,
    resident: Residency | None = None,
) -> None:
    """Attends each row to the keys of its splits, each split by itself, for what `is_fit` says.

    Args:
        q: [num_rows, num_heads, head_dim] bfloat16.
        k_plane: [num_blocks, BLOCK, num_kv_heads, head_dim] float8_e4m3fn, any stride between blocks.
        v_plane: as k_plane, of the same strides.
        splits: each row's, and where results go.
        scale: positive factor of the scores.
        resident: how programs share a multiprocessor; default: what was fastest.
    """
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_plane.shape[1:3]
    assert block_size == BLOCK
    group = num_heads // num_kv_heads
    resident = resident or residency(head_dim)
    k_bulk, v_bulk = (head_blocks(plane.view(torch.int16)) for plane in (k_plane, v_plane))
    most_work = splits.items.shape[0] * num_kv_heads
    _attend_splits_kernel[(min(most_work, resident.programs * NUM_MULTIPROCESSORS),)](
        q,
        k_bulk,
        v_bulk,
        splits.block_tables,
        splits.first_items,
        splits.items,
        splits.outs,
        splits.lses,
        num_rows,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(1),
        splits.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        KEYS=block_size,
        DIM=head_dim // 2,
        N=max(8, triton.next_power_of_2(group)),
        STAGES=resident.stages,
        num_warps=4,
        # Two groups of four warps each; what the copying one does not need, the other takes.
        maxnreg=min(128, 65_536 // (256 * resident.programs) // 8 * 8),
        **chained(),
    )
