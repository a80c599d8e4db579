"""How queries and tiles of latents come into shared memory: the part of the copying group in kernels/gluon_latent.py.

A program takes items, a row's split each, in turns. The copying group brings their tiles into a ring of `STAGES` slots,
as fast as slots become free, and is ahead of its readers, into the next item too. Barriers count turns: a reader waits
for a slot to be full for the n-th time, a writer for it to be empty again.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gluon_interface import bring_tile, bring_values

KEYS = gl.constexpr(64)  # of a tile
HEADS = gl.constexpr(64)  # of a program
HALF = gl.constexpr(256)  # of the latent channels
ROPE = gl.constexpr(64)
STAGES = gl.constexpr(2)  # tiles in shared memory


@gluon.jit
def make_ring(LEFT_COPIES: gl.constexpr, RIGHT_COPIES: gl.constexpr):
    """Tiles in shared memory, and their barriers: even ones of left halves and rope parts, odd ones of right halves.

    A half is full once so many have arrived, and empty once its reader is done with it.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    lefts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, HALF], layout)
    rights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, HALF], layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, ROPE], layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(2 * slot), count=LEFT_COPIES)
        mbarrier.init(full.index(2 * slot + 1), count=RIGHT_COPIES)
        mbarrier.init(empty.index(2 * slot), count=1)
        mbarrier.init(empty.index(2 * slot + 1), count=1)
    return lefts, rights, ropes, full, empty


@gluon.jit
def make_query():
    """Where an item's query stands, and its barriers: full once it has come, empty once its last tile is scored."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    left = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, HALF], layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, HALF], layout)
    rope = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, ROPE], layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    return left, right, rope, barriers.index(0), barriers.index(1)


@gluon.jit
def keys_of(item, work, SPLIT: gl.constexpr, SELECTED: gl.constexpr):
    """How many keys an item has."""
    if SELECTED:
        num_splits, num_entries = work
        num_keys = gl.minimum(SPLIT, num_entries - item % num_splits * SPLIT)
    else:
        num_keys = gl.load(work + 4 * item + 2) - gl.load(work + 4 * item + 1)
    return num_keys


@gluon.jit
def _bring_query(row, turn, half_bulk, rope_bulk, query):
    left, right, rope, full, empty = query
    head = gl.program_id(0) * HEADS
    mbarrier.wait(empty, turn ^ 1)
    mbarrier.expect(full, 2 * half_bulk.block_type.nbytes + rope_bulk.block_type.nbytes)
    bring_tile(half_bulk, [row, head, 0], full, left)
    bring_tile(half_bulk, [row, head, HALF], full, right)
    bring_tile(rope_bulk, [row, head, 2 * HALF], full, rope)


@gluon.jit
def _begin(items_ptr, item, tables_ptr, table_stride):
    """An item's row, where its keys begin and end, and where its first block's id stands."""
    begin = gl.load(items_ptr + 4 * item + 1)
    ids_ptr = tables_ptr + gl.load(items_ptr + 4 * item + 3).to(gl.int64) * table_stride + begin // KEYS
    return gl.load(items_ptr + 4 * item), begin, gl.load(items_ptr + 4 * item + 2), ids_ptr


@gluon.jit
def bring_blocks(
    num_items, items_ptr, q_half_bulk, q_rope_bulk, query, half_bulk, rope_bulk, tables_ptr, table_stride, ring
):
    """Copies block after block, as fast as slots become free, and each item's query after its first block.

    An item is looked up during the one before it, and a block's id during the block before it.
    """
    lefts, rights, ropes, full, empty = ring
    step = 0
    query_turn = 0
    first = gl.program_id(1)
    if first < num_items:
        row, begin, end, ids_ptr = _begin(items_ptr, first, tables_ptr, table_stride)
        block = gl.load(ids_ptr)
        for item in range(first, num_items, gl.num_programs(1)):
            following = gl.minimum(item + gl.num_programs(1), num_items - 1)
            next_row, next_begin, next_end, next_ids_ptr = _begin(items_ptr, following, tables_ptr, table_stride)
            for start in range(begin, end, KEYS):
                place = block.to(gl.int32)
                ids_ptr = gl.where(start + KEYS < end, ids_ptr + 1, next_ids_ptr)
                block = gl.load(ids_ptr)
                slot = step % STAGES
                turn = (step // STAGES) & 1
                left_full = full.index(2 * slot)
                right_full = full.index(2 * slot + 1)
                mbarrier.wait(empty.index(2 * slot), turn ^ 1)
                mbarrier.expect(left_full, half_bulk.block_type.nbytes + rope_bulk.block_type.nbytes)
                bring_tile(half_bulk, [place, 0, 0], left_full, lefts.index(slot))
                bring_tile(rope_bulk, [place, 0, 2 * HALF], left_full, ropes.index(slot))
                mbarrier.wait(empty.index(2 * slot + 1), turn ^ 1)
                mbarrier.expect(right_full, half_bulk.block_type.nbytes)
                bring_tile(half_bulk, [place, 0, HALF], right_full, rights.index(slot))
                if start == begin:
                    _bring_query(row, query_turn, q_half_bulk, q_rope_bulk, query)
                step += 1
            query_turn ^= 1
            row = next_row
            begin = next_begin
            end = next_end


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
def gather_rows(
    num_items, work, q_half_bulk, q_rope_bulk, query, plane, tables, selection, biases, ring, SPLIT: gl.constexpr,
    PAGE: gl.constexpr, POOL: gl.constexpr,
):  # fmt: skip
    """Copies the rows of the selected tokens; where there is none, zeros and a bias of -inf. Queries as above."""
    lefts, rights, ropes, full, empty = ring
    tables_ptr, row_seqs_ptr, table_stride = tables
    plane_ptr, block_stride, token_stride = plane
    picks_ptr, positions_ptr, picks_stride, width = selection
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    steps = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    channels = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    turning = gl.arange(0, ROPE, gl.SliceLayout(0, layout))[None, :]
    step = 0
    query_turn = 0
    for item in range(gl.program_id(1), num_items, gl.num_programs(1)):
        num_splits, _num_entries = work
        row = item // num_splits
        begin = item % num_splits * SPLIT
        num_keys = keys_of(item, work, SPLIT, True)
        position = gl.load(positions_ptr + row)
        row_picks_ptr = picks_ptr + row.to(gl.int64) * picks_stride
        table_ptr = tables_ptr + gl.load(row_seqs_ptr + row).to(gl.int64) * table_stride
        tokens = _tokens(row_picks_ptr, begin + steps, position, width, POOL)
        for start in range(begin, begin + num_keys, KEYS):
            slot = step % STAGES
            turn = (step // STAGES) & 1
            present = tokens >= 0
            blocks = gl.load(table_ptr + tokens // PAGE, mask=present, other=0).to(gl.int64)
            rows = plane_ptr + (blocks * block_stride + tokens % PAGE * token_stride)[:, None]
            held = present[:, None]
            tokens = _tokens(row_picks_ptr, start + KEYS + steps, position, width, POOL)
            left = lefts.index(slot).reshape([KEYS, HALF])
            right = rights.index(slot).reshape([KEYS, HALF])
            rope = ropes.index(slot).reshape([KEYS, ROPE])
            mbarrier.wait(empty.index(2 * slot), turn ^ 1)
            biases.index(slot).store(gl.where(present, 0.0, float("-inf")))
            mbarrier.arrive(full.index(2 * slot))
            bring_values(left, rows + channels, mask=held)
            bring_values(rope, rows + 2 * HALF + turning, mask=held)
            async_copy.mbarrier_arrive(full.index(2 * slot), increment_count=False)
            mbarrier.wait(empty.index(2 * slot + 1), turn ^ 1)
            bring_values(right, rows + HALF + channels, mask=held)
            async_copy.mbarrier_arrive(full.index(2 * slot + 1), increment_count=False)
            if start == begin:
                _bring_query(row, query_turn, q_half_bulk, q_rope_bulk, query)
            step += 1
        query_turn ^= 1
    async_copy.wait_group(0)
