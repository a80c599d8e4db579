"""Drawing a token from each row of logits without sorting them: the draw of kernels/sampling.py, on the device.

One pass over the logits leaves, for every `GROUP` neighbouring tokens, their largest value and the sum of their
exponentials relative to it. All else works on those: greedy and unfiltered rows find their token's group and read
that alone; filtered rows take the groups whose largest value reaches the wanted rank as candidates, sort those few
exactly, and draw. Where the candidates cannot hold what the filters keep (a flat distribution, or a top-k of many
hundreds) the row is searched by halving the range of values instead: slower, and as exact.

A row's token follows from its logits, its filters and its number alone. Sums of probabilities are float64 of float32
exponentials, so that a token can differ from the reference's only where the number falls within rounding of a border.
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

from kernels.sampling_rows import SamplingRows

MOST_GROUPS = 4096  # of a row, so that one program holds them
PASS = 2048  # logits that a program reads at once


@dataclass(frozen=True, slots=True)
class SamplingTiles:
    """How a launch is cut. No token depends on it."""

    candidates: int = 1024  # that are sorted at most, a power of two
    head: int = 256  # candidates wanted where top-k does not say
    num_warps: int = 16


SAMPLING_TILES = SamplingTiles()


@triton.jit
def _groups_kernel(
    logits_ptr,
    temperature_ptr,
    best_ptr,  # [rows, num_groups] float32
    total_ptr,  # [rows, num_groups] float32
    row_stride,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # of a program
):
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))  # NaN is never drawn
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.max(logits, 1)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp((logits - pivot[:, None]) * scale), 1)
    at = row * num_groups + groups
    tl.store(best_ptr + at, best, mask=groups < num_groups)
    tl.store(total_ptr + at, total, mask=groups < num_groups)


@triton.jit
def _ordered(x):
    """float32 to int32 that order alike; -0 and 0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float32 of an `_ordered` key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits_ptr, vocab_size, key, most, scale, WIDTH: tl.constexpr):
    """How many tokens lie above `key` and on it, and the probability mass above, relative to the largest value's."""
    steps = tl.arange(0, WIDTH)
    above = tl.zeros((WIDTH,), tl.int32)
    equal = tl.zeros((WIDTH,), tl.int32)
    mass = tl.zeros((WIDTH,), tl.float64)
    # One program goes over all of a row, dozens of times: without loads ahead it would wait for each of them.
    for start in tl.range(0, vocab_size, WIDTH, num_stages=4):
        x = tl.load(logits_ptr + start + steps, mask=start + steps < vocab_size, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        keys = _ordered(x)
        inside = start + steps < vocab_size
        above += ((keys > key) & inside).to(tl.int32)
        equal += ((keys == key) & inside).to(tl.int32)
        mass += tl.where(keys > key, tl.exp((x - most) * scale), 0.0).to(tl.float64)
    return tl.sum(above, 0), tl.sum(equal, 0), tl.sum(mass, 0)


@triton.jit
def _search(logits_ptr, vocab_size, most, scale, rank, mass, WIDTH: tl.constexpr):
    """The largest key of which all tokens on it or above number at least `rank` and hold more than `mass`.

    Keys between are halved; the count and the mass of all tokens reach what is asked for, or the lowest key is given.
    """
    low = _ordered(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = _ordered(most).to(tl.int64)
    while low < high:
        # The tokens above middle - 1 are those on middle or above.
        middle = low + (high - low + 1) // 2
        above, _, held = _above(logits_ptr, vocab_size, (middle - 1).to(tl.int32), most, scale, WIDTH)
        reached = (above >= rank) & (held > mass)
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _nth_equal(logits_ptr, vocab_size, key, n, WIDTH: tl.constexpr):
    """The id of the n-th token (from 0) whose value is `key`, by rising id; the last one where there are fewer."""
    steps = tl.arange(0, WIDTH)
    found = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, WIDTH):
        inside = start + steps < vocab_size
        x = tl.load(logits_ptr + start + steps, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        equal = ((_ordered(x) == key) & inside).to(tl.int32)
        rank = passed + tl.cumsum(equal, 0) - 1
        found = tl.maximum(found, tl.max(tl.where((equal > 0) & (rank <= n), start + steps, 0), 0))
        passed += tl.sum(equal, 0)
    return found


@triton.jit
def _draw_by_search(logits_ptr, vocab_size, most, scale, top_k, top_p, min_p, number, WIDTH: tl.constexpr):
    """Top-k, top-p, min-p and the draw, each by halving the range of values."""
    limited = (top_k > 0) & (top_k < vocab_size)
    key = _ordered(tl.full((), float("-inf"), tl.float32))
    kept_equal = tl.full((), 1 << 30, tl.int32)  # of the tokens on `key`, how many are kept
    if limited:
        key = _search(logits_ptr, vocab_size, most, scale, top_k, -1.0, WIDTH)
        above, _, _ = _above(logits_ptr, vocab_size, key, most, scale, WIDTH)
        kept_equal = top_k - above
    above, equal, mass = _above(logits_ptr, vocab_size, key, most, scale, WIDTH)
    share = tl.exp((_value(key) - most) * scale).to(tl.float64)
    kept = mass + tl.minimum(kept_equal, equal).to(tl.float64) * share
    if top_p < 1.0:
        wanted = top_p * kept
        # A token stays while the mass before it is below what is wanted.
        p_key = _search(logits_ptr, vocab_size, most, scale, 1, wanted * (1.0 - 1e-15), WIDTH)
        if p_key >= key:
            above, equal, mass = _above(logits_ptr, vocab_size, p_key, most, scale, WIDTH)
            share = tl.exp((_value(p_key) - most) * scale).to(tl.float64)
            needed = tl.ceil((wanted - mass) / tl.maximum(share, 1e-300)).to(tl.int32)
            most_equal = tl.where(p_key == key, tl.minimum(kept_equal, equal), equal)
            kept_equal = tl.minimum(tl.maximum(needed, 1), most_equal)
            key = p_key
            kept = mass + kept_equal.to(tl.float64) * share
    if min_p > 0.0:
        # The first key whose share is too small; all above stay.
        low = key.to(tl.int64) - 1
        high = _ordered(most).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            small = tl.exp((_value(middle.to(tl.int32)) - most) * scale).to(tl.float64) < min_p
            low = tl.where(small, middle, low)
            high = tl.where(small, high, middle - 1)
        if low >= key:
            key = low.to(tl.int32)
            kept_equal = tl.full((), 0, tl.int32)
            _, _, kept = _above(logits_ptr, vocab_size, key, most, scale, WIDTH)
    target = number * kept
    drawn = _search(logits_ptr, vocab_size, most, scale, 1, target, WIDTH)
    above, equal, mass = _above(logits_ptr, vocab_size, drawn, most, scale, WIDTH)
    share = tl.exp((_value(drawn) - most) * scale).to(tl.float64)
    n = ((target - mass) / tl.maximum(share, 1e-300)).to(tl.int32)
    last = tl.where(drawn == key, tl.minimum(kept_equal, equal), equal) - 1
    return _nth_equal(logits_ptr, vocab_size, drawn, tl.maximum(tl.minimum(n, last), 0), WIDTH)


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
def _collect(
    logits_ptr,
    listed_ptr,
    keys_ptr,
    best,
    groups,
    num_groups,
    most,
    wanted,
    vocab_size,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes as candidates all tokens that reach what `wanted` groups reach; returns their number and the least key."""
    keys = _ordered(best)
    is_group = groups < num_groups
    low = _ordered(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = _ordered(most).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum(((keys >= middle.to(tl.int32)) & is_group).to(tl.int32), 0) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    least = low.to(tl.int32)
    listed = ((keys >= least) & is_group).to(tl.int32)
    num_listed = tl.sum(listed, 0)
    tl.store(listed_ptr + tl.cumsum(listed, 0) - 1, groups, mask=listed > 0)
    tl.debug_barrier()
    place = tl.arange(0, WIDTH)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_listed, WIDTH // GROUP):
        slot = start + place // GROUP
        group = tl.load(listed_ptr + slot, mask=slot < num_listed, other=0)
        ids = group * GROUP + place % GROUP
        inside = (slot < num_listed) & (ids < vocab_size)
        x = tl.load(logits_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        key = _ordered(x)
        taken = inside & (key >= least) & (x > float("-inf"))
        at = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        # Sorts by falling value, since ~key falls as key rises, then by rising id.
        packed = ((~key).to(tl.int64) << 32) | ids.to(tl.int64)
        tl.store(keys_ptr + at, packed, mask=taken & (at < MOST))
        count += tl.sum(taken.to(tl.int32), 0)
    tl.debug_barrier()
    return count, least


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
    listed_ptr,  # [rows, GROUPS] int32 scratch: the groups that hold candidates
    keys_ptr,  # [rows, MOST] int64 scratch: candidates
    tokens_ptr,  # [rows] int64
    row_stride,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # num_groups, padded
    MOST: tl.constexpr,  # candidates
    HEAD_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    best = tl.load(best_ptr + row * num_groups + groups, mask=is_group, other=float("-inf"))
    total = tl.load(total_ptr + row * num_groups + groups, mask=is_group, other=0.0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    number = tl.load(number_ptr + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    most = tl.max(best, 0)
    limited = (top_k > 0) & (top_k < vocab_size)
    if (tl.abs(most) == float("inf")) | (temperature == 0.0):
        # Without a token, too, and where one of infinite weight takes all probability.
        token = _draw_greedy(logits_ptr, best, groups, most, vocab_size, GROUP, GROUPS)
    elif (limited == 0) & (top_p >= 1.0) & (min_p <= 0.0):
        token = _draw_in_order(logits_ptr, best, total, groups, most, scale, number, vocab_size, GROUP, GROUPS)
    else:
        wanted = tl.where(limited, tl.minimum(top_k, MOST), HEAD_LEN)
        own_keys_ptr = keys_ptr + row * MOST
        count, least = _collect(
            *(logits_ptr, listed_ptr + row * GROUPS, own_keys_ptr, best, groups, num_groups, most, wanted),
            *(vocab_size, GROUP, MOST, WIDTH),
        )
        rank = tl.arange(0, MOST)
        packed = tl.sort(tl.load(own_keys_ptr + rank, mask=rank < count, other=0x7FFFFFFFFFFFFFFF))
        value = _value(~((packed >> 32).to(tl.int32)))
        is_kept = (rank < count) & ((rank < top_k) | (limited == 0))
        share = tl.where(is_kept, tl.exp((value - most) * scale), 0.0).to(tl.float64)
        mass = tl.where(best == float("-inf"), 0.0, total * tl.exp((best - most) * scale))
        whole = tl.where(limited, tl.sum(share, 0), tl.sum(mass.to(tl.float64), 0))
        # Do the candidates hold all that the filters keep?
        below = tl.exp((_value(least) - most) * scale).to(tl.float64)
        is_enough = (top_p < 1.0) & (tl.sum(share, 0) >= top_p * whole)
        holds = tl.where(limited, top_k <= MOST, (below < min_p) | is_enough)
        if holds & (count <= MOST):
            end = tl.where(top_p < 1.0, top_p * whole, float("inf"))
            share = tl.where(tl.cumsum(share, 0) - share < end, share, 0.0)
            share = tl.where(share >= min_p, share, 0.0)
            target = number * tl.sum(share, 0)
            reached = (tl.cumsum(share, 0) > target) & (share > 0)
            last = tl.max(tl.where(share > 0, rank, 0), 0)
            chosen = tl.minimum(tl.min(tl.where(reached, rank, MOST), 0), last)
            token = tl.sum(tl.where(rank == chosen, packed & 0xFFFFFFFF, 0), 0).to(tl.int32)
        else:
            token = _draw_by_search(logits_ptr, vocab_size, most, scale, top_k, top_p, min_p, number, WIDTH)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def draw_rows(logits: torch.Tensor, rows: SamplingRows, *, tiles: SamplingTiles = SAMPLING_TILES) -> torch.Tensor:
    """A token of each row of logits [rows, vocab], any stride between rows: [rows] int64. NaN is never drawn."""
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
    keys = torch.empty((num_rows, tiles.candidates), dtype=torch.int64, device=device)
    groups_each = max(1, PASS // group)
    _groups_kernel[(triton.cdiv(num_groups, groups_each), num_rows)](
        *(logits, rows.temperature, stats[0], stats[1], logits.stride(0), vocab_size, num_groups),
        GROUP=group,
        GROUPS=groups_each,
        num_warps=4,
    )
    _draw_kernel[(num_rows,)](
        *(logits, stats[0], stats[1], rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.number),
        *(listed, keys, tokens, logits.stride(0), vocab_size, num_groups),
        GROUP=group,
        GROUPS=groups_padded,
        MOST=tiles.candidates,
        HEAD_LEN=tiles.head,
        WIDTH=max(PASS, group),
        num_warps=tiles.num_warps,
    )
    return tokens
