"""Draws from a list of tokens too long to sort: each border among them is searched by cutting the range of values.

Values are compared as int32 keys that order as they do. A border is where top-k or top-p ends, or where the draw
falls: the largest key of which the tokens on it and above reach a number and a mass. Passes over the list narrow its
range until few tokens are left in it, and those are counted one by one.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

import triton
import triton.language as tl

MARKS = tl.constexpr(8)  # values that a pass over the list looks at


@triton.jit
def ordered_key(x):
    """float32 to int32 that order alike; -0 and 0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of an `ordered_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _mass_above(values_ptr, length, key, most, scale, WIDTH: tl.constexpr):
    """The probability mass of the listed tokens above `key`, relative to the largest value's."""
    steps = tl.arange(0, WIDTH)
    mass = tl.zeros((WIDTH,), tl.float64)
    for start in tl.range(0, length, WIDTH, num_stages=3):
        x = tl.load(values_ptr + start + steps, mask=start + steps < length, other=float("-inf"))
        is_above = (ordered_key(x) > key) & (start + steps < length)
        mass += tl.where(is_above, tl.exp((x - most) * scale), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def _narrow(values_ptr, length, low, high, most, scale, rank, mass, FEW: tl.constexpr, WIDTH: tl.constexpr):
    """Narrows the keys [low, high] around the one that `_search` looks for, until they hold FEW tokens or are one key.

    Each pass over the tokens cuts the range in MARKS, by value and by key in turns: values fall evenly, and keys come
    to an end where values lie close to 0.
    """
    steps = tl.arange(0, WIDTH)
    marks = tl.arange(0, MARKS) + 1
    from_low = length  # tokens on `low` and above
    past_high = 0  # tokens above `high`
    by_key = low == high
    while (low < high) & (from_low - past_high > FEW):
        even = low + ((high - low) * marks + (MARKS - 1)) // MARKS
        first = value_of(low.to(tl.int32))
        value = first + (value_of(high.to(tl.int32)) - first) * (marks.to(tl.float32) / MARKS)
        at = tl.where(by_key, even, ordered_key(value).to(tl.int64))
        at = tl.minimum(tl.maximum(at, low + 1), high)
        counts = tl.zeros((MARKS, WIDTH), tl.int32)
        masses = tl.zeros((MARKS, WIDTH), tl.float32)
        for start in tl.range(0, length, WIDTH, num_stages=3):
            x = tl.load(values_ptr + start + steps, mask=start + steps < length, other=float("-inf"))
            share = tl.exp((x - most) * scale)
            is_above = ordered_key(x)[None, :] >= at.to(tl.int32)[:, None]
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, share[None, :], 0.0)
        count = tl.sum(counts, 1)
        reached = (count >= rank) & (tl.sum(masses.to(tl.float64), 1) > mass)
        from_low = tl.min(tl.where(reached, count, from_low), 0)
        past_high = tl.max(tl.where(reached, past_high, count), 0)
        high = tl.min(tl.where(reached, high, at - 1), 0)
        low = tl.max(tl.where(reached, at, low), 0)
        by_key = by_key == 0
    return low, high


@triton.jit
def _search(values_ptr, few_ptr, length, low, most, scale, rank, mass, FEW: tl.constexpr, WIDTH: tl.constexpr):
    """The largest key of which all tokens on it or above number at least `rank` and hold more than `mass`.

    Where no key reaches that, it is the lowest one. Returns it, how many tokens are above it and on it, and the mass
    above it.
    """
    low, high = _narrow(
        values_ptr, length, low.to(tl.int64), ordered_key(most).to(tl.int64), most, scale, rank, mass, FEW, WIDTH // 4
    )
    steps = tl.arange(0, WIDTH)
    above = tl.zeros((WIDTH,), tl.int32)
    masses = tl.zeros((WIDTH,), tl.float64)
    num_few = tl.full((), 0, tl.int32)
    for start in tl.range(0, length, WIDTH, num_stages=3):
        inside = start + steps < length
        x = tl.load(values_ptr + start + steps, mask=inside, other=float("-inf"))
        key = ordered_key(x)
        is_above = inside & (key > high)
        above += is_above.to(tl.int32)
        masses += tl.where(is_above, tl.exp((x - most) * scale), 0.0).to(tl.float64)
        is_few = (inside & (key >= low) & (key <= high)).to(tl.int32)
        at = num_few + tl.cumsum(is_few, 0) - 1
        tl.store(few_ptr + at, key, mask=(is_few > 0) & (at < FEW))
        num_few += tl.sum(is_few, 0)
    num_above = tl.sum(above, 0)
    held = tl.sum(masses, 0)
    num_equal = num_few
    if low < high:
        tl.debug_barrier()
        at = tl.arange(0, FEW)
        few = tl.load(few_ptr + at, mask=at < num_few, other=-0x80000000)
        share = tl.exp((value_of(few) - most) * scale).to(tl.float64)
        while low < high:
            middle = low + (high - low + 1) // 2
            is_above = few >= middle
            all_held = held + tl.sum(tl.where(is_above, share, 0.0), 0)
            reached = (num_above + tl.sum(is_above.to(tl.int32), 0) >= rank) & (all_held > mass)
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        num_above += tl.sum((few > low).to(tl.int32), 0)
        num_equal = tl.sum((few == low).to(tl.int32), 0)
        held += tl.sum(tl.where(few > low, share, 0.0), 0)
        tl.debug_barrier()
    return low.to(tl.int32), num_above, num_equal, held


@triton.jit
def _nth_equal(values_ptr, ids_ptr, length, key, n, WIDTH: tl.constexpr):
    """The id of the n-th listed token (from 0) whose value is `key`; the last one where there are fewer."""
    steps = tl.arange(0, WIDTH)
    place = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int32)
    for start in tl.range(0, length, WIDTH, num_stages=3):
        inside = start + steps < length
        x = tl.load(values_ptr + start + steps, mask=inside, other=float("-inf"))
        equal = ((ordered_key(x) == key) & inside).to(tl.int32)
        rank = passed + tl.cumsum(equal, 0) - 1
        place = tl.maximum(place, tl.max(tl.where((equal > 0) & (rank <= n), start + steps, 0), 0))
        passed += tl.sum(equal, 0)
    return tl.load(ids_ptr + place)


@triton.jit
def _least_key_from(values_ptr, length, bound, WIDTH: tl.constexpr):
    """The smallest key of a listed token on `bound` or above."""
    steps = tl.arange(0, WIDTH)
    least = tl.full((WIDTH,), 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, length, WIDTH, num_stages=3):
        inside = start + steps < length
        key = ordered_key(tl.load(values_ptr + start + steps, mask=inside, other=0.0))
        least = tl.minimum(least, tl.where(inside & (key >= bound), key, 0x7FFFFFFF))
    return tl.min(least, 0)


@triton.jit
def draw_by_search(
    values_ptr,
    ids_ptr,
    few_ptr,
    length,
    low,
    most,
    scale,
    vocab_size,
    whole,
    limit,
    top_p,
    min_p,
    number,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Top-k, top-p, min-p and the draw from a list that holds all they can keep, each by searching for a value.

    `limit` is how many top-k keeps, vocab_size at least where that is all; `whole` is the mass of all tokens.
    """
    key = low
    kept_equal = tl.full((), 1 << 30, tl.int32)  # of the tokens on `key`, how many are kept
    equal = kept_equal
    kept = whole
    if limit < vocab_size:
        key, above, equal, mass = _search(values_ptr, few_ptr, length, low, most, scale, limit, -1.0, FEW, WIDTH)
        kept_equal = tl.minimum(limit - above, equal)
        kept = mass + kept_equal.to(tl.float64) * tl.exp((value_of(key) - most) * scale).to(tl.float64)
    if top_p < 1.0:
        wanted = top_p * kept
        # A token stays while the mass before it is below what is wanted.
        p_key, above, p_equal, mass = _search(
            values_ptr, few_ptr, length, low, most, scale, 1, wanted * (1.0 - 1e-15), FEW, WIDTH
        )
        if p_key >= key:
            share = tl.exp((value_of(p_key) - most) * scale).to(tl.float64)
            needed = tl.ceil((wanted - mass) / tl.maximum(share, 1e-300)).to(tl.int32)
            most_equal = tl.where(p_key == key, tl.minimum(kept_equal, p_equal), p_equal)
            kept_equal = tl.minimum(tl.maximum(needed, 1), most_equal)
            key = p_key
            kept = mass + kept_equal.to(tl.float64) * share
    if min_p > 0.0:
        # The first key whose share is too small; all above stay.
        small_low = key.to(tl.int64) - 1
        small_high = ordered_key(most).to(tl.int64)
        while small_low < small_high:
            middle = small_low + (small_high - small_low + 1) // 2
            small = tl.exp((value_of(middle.to(tl.int32)) - most) * scale).to(tl.float64) < min_p
            small_low = tl.where(small, middle, small_low)
            small_high = tl.where(small, small_high, middle - 1)
        if small_low >= key:
            key = small_low.to(tl.int32)
            kept_equal = tl.full((), 0, tl.int32)
            kept = _mass_above(values_ptr, length, key, most, scale, WIDTH)
    target = number * kept
    bound = tl.where(kept_equal > 0, key, key + 1)  # no kept token is below it
    drawn, above, equal, mass = _search(values_ptr, few_ptr, length, bound, most, scale, 1, target, FEW, WIDTH)
    share = tl.exp((value_of(drawn) - most) * scale).to(tl.float64)
    n = ((target - mass) / tl.maximum(share, 1e-300)).to(tl.int32)
    if equal == 0:
        # By rounding the number lies past all that is kept: its last token.
        drawn = _least_key_from(values_ptr, length, bound, WIDTH)
        equal = tl.full((), 1 << 30, tl.int32)
        n = equal
    last = tl.where(drawn == key, tl.minimum(kept_equal, equal), equal) - 1
    return _nth_equal(values_ptr, ids_ptr, length, drawn, tl.maximum(tl.minimum(n, last), 0), WIDTH)
