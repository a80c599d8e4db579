"""Attention of single rows over their whole paged history, in splits whose length follows from how long that is.

A row's keys are cut at multiples of its split, which is shorter where a history is, so that it fills the card too. Each
split is computed by itself into (output, log-sum-exp), and a row's splits are merged in position order, so that a row's
bytes follow from its query and its keys alone: not from the batch, from which blocks hold the keys, nor from how many
programs run. Rows of several sequences lie side by side; k verification rows of one sequence are k rows whose histories
differ by one key, and give the bytes of k decode steps.

Every size that changes from step to step is read on the device, so a captured graph serves any batch that fits.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from kernels.gluon_fp8_decode import NUM_MULTIPROCESSORS, Splits, attend_splits, is_fit
from kernels.triton_chain import chained, hand_over, hold
from kernels.triton_fp8_decode import attend_fp8_splits_kernel
from kernels.triton_pages import blocks_of, bulk_rows, tile_rows
from kernels.triton_softmax import LOG2E, Parts, finish_rows, fold_tile, merge_ragged

FP8 = torch.float8_e4m3fn
MOST_ROWS = 4096  # of a plan: one program sums their splits


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How many keys a split of a row has: as many as make `count` splits of it, within bounds. Decides bytes."""

    shortest: int
    longest: int
    count: int = 64
    step: int = 64  # every length is a whole number of them

    def __post_init__(self) -> None:
        assert self.shortest % self.step == 0
        assert self.longest % self.step == 0

    def length(self, num_keys: int) -> int:
        """Keys of each split but the last, in a row of so many."""
        even = -(-num_keys // (self.count * self.step)) * self.step
        return min(max(even, self.shortest), self.longest)

    def num_splits(self, num_keys: int) -> int:
        """Splits of a row."""
        return -(-num_keys // self.length(num_keys))

    def most_splits(self, num_keys: int) -> int:
        """Of a row of at most so many keys: a shorter row may have more."""
        return max(self.num_splits(num_keys), self.num_splits(min(num_keys, self.count * self.shortest)))


SPLITS = SplitRule(256, 1024)


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a launch is cut. `keys` decides bytes, the rest only speed."""

    keys: int  # that a program takes at once
    num_warps: int
    num_stages: int  # tiles in flight
    most_programs: int = 1 << 16  # of a launch; they take what is beyond in turns


def decode_tiles(head_dim: int, num_programs: int = 1 << 16, *, is_fp8: bool = False) -> DecodeTiles:
    """What was fastest on an H200. The keys, which decide bytes, follow from none of these.

    Programs that have a multiprocessor to themselves keep more tiles in flight, and so do those whose tiles are small.
    """
    if is_fp8 or head_dim <= 64:
        return DecodeTiles(keys=64, num_warps=4, num_stages=3 if head_dim <= 128 else 2)
    if head_dim <= 128:
        return DecodeTiles(keys=64, num_warps=2, num_stages=2)
    return DecodeTiles(keys=64, num_warps=4, num_stages=3 if num_programs <= NUM_MULTIPROCESSORS else 2)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Which keys each row attends to: the first num_keys[r] tokens of sequence row_seqs[r]."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32 or int64
    num_keys: torch.Tensor  # [num_rows] int32; 0: a padding row, whose output is 0
    row_seqs: torch.Tensor  # [num_rows] int32


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The splits of a step's rows; made once a step and read by every layer."""

    rows: DecodeRows
    first_items: torch.Tensor  # [num_rows + 1] int32: the first item of each row, an item a split; last, how many
    num_items: torch.Tensor  # [num_rows] int32: of each row; -1: there is no room for them
    items: torch.Tensor  # [most_items, 4] int32: row, first key, key after the last, sequence
    step: int  # every split but a row's last has a whole number of such keys

    @property
    def most_items(self) -> int:
        """Splits that there is room for."""
        return self.items.shape[0]


@triton.jit
def _lengths(num_keys, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    """SplitRule.length of each row."""
    return tl.minimum(tl.maximum(tl.cdiv(num_keys, COUNT * STEP) * STEP, SHORTEST), LONGEST)


@triton.jit(do_not_specialize=["num_rows", "most_items", "capacity"])
def _plan_kernel(
    num_keys_ptr,
    row_seqs_ptr,
    first_ptr,
    num_items_ptr,
    items_ptr,
    num_rows,
    most_items,
    capacity,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    num_keys = tl.load(num_keys_ptr + rows, mask=rows < num_rows, other=0)
    splits = tl.where(num_keys > capacity, 0, tl.cdiv(num_keys, _lengths(num_keys, SHORTEST, LONGEST, COUNT, STEP)))
    first = tl.sum(tl.where(rows < row, splits, 0), 0)
    last = first + tl.sum(tl.where(rows == row, splits, 0), 0)
    num_keys = tl.load(num_keys_ptr + row)
    broken = (num_keys > capacity) | (last > most_items)
    tl.store(first_ptr + row, first)
    tl.store(num_items_ptr + row, tl.where(broken, -1, last - first))
    if row == num_rows - 1:
        tl.store(first_ptr + num_rows, tl.minimum(last, most_items))
    steps = tl.arange(0, 128)
    last = tl.minimum(last, most_items)
    length = _lengths(num_keys, SHORTEST, LONGEST, COUNT, STEP)
    seq = tl.load(row_seqs_ptr + row)
    for start in range(first, last, 128):
        item = start + steps
        inside = item < last
        begin = (item - first) * length
        tl.store(items_ptr + 4 * item, row, mask=inside)
        tl.store(items_ptr + 4 * item + 1, begin, mask=inside)
        tl.store(items_ptr + 4 * item + 2, tl.minimum(begin + length, num_keys), mask=inside)
        tl.store(items_ptr + 4 * item + 3, seq, mask=inside)


def plan_decode(rows: DecodeRows, *, block_size: int, rule: SplitRule, most_items: int) -> DecodePlan:
    """Lays out the splits of a batch, on the device.

    `most_items` is at least the sum of `rule.num_splits` over the rows: a row whose splits find no room, or that has
    more keys than its table has blocks for, comes out as NaN.
    """
    num_rows = rows.num_keys.shape[0]
    assert 0 < num_rows <= MOST_ROWS
    assert rows.num_keys.dtype == rows.row_seqs.dtype == torch.int32
    assert rows.row_seqs.shape == (num_rows,)
    assert rows.block_tables.dtype in (torch.int32, torch.int64)
    assert rows.block_tables.stride(1) == 1
    assert 0 < most_items < 1 << 18, "the sum of a full batch's items stays an int32"
    device = rows.num_keys.device
    first_items = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    num_items = torch.empty(num_rows, dtype=torch.int32, device=device)
    items = torch.empty((most_items, 4), dtype=torch.int32, device=device)
    _plan_kernel[(num_rows,)](
        rows.num_keys,
        rows.row_seqs,
        first_items,
        num_items,
        items,
        num_rows,
        most_items,
        rows.block_tables.shape[1] * block_size,
        SHORTEST=rule.shortest,
        LONGEST=rule.longest,
        COUNT=rule.count,
        STEP=rule.step,
        ROWS=triton.next_power_of_2(num_rows),
    )
    return DecodePlan(rows, first_items, num_items, items, rule.step)


@triton.jit(do_not_specialize=["num_rows"])
def _attend_splits_kernel(
    q_ptr,  # [num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [num_blocks, PAGE, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # as k
    k_bulk,  # descriptors of the same as [num_blocks, NUM_KV_HEADS, PAGE, HEAD_DIM], or None
    v_bulk,
    tables_ptr,
    first_ptr,
    items_ptr,
    outs_ptr,  # [most_items, NUM_KV_HEADS * GROUP, HEAD_DIM] float32
    lses_ptr,  # [most_items, NUM_KV_HEADS * GROUP] float32
    num_rows,
    scale,
    q_row_stride,
    q_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    M: tl.constexpr,  # GROUP, padded to what a dot takes
    WIDTH: tl.constexpr,  # HEAD_DIM, padded to a power of two
    BULK: tl.constexpr,  # whole tiles come by bulk copies
    STAGES: tl.constexpr,  # of tiles that come by pointers
    CHAINED: tl.constexpr,
):
    hold(CHAINED)
    group = tl.arange(0, M)
    channels = tl.arange(0, WIDTH)
    steps = tl.arange(0, KEYS)
    inside = channels < HEAD_DIM
    num_items = tl.load(first_ptr + num_rows)
    # Heads of one split run side by side: their rows of a token lie side by side too.
    for work in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        head = work % NUM_KV_HEADS
        row = tl.load(items_ptr + 4 * item)
        begin = tl.load(items_ptr + 4 * item + 1)
        end = tl.load(items_ptr + 4 * item + 2)
        table_ptr = tables_ptr + tl.load(items_ptr + 4 * item + 3).to(tl.int64) * table_stride
        heads = head * GROUP + group
        held = (group < GROUP)[:, None] & inside[None, :]
        q_at = row.to(tl.int64) * q_row_stride + heads[:, None] * q_head_stride + channels[None, :]
        q = tl.load(q_ptr + q_at, mask=held, other=0.0)
        best = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, WIDTH), tl.float32)
        blocks = blocks_of(table_ptr, begin, end, PAGE, KEYS)
        if BULK:
            whole = end // KEYS * KEYS
            for start in range(begin, whole, KEYS):
                place = [blocks.to(tl.int32), head, start % PAGE, 0]
                k = k_bulk.load(place).reshape(KEYS, WIDTH)
                v = v_bulk.load(place).reshape(KEYS, WIDTH)
                blocks = blocks_of(table_ptr, start + KEYS, end, PAGE, KEYS)
                best, total, acc = fold_tile(tl.dot(q, tl.trans(k)), v, scale, best, total, acc)
        else:
            whole = begin
        for start in tl.range(whole, end, KEYS, num_stages=STAGES):
            k_rows = tile_rows(k_ptr + head * head_stride, blocks, start, block_stride, token_stride, PAGE, KEYS)
            v_rows = tile_rows(v_ptr + head * head_stride, blocks, start, block_stride, token_stride, PAGE, KEYS)
            blocks = blocks_of(table_ptr, start + KEYS, end, PAGE, KEYS)
            seen = start + steps < end
            wanted = seen[:, None]
            if WIDTH != HEAD_DIM:
                wanted = wanted & inside[None, :]
            # Rows past the end may hold anything, NaN too, and a share of zero does not take that away: they read 0.
            k = tl.load(k_rows + channels[None, :], mask=wanted, other=0.0)
            v = tl.load(v_rows + channels[None, :], mask=wanted, other=0.0)
            scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
            best, total, acc = fold_tile(scores, v, scale, best, total, acc)
        out, lse = finish_rows(best, total, acc)
        place = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        at = place[:, None] * HEAD_DIM + channels[None, :]
        # The merge reads these next: they outlast the keys in the cache.
        tl.store(outs_ptr + at, out, mask=held, eviction_policy="evict_last")
        tl.store(lses_ptr + place, lse, mask=group < GROUP, eviction_policy="evict_last")
    hand_over(CHAINED)


def paged_decode(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    v_scale: float = 1.0,
    gate: torch.Tensor | None = None,
    tiles: DecodeTiles | None = None,
) -> torch.Tensor:
    """Attends each row to its keys.

    Args:
        q: [num_rows, num_heads, head_dim] bfloat16.
        k_plane: [num_blocks, block_size, num_kv_heads, head_dim] bfloat16 or float8_e4m3fn, any stride between blocks.
        v_plane: as k_plane, of the same strides.
        plan: of this batch.
        scale: positive factor of the scores; the keys' own scale, where fp8 has one, inside.
        v_scale: factor of the values.
        gate: as q, of which a sigmoid is the last factor; rows and heads at any stride.
        tiles: how to cut the work; default: what was fastest, fp8 by groups of warps where the card is fit for that.

    Returns:
        [num_rows, num_heads, head_dim] bfloat16.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_plane.shape[2]
    assert num_rows == plan.rows.num_keys.shape[0], "the plan is of another batch"
    assert scale > 0
    assert q.dtype == torch.bfloat16
    assert q.stride(2) == 1
    assert k_plane.dtype == v_plane.dtype
    assert k_plane.dtype in (torch.bfloat16, FP8)
    assert k_plane.shape == v_plane.shape
    assert k_plane.stride() == v_plane.stride()
    assert k_plane.shape[3] == head_dim
    assert k_plane.stride(3) == 1
    assert num_heads % num_kv_heads == 0, "query heads are a multiple of key heads"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    outs = torch.empty((plan.most_items, num_heads, head_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty((plan.most_items, num_heads), dtype=torch.float32, device=q.device)
    if tiles is None and is_fit(q, k_plane):
        splits = Splits(plan.rows.block_tables, plan.first_items, plan.items, outs, lses)
        attend_splits(q, k_plane, v_plane, splits, scale)
    else:
        tiles = tiles or decode_tiles(head_dim, plan.most_items * num_kv_heads, is_fp8=k_plane.dtype == FP8)
        _attend_by_tiles(q, k_plane, v_plane, plan, (outs, lses), scale, tiles)
    merge_ragged(outs, lses, Parts(plan.first_items, plan.num_items), out, out_scale=v_scale, gate=gate)
    return out


def _attend_by_tiles(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    plan: DecodePlan,
    results: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    tiles: DecodeTiles,
) -> None:
    """Any head width and any block size, on any card."""
    outs, lses = results
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_plane.shape[1:3]
    assert plan.step % tiles.keys == 0
    assert tiles.keys % block_size == 0 or block_size % tiles.keys == 0
    is_fp8 = k_plane.dtype == FP8
    group = num_heads // num_kv_heads
    width = max(16, triton.next_power_of_2(head_dim))
    if is_fp8:
        assert head_dim % 2 == 0
        assert all(stride % 2 == 0 for stride in k_plane.stride()[:3])
        kernel = attend_fp8_splits_kernel
        k_plane, v_plane = k_plane.view(torch.int16), v_plane.view(torch.int16)
        width = max(16, width // 2)
        planes, of_dtype = (k_plane, v_plane), {"PACKED": not knobs.runtime.interpret}
    else:
        kernel = _attend_splits_kernel
        bulk = width == head_dim and tiles.keys <= block_size
        copied = (bulk_rows(plane, tiles.keys) if bulk else None for plane in (k_plane, v_plane))
        planes, of_dtype = (k_plane, v_plane, *copied), {"BULK": bulk, "STAGES": 1 if bulk else tiles.num_stages}
    kernel[(min(plan.most_items * num_kv_heads, tiles.most_programs),)](
        q,
        *planes,
        plan.rows.block_tables,
        plan.first_items,
        plan.items,
        outs,
        lses,
        num_rows,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(1),
        k_plane.stride(0),
        k_plane.stride(1),
        k_plane.stride(2),
        plan.rows.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        KEYS=tiles.keys,
        M=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        **of_dtype,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **chained(),
    )
