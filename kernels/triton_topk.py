"""The best keys of each row, exactly: everything above the last kept score, then equals from the left.

A row's scores are put into groups, as many whatever its length, and the largest of each is a peak. A value that
`count` peaks reach is one that `count` scores reach, so nothing below it is kept, and with two groups for each wanted
score about a third more than `count` reach it. Every chunk of a row lists its scores that do, in order. One program a
row then finds the last kept score among those listed and writes the choice. Groups and chunks change how many are
listed, never what is chosen: the result is the one that kernels/indexer.py's `top_keys` defines.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from kernels.triton_chain import chained, follow

LIST_WARPS = 8
CHOOSE_WARPS = 16
CHUNK = 8192  # scores that one program lists; their places in it are int16
TILE = 4096  # scores that a program looks at at once, for peaks or for the choice
PEAKS = 4096  # of a row
MOST_PEAKS = 8192  # where more than half of PEAKS are wanted
GROUPS = 256  # of a program that finds peaks
NO_KEY = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _sortable(scores):
    """uint32 in the order of the scores, none of them 0; 0 and -0 are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _reaching(keys, bound):
    """How many keys are at least `bound`."""
    return tl.sum((keys >= bound).to(tl.int32), 0)


@triton.jit
def _middle(low, high, num_low, num_high, wanted, turn):
    """A key between two: where `wanted` would be reached if keys lay evenly, and every third time halfway."""
    width = high - low
    share = (num_low - wanted).to(tl.float32) / (num_low - num_high).to(tl.float32)
    offset = (width.to(tl.float32) * tl.where(turn % 3 == 2, 0.5, share)).to(tl.uint32)
    return low + tl.minimum(tl.maximum(offset, 1), width - 1)


@triton.jit
def _bound(peaks, wanted):
    """A key that `wanted` peaks reach and hardly more, or 1 where there are not so many; and one that none reaches."""
    low = tl.min(tl.where(peaks > 0, peaks, NO_KEY), 0)
    num_low = _reaching(peaks, low)
    top = tl.max(peaks, 0) + 1
    if num_low < wanted:
        low = tl.full((), 1, tl.uint32)
        num_low = wanted
    high = top
    num_high = 0
    turn = 0
    while (num_low > wanted + wanted // 16) & (high - low > 1):
        middle = _middle(low, high, num_low, num_high, wanted, turn)
        reaching = _reaching(peaks, middle)
        if reaching >= wanted:
            low = middle
            num_low = reaching
        else:
            high = middle
            num_high = reaching
        turn += 1
    return low, top


@triton.jit
def _peaks_kernel(
    scores_ptr, visible_ptr, peaks_ptr, scores_stride,
    PEAKS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The largest of each group, as a key; 0 where the row sees nothing of it. Every PEAKS-th score is of one group."""
    follow(CHAINED)
    row = tl.program_id(1).to(tl.int64)
    visible = tl.load(visible_ptr + row)
    scores_ptr += row * scores_stride
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    steps = tl.arange(0, TILE // GROUPS) * PEAKS
    peaks = tl.zeros((GROUPS,), tl.uint32)
    for start in range(0, visible, TILE // GROUPS * PEAKS):
        places = start + steps[:, None] + groups[None, :]
        seen = places < visible
        keys = _sortable(tl.load(scores_ptr + places, mask=seen, other=0.0))
        peaks = tl.maximum(peaks, tl.max(tl.where(seen, keys, 0), 0))
    tl.store(peaks_ptr + row * PEAKS + groups, peaks)


@triton.jit
def _list_kernel(
    scores_ptr, visible_ptr, peaks_ptr, lists_ptr, lengths_ptr, bounds_ptr, scores_stride, count,
    PEAKS: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The places in a chunk of the scores that may be kept, ascending; and between which keys the last kept one is."""
    follow(CHAINED)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    visible = tl.load(visible_ptr + row)
    begin = chunk * CHUNK
    length_ptr = lengths_ptr + row * tl.num_programs(0) + chunk
    if begin >= visible:
        tl.store(length_ptr, 0)
        return
    steps = tl.arange(0, CHUNK)
    here = begin + steps < visible
    keys = _sortable(tl.load(scores_ptr + row * scores_stride + begin + steps, mask=here, other=0.0))
    peaks = tl.load(peaks_ptr + row * PEAKS + tl.arange(0, PEAKS))
    bound, top = _bound(peaks, tl.minimum(visible, count))
    listed = (here & (keys >= bound)).to(tl.int32)
    rank = tl.cumsum(listed, 0) - 1
    list_ptr = lists_ptr + (row * tl.num_programs(0) + chunk) * CHUNK
    tl.store(list_ptr + rank, steps.to(tl.int16), mask=listed > 0)
    tl.store(length_ptr, tl.sum(listed, 0))
    if chunk == 0:
        tl.store(bounds_ptr + row * 2, bound)
        tl.store(bounds_ptr + row * 2 + 1, top)


@triton.jit
def _listed(scores_ptr, lists_ptr, lengths_ptr, num_chunks, start, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Places and keys of the row's listed scores [start, start + TILE), in order; keys of nothing are 0."""
    steps = start + tl.arange(0, TILE)
    at = steps  # in all lists, each as long as its chunk
    end = 0
    for chunk in range(num_chunks):
        length = tl.load(lengths_ptr + chunk)
        end += length
        at += tl.where(steps >= end, CHUNK - length, 0)
    held = steps < end
    places = at // CHUNK * CHUNK + tl.load(lists_ptr + at, mask=held, other=0).to(tl.int32)
    keys = _sortable(tl.load(scores_ptr + places, mask=held, other=0.0))
    return places, tl.where(held, keys, 0), end


@triton.jit(do_not_specialize=["num_chunks"])
def _choose_kernel(
    scores_ptr, visible_ptr, lists_ptr, lengths_ptr, bounds_ptr, picks_ptr, scores_stride, count, num_chunks,
    CHUNK: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.minimum(tl.load(visible_ptr + row), count)
    scores_ptr += row * scores_stride
    lists_ptr += row * num_chunks * CHUNK
    lengths_ptr += row * num_chunks
    picks_ptr += row * count
    steps = tl.arange(0, TILE)
    for start in range(wanted, count, TILE):
        tl.store(picks_ptr + start + steps, -1, mask=start + steps < count)
    if wanted == 0:
        return
    low = tl.load(bounds_ptr + row * 2)
    high = tl.load(bounds_ptr + row * 2 + 1)
    # Hardly ever are more listed than what stays at hand.
    places, keys, num_listed = _listed(scores_ptr, lists_ptr, lengths_ptr, num_chunks, 0, CHUNK, TILE)
    # As many as are wanted reach `low`, and fewer reach `high`.
    num_low = num_listed
    num_high = 0
    turn = 0
    while (num_low > wanted) & (high - low > 1):
        middle = _middle(low, high, num_low, num_high, wanted, turn)
        reaching = _reaching(keys, middle)
        for start in range(TILE, num_listed, TILE):
            _, more, _ = _listed(scores_ptr, lists_ptr, lengths_ptr, num_chunks, start, CHUNK, TILE)
            reaching += _reaching(more, middle)
        if reaching >= wanted:
            low = middle
            num_low = reaching
        else:
            high = middle
            num_high = reaching
        turn += 1
    # What reaches `high` is kept, and so many as are free of what reaches `low` alone, which then are equals or all.
    free = wanted - num_high
    above_before = 0
    equal_before = 0
    for start in range(0, num_listed, TILE):
        if start > 0:
            places, keys, _ = _listed(scores_ptr, lists_ptr, lengths_ptr, num_chunks, start, CHUNK, TILE)
        above = (keys >= high).to(tl.int32)
        equal = ((keys >= low) & (keys < high)).to(tl.int32)
        above_upto = above_before + tl.cumsum(above, 0)
        equal_upto = equal_before + tl.cumsum(equal, 0)
        is_kept = (above > 0) | ((equal > 0) & (equal_upto <= free))
        tl.store(picks_ptr + above_upto + tl.minimum(equal_upto, free) - 1, places, mask=is_kept)
        above_before += tl.sum(above, 0)
        equal_before += tl.sum(equal, 0)


def top_keys(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """Of the first visible[n] scores of row n the `count` best, on ties the lower index.

    Args:
        scores: [num_rows, num_keys] float32, rows any distance apart; none that is seen is NaN.
        visible: [num_rows] int32, each at most num_keys.
        count: the most that a row keeps; may exceed num_keys.

    Returns:
        [num_rows, count] int32: indices, ascending, then -1.
    """
    num_rows, num_keys = scores.shape
    assert scores.dtype == torch.float32
    assert scores.stride(1) == 1
    assert visible.shape == (num_rows,)
    assert visible.dtype == torch.int32
    assert count > 0
    device = scores.device
    stride = scores.stride(0)
    num_chunks = max(1, triton.cdiv(num_keys, CHUNK))
    num_peaks = PEAKS if 2 * count <= PEAKS else MOST_PEAKS
    peaks = torch.empty((num_rows, num_peaks), dtype=torch.uint32, device=device)
    lists = torch.empty((num_rows, num_chunks, CHUNK), dtype=torch.int16, device=device)
    lengths = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    bounds = torch.empty((num_rows, 2), dtype=torch.uint32, device=device)
    picks = torch.empty((num_rows, count), dtype=torch.int32, device=device)
    _peaks_kernel[(num_peaks // GROUPS, num_rows)](
        scores, visible, peaks, stride, PEAKS=num_peaks, GROUPS=GROUPS, TILE=TILE, num_warps=4, **chained()
    )
    _list_kernel[(num_chunks, num_rows)](
        scores, visible, peaks, lists, lengths, bounds, stride, count,
        PEAKS=num_peaks, CHUNK=CHUNK, num_warps=LIST_WARPS, **chained(),
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        scores, visible, lists, lengths, bounds, picks, stride, count, num_chunks,
        CHUNK=CHUNK, TILE=TILE, num_warps=CHOOSE_WARPS, **chained(),
    )  # fmt: skip
    return picks
