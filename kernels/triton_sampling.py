"""Drawing a token from each row of logits without sorting them: the draw of kernels/sampling.py, on the device.

One pass over the logits leaves, for every `GROUP` neighbouring tokens, their largest value and, where it is needed, the
sum of their exponentials relative to it. All else works on those: greedy and unfiltered rows find their token's group
and read that alone; filtered rows list the tokens that reach a value below which their filters surely keep none. Few
tokens are sorted, and the draw is read off their sums. Among many, each border (where top-k or top-p ends, and where
the draw falls) is searched by cutting the range of values over and over: nothing is sorted, and it is as exact.

A row's token follows from its logits, its filters and its number alone. Sums of probabilities are float64 of float32
exponentials, but for those by which a search narrows its range down, so that a token can differ from the reference's
only where the number falls within rounding of a border.
Typical-p is not here: rows that ask for it take the reference.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sampling_rows import NOT_FINITE, SamplingRows
from kernels.triton_chain import chained, follow
from kernels.triton_token_search import draw_by_search, ordered_key, value_of

MOST_GROUPS = 4096  # of a row, so that one program holds them
REFUSED = tl.constexpr(NOT_FINITE)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of the finite logits
PASS = 2048  # logits of a program that sums up groups


@dataclass(frozen=True, slots=True)
class SamplingTiles:
    """How a launch is cut. No token depends on it."""

    sorted: int = 256  # candidates at most, a power of two; more are searched
    listed: int = 4096  # logits that are looked through at once for candidates
    width: int = 2048  # candidates that a search reads at once
    num_warps: int = 8


SAMPLING_TILES = SamplingTiles()


@triton.jit
def _groups_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    best_ptr,  # [rows, num_groups] float32
    total_ptr,  # [rows, num_groups] float32; 0 in greedy rows and in those with a top-k, which need none
    row_stride,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # of a program
    REFUSES: tl.constexpr,  # a group with a logit that is no finite number has a total of NaN
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = ids < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    is_finite = (tl.abs(logits) < float("inf")) | (ids >= vocab_size)
    logits = tl.where(logits == logits, logits, float("-inf"))  # NaN is never drawn
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.max(logits, 1)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros_like(best)
    top_k = tl.load(top_k_ptr + row)
    if (temperature != 0.0) & ((top_k <= 0) | (top_k >= vocab_size)):
        total = tl.sum(tl.exp((logits - pivot[:, None]) * scale), 1)
    if REFUSES:
        total = tl.where(tl.min(is_finite.to(tl.int32), 1) > 0, total, float("nan"))
    at = row * num_groups + groups
    tl.store(best_ptr + at, best, mask=groups < num_groups)
    tl.store(total_ptr + at, total, mask=groups < num_groups)


@triton.jit
def _draw_greedy(logits_ptr, best, groups, most, vocab_size, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The lowest id among the largest values; 0 in a row without any token."""
    group = tl.min(tl.where(best == most, groups, GROUPS), 0)
    ids = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    token = tl.min(tl.where(x == most, ids, vocab_size), 0)
    return tl.where(token == vocab_size, 0, token)


@triton.jit
def _draw_in_order(
    logits_ptr, best, total, groups, most, scale, number, vocab_size, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """Without filters, ids in order: the group first, then the token in it."""
    mass = tl.where(best == float("-inf"), 0.0, total * tl.exp((best - most) * scale)).to(tl.float64)
    target = number * tl.sum(mass, 0)
    group = tl.min(tl.where((tl.cumsum(mass, 0) > target) & (mass > 0), groups, GROUPS), 0)
    group = tl.minimum(group, tl.max(tl.where(mass > 0, groups, 0), 0))
    before = tl.sum(tl.where(groups < group, mass, 0.0), 0)
    ids = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    share = tl.exp((tl.where(x == x, x, float("-inf")) - most) * scale).to(tl.float64)
    reached = (before + tl.cumsum(share, 0) > target) & (share > 0)
    last = tl.max(tl.where(share > 0, ids, 0), 0)
    return tl.minimum(tl.min(tl.where(reached, ids, vocab_size), 0), last)


@triton.jit
def _add_pairs(a_0, a_1, b_0, b_1):
    return a_0 + b_0, a_1 + b_1


@triton.jit
def _count_two(keys, low, high, step, n: tl.constexpr):
    """1 for the n-th of the keys `step` apart from `low` that a key reaches, and 1 << 16 for the next one."""
    near = tl.minimum(low + n * step, high).to(tl.int32)
    far = tl.minimum(low + (n + 1) * step, high).to(tl.int32)
    return (keys >= near).to(tl.int32) + ((keys >= far).to(tl.int32) << 16)


@triton.jit
def _least_key(best, is_group, most, scale, vocab_size, whole, limit, top_p, min_p):
    """A key that no kept token is below.

    With top-k, that many groups have a largest value at least so high. Without it, all tokens below it together hold no
    more than top-p leaves out, were each as large as the key; and min-p has a floor of its own.
    """
    lowest = ordered_key(tl.full((), LOWEST, tl.float32))
    floor = tl.full((), float("-inf"), tl.float32)
    if (min_p > 0.0) & ((limit >= vocab_size) | (top_p >= 1.0)):
        floor = most + (tl.log(min_p.to(tl.float32)) - 1e-4) / scale
    low = tl.maximum(ordered_key(floor), lowest).to(tl.int64)
    if limit < vocab_size:
        keys = tl.where(is_group, ordered_key(best), -0x80000000)
        high = ordered_key(most).to(tl.int64)
        while low < high:
            # Four keys at once: a turn costs the wait for a sum. Two counts, 16 bits each, share a word.
            step = (high - low + 4) // 5
            few, many = tl.reduce(
                (_count_two(keys, low, high, step, 1), _count_two(keys, low, high, step, 3)), 0, _add_pairs
            )
            start = low
            above = high
            for n in tl.static_range(4):
                num_reached = ((few if n < 2 else many) >> (16 * (n % 2))) & 0xFFFF
                mark = tl.minimum(start + (n + 1) * step, above)
                reached = num_reached >= limit
                low = tl.where(reached, mark, low)
                # Some more groups than needed do no harm.
                enough = num_reached <= limit + limit // 4
                high = tl.where(reached, tl.where(enough, mark, above), tl.minimum(high, mark - 1))
    elif top_p < 1.0:
        share = ((1.0 - top_p) * whole / vocab_size).to(tl.float32)
        low = tl.maximum(low, ordered_key(most + (tl.log(share) - 1e-4) / scale).to(tl.int64))
    return low.to(tl.int32)


@triton.jit
def _list_tokens(
    logits_ptr,
    groups_ptr,
    values_ptr,
    ids_ptr,
    best,
    groups,
    is_group,
    least,
    vocab_size,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Lists all tokens on the key `least` or above by rising id, and returns their number."""
    listed = (is_group & (ordered_key(best) >= least)).to(tl.int32)
    num_listed = tl.sum(listed, 0)
    tl.store(groups_ptr + tl.cumsum(listed, 0) - 1, groups, mask=listed > 0)
    tl.debug_barrier()
    # A group's tokens are a row, whose sums stay within a warp.
    rows = tl.arange(0, LISTED // GROUP)
    inner = tl.arange(0, GROUP)[None, :]
    count = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_listed, LISTED // GROUP):
        slot = start + rows
        group = tl.load(groups_ptr + slot, mask=slot < num_listed, other=0)
        ids = group[:, None] * GROUP + inner
        inside = (slot < num_listed)[:, None] & (ids < vocab_size)
        x = tl.load(logits_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        taken = inside & (ordered_key(x) >= least)
        within = tl.cumsum(taken.to(tl.int32), 1)
        length = tl.sum(taken.to(tl.int32), 1)
        before = tl.cumsum(length, 0) - length
        at = count + before[:, None] + within - 1
        tl.store(values_ptr + at, x, mask=taken)
        tl.store(ids_ptr + at, ids, mask=taken)
        count += tl.sum(length, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _draw_by_order(
    values_ptr, ids_ptr, length, most, scale, vocab_size, whole, limit, top_p, min_p, number, FEW: tl.constexpr
):
    """Top-k, top-p, min-p and the draw from at most FEW listed tokens, which hold all that is kept: by sorting them."""
    rank = tl.arange(0, FEW)
    value = tl.load(values_ptr + rank, mask=rank < length, other=float("-inf"))
    # Sorts by falling value, since ~key falls as key rises, then by rising place in the list.
    packed = tl.sort(
        tl.where(rank < length, ((~ordered_key(value)).to(tl.int64) << 32) | rank.to(tl.int64), 0x7FFFFFFFFFFFFFFF)
    )
    value = value_of(~((packed >> 32).to(tl.int32)))
    is_kept = (rank < length) & (rank < limit)
    share = tl.where(is_kept, tl.exp((value - most) * scale), 0.0).to(tl.float64)
    before = tl.cumsum(share, 0) - share
    kept = tl.where(limit < vocab_size, tl.sum(share, 0), whole)
    share = tl.where(before < tl.where(top_p < 1.0, top_p * kept, float("inf")), share, 0.0)
    share = tl.where(share >= min_p, share, 0.0)
    target = number * tl.sum(share, 0)
    reached = (tl.cumsum(share, 0) > target) & (share > 0)
    last = tl.max(tl.where(share > 0, rank, 0), 0)
    chosen = tl.minimum(tl.min(tl.where(reached, rank, FEW), 0), last)
    return tl.load(ids_ptr + tl.sum(tl.where(rank == chosen, packed & 0xFFFFFFFF, 0), 0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    best_ptr,
    total_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    number_ptr,
    groups_ptr,  # [rows, GROUPS] int32 scratch: the groups that hold candidates
    values_ptr,  # [rows, vocab_size] float32 scratch: the candidates
    ids_ptr,  # [rows, vocab_size] int32 scratch: and their ids
    few_ptr,  # [rows, SORTED] int32 scratch: keys of those around a border
    tokens_ptr,  # [rows] int64
    row_stride,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # num_groups, padded
    SORTED: tl.constexpr,  # candidates that are sorted
    LISTED: tl.constexpr,
    WIDTH: tl.constexpr,
    REFUSES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    best = tl.load(best_ptr + row * num_groups + groups, mask=is_group, other=float("-inf"))
    total = tl.load(total_ptr + row * num_groups + groups, mask=is_group, other=0.0)
    if REFUSES:
        num_refused = tl.sum((total != total).to(tl.int32), 0)
        total = tl.where(total == total, total, 0.0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    number = tl.load(number_ptr + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    most = tl.max(best, 0)
    limit = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    if (tl.abs(most) == float("inf")) | (temperature == 0.0):
        # Without a token, too, and where one of infinite weight takes all probability.
        token = _draw_greedy(logits_ptr, best, groups, most, vocab_size, GROUP, GROUPS)
    elif (limit == vocab_size) & (top_p >= 1.0) & (min_p <= 0.0):
        token = _draw_in_order(logits_ptr, best, total, groups, most, scale, number, vocab_size, GROUP, GROUPS)
    else:
        whole = tl.full((), 0.0, tl.float64)
        if limit == vocab_size:
            mass = tl.where(best == float("-inf"), 0.0, total * tl.exp((best - most) * scale))
            whole = tl.sum(mass.to(tl.float64), 0)
        least = _least_key(best, is_group, most, scale, vocab_size, whole, limit, top_p, min_p)
        own_values_ptr = values_ptr + row * vocab_size
        own_ids_ptr = ids_ptr + row * vocab_size
        length = _list_tokens(
            *(logits_ptr, groups_ptr + row * GROUPS, own_values_ptr, own_ids_ptr, best, groups, is_group, least),
            *(vocab_size, GROUP, LISTED),
        )
        if length <= SORTED // 4:
            token = _draw_by_order(
                *(own_values_ptr, own_ids_ptr, length, most, scale, vocab_size, whole, limit, top_p, min_p, number),
                SORTED // 4,
            )
        elif length <= SORTED:
            token = _draw_by_order(
                *(own_values_ptr, own_ids_ptr, length, most, scale, vocab_size, whole, limit, top_p, min_p, number),
                SORTED,
            )
        else:
            token = draw_by_search(
                *(own_values_ptr, own_ids_ptr, few_ptr + row * SORTED, length, least, most, scale, vocab_size),
                *(whole, limit, top_p, min_p, number, SORTED, WIDTH),
            )
    token = token.to(tl.int64)
    if REFUSES:
        token = tl.where(num_refused > 0, REFUSED, token)
    tl.store(tokens_ptr + row, token)


def draw_rows(
    logits: torch.Tensor, rows: SamplingRows, *, tiles: SamplingTiles = SAMPLING_TILES, refuses: bool = False
) -> torch.Tensor:
    """A token of each row of logits [rows, vocab], any stride between rows: [rows] int64.

    NaN is never drawn; where the kernel `refuses`, a row with a logit that is no finite number gets NOT_FINITE.
    """
    num_rows, vocab_size = logits.shape
    rows.check(num_rows)
    assert logits.stride(1) == 1
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert 0 < vocab_size < 1 << 30
    group = 64 if vocab_size <= 64 * MOST_GROUPS else triton.next_power_of_2(triton.cdiv(vocab_size, MOST_GROUPS))
    num_groups = triton.cdiv(vocab_size, group)
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    stats = torch.empty((2, num_rows, num_groups), dtype=torch.float32, device=device)
    groups_padded = triton.next_power_of_2(num_groups)
    listed = torch.empty((num_rows, groups_padded), dtype=torch.int32, device=device)
    values = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device)
    few = torch.empty((num_rows, tiles.sorted), dtype=torch.int32, device=device)
    groups_each = max(1, PASS // group)
    _groups_kernel[(triton.cdiv(num_groups, groups_each), num_rows)](
        *(logits, rows.temperature, rows.top_k, stats[0], stats[1], logits.stride(0), vocab_size, num_groups),
        GROUP=group,
        GROUPS=groups_each,
        REFUSES=refuses,
        num_warps=4,
        **chained(),
    )
    _draw_kernel[(num_rows,)](
        *(logits, stats[0], stats[1], rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.number),
        *(listed, values, ids, few, tokens, logits.stride(0), vocab_size, num_groups),
        GROUP=group,
        GROUPS=groups_padded,
        SORTED=tiles.sorted,
        LISTED=max(tiles.listed, group),
        WIDTH=tiles.width,
        REFUSES=refuses,
        num_warps=tiles.num_warps,
        **chained(),
    )
    return tokens
