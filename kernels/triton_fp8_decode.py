"""The splits of kernels/triton_paged_decode.py over keys and values of float8_e4m3fn.

Two neighbouring channels are one 16-bit word, and all the way into registers words are what is moved: the matrix
instructions' own loads transpose 16 bits, never 8. There a word becomes two float16, so even and odd channels are
apart: scores are the sum of two products, and the output has two halves. The bits of a float8 shifted into a float16
are its value divided by 256, subnormal values too. NaN would become 1.875: writers of keys and values saturate.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from kernels.triton_chain import hand_over, hold
from kernels.triton_pages import blocks_of, tile_rows
from kernels.triton_softmax import finish_rows

# Of two words at once: signs where they belong, and the seven other bits below them and a zero.
LOW_OF_TWO = tl.constexpr("""{
    .reg .b32 sign, rest;
    shl.b32 sign, $1, 8;
    shl.b32 rest, $1, 7;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $0, sign, 0x80008000, rest, 0xea;
}""")
HIGH_OF_TWO = tl.constexpr("""{
    .reg .b32 rest;
    shr.u32 rest, $1, 1;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $0, $1, 0x80008000, rest, 0xea;
}""")


@triton.jit
def _halves(words, PACKED: tl.constexpr):
    """The low and the high float8 of each word, as float16 divided by 256; PACKED: by instructions on two words."""
    if PACKED:
        low = tl.inline_asm_elementwise(LOW_OF_TWO, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(HIGH_OF_TWO, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        return low, high
    else:  # noqa: RET505 - decided while compiling
        low = ((words << 8) & -32768) | ((words & 0x007F) << 7)
        high = (words & -32768) | ((words >> 1) & 0x3F80)
        return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def attend_fp8_splits_kernel(
    q_ptr,  # [num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [num_blocks, PAGE, NUM_KV_HEADS, HEAD_DIM // 2] int16
    v_ptr,  # as k
    tables_ptr,
    first_ptr,
    items_ptr,
    outs_ptr,  # [most_items, NUM_KV_HEADS * GROUP, HEAD_DIM] float32
    lses_ptr,  # [most_items, NUM_KV_HEADS * GROUP] float32
    num_rows,
    scale,
    q_row_stride,
    q_head_stride,
    block_stride,  # of words, and so are the two below
    token_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    M: tl.constexpr,  # GROUP, padded to what a dot takes
    WIDTH: tl.constexpr,  # HEAD_DIM // 2, padded to a power of two
    PACKED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    hold(CHAINED)
    group = tl.arange(0, M)
    words = tl.arange(0, WIDTH)
    steps = tl.arange(0, KEYS)
    inside = words < HEAD_DIM // 2
    num_items = tl.load(first_ptr + num_rows)
    for work in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        head = work % NUM_KV_HEADS
        row = tl.load(items_ptr + 4 * item)
        begin = tl.load(items_ptr + 4 * item + 1)
        end = tl.load(items_ptr + 4 * item + 2)
        table_ptr = tables_ptr + tl.load(items_ptr + 4 * item + 3).to(tl.int64) * table_stride
        heads = head * GROUP + group
        held = (group < GROUP)[:, None] & inside[None, :]
        q_at = q_ptr + row.to(tl.int64) * q_row_stride + heads[:, None] * q_head_stride + 2 * words[None, :]
        even = tl.load(q_at, mask=held, other=0.0).to(tl.float32)
        odd = tl.load(q_at + 1, mask=held, other=0.0).to(tl.float32)
        # float16 holds the query once that is divided by its largest value.
        most = tl.max(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1), 0)
        most = tl.maximum(most, 1e-30)
        even = (even / most).to(tl.float16)
        odd = (odd / most).to(tl.float16)
        factor = scale * most * 256.0
        best = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc_even = tl.zeros((M, WIDTH), tl.float32)
        acc_odd = tl.zeros((M, WIDTH), tl.float32)
        blocks = blocks_of(table_ptr, begin, end, PAGE, KEYS)
        for start in range(begin, end, KEYS):
            k_rows = tile_rows(k_ptr + head * head_stride, blocks, start, block_stride, token_stride, PAGE, KEYS)
            v_rows = tile_rows(v_ptr + head * head_stride, blocks, start, block_stride, token_stride, PAGE, KEYS)
            blocks = blocks_of(table_ptr, start + KEYS, end, PAGE, KEYS)
            seen = start + steps < end
            wanted = seen[:, None]
            if WIDTH * 2 != HEAD_DIM:
                wanted = wanted & inside[None, :]
            # Rows past the end may hold anything: they read 0.
            k_even, k_odd = _halves(tl.load(k_rows + words[None, :], mask=wanted, other=0), PACKED)
            v_even, v_odd = _halves(tl.load(v_rows + words[None, :], mask=wanted, other=0), PACKED)
            scores = tl.dot(odd, tl.trans(k_odd), tl.dot(even, tl.trans(k_even)))
            scores = tl.where(seen[None, :], scores, float("-inf"))
            # Every tile of a split has a key that is seen, so `best` is a number from the first one on.
            new_best = tl.maximum(best, tl.max(scores, 1) * factor)
            shares = tl.math.exp2(scores * factor - new_best[:, None])
            keep = tl.math.exp2(best - new_best)
            total = total * keep + tl.sum(shares, 1)
            shares = shares.to(tl.float16)
            acc_even = tl.dot(shares, v_even, acc_even * keep[:, None])
            acc_odd = tl.dot(shares, v_odd, acc_odd * keep[:, None])
            best = new_best
        out_even, lse = finish_rows(best, total, acc_even)
        out_odd, _ = finish_rows(best, total, acc_odd)
        place = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        to = outs_ptr + place[:, None] * HEAD_DIM + 2 * words[None, :]
        tl.store(to, out_even * 256.0, mask=held, eviction_policy="evict_last")
        tl.store(to + 1, out_odd * 256.0, mask=held, eviction_policy="evict_last")
        tl.store(lses_ptr + place, lse, mask=group < GROUP, eviction_policy="evict_last")
    hand_over(CHAINED)
