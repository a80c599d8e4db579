"""The best keys of each row, exactly: everything above the last kept score, then equals from the left.

A radix selection. Four passes count the scores by one byte of their order-preserving bits, each among those that agree
with the last kept score in the bytes before; then every chunk of a row counts what it keeps, and writes it behind the
chunks before it. Counters are integers, so the order in which programs add to them changes nothing: the result is the
one that kernels/indexer.py's `top_keys` defines.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

CHUNK = 8192  # scores of a program
LEVELS = tl.constexpr(4)
BINS = tl.constexpr(256)


@triton.jit
def _sortable(scores):
    """uint32 in the order of the scores; 0 and -0 are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _last_kept(hist_ptr, row, wanted, NUM_LEVELS: tl.constexpr):
    """The leading bytes of the last kept score, and how many of those that share them are kept."""
    bins = tl.arange(0, BINS)
    prefix = tl.zeros((), tl.uint32)
    for level in tl.static_range(NUM_LEVELS):
        counts = tl.load(hist_ptr + (row * LEVELS + level) * BINS + bins)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # scores in higher bins
        kept = tl.sum((above >= wanted).to(tl.int32), 0)  # the bin of the last kept score
        wanted -= tl.sum(tl.where(bins > kept, counts, 0), 0)
        prefix = (prefix << 8) | kept.to(tl.uint32)
    return prefix, wanted


@triton.jit
def _count_kernel(scores_ptr, visible_ptr, hist_ptr, scores_stride, count, LEVEL: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(1)
    visible = tl.load(visible_ptr + row)
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(0) * CHUNK >= visible:
        return
    keys = _sortable(tl.load(scores_ptr + row.to(tl.int64) * scores_stride + places, mask=places < visible, other=0.0))
    counted = places < visible
    if LEVEL > 0:
        prefix, _ = _last_kept(hist_ptr, row, tl.minimum(visible, count), LEVEL)
        counted = counted & ((keys >> (32 - 8 * LEVEL)) == prefix)
    byte = (keys >> (24 - 8 * LEVEL)) & 0xFF
    counts = tl.histogram(byte.to(tl.int32), BINS, mask=counted)
    bins = tl.arange(0, BINS)
    tl.atomic_add(hist_ptr + (row * LEVELS + LEVEL) * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _survey_kernel(scores_ptr, visible_ptr, hist_ptr, kept_ptr, scores_stride, count, CHUNK: tl.constexpr):
    """How many scores of each chunk lie above the last kept one, and how many equal it."""
    row = tl.program_id(1)
    visible = tl.load(visible_ptr + row)
    place = kept_ptr + (row * tl.num_programs(0) + tl.program_id(0)) * 2
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(0) * CHUNK >= visible:
        tl.store(place, 0)
        tl.store(place + 1, 0)
        return
    keys = _sortable(tl.load(scores_ptr + row.to(tl.int64) * scores_stride + places, mask=places < visible, other=0.0))
    last, _ = _last_kept(hist_ptr, row, tl.minimum(visible, count), LEVELS)
    here = places < visible
    tl.store(place, tl.sum((here & (keys > last)).to(tl.int32), 0))
    tl.store(place + 1, tl.sum((here & (keys == last)).to(tl.int32), 0))


@triton.jit
def _write_kernel(
    scores_ptr,
    visible_ptr,
    hist_ptr,
    kept_ptr,
    picks_ptr,
    scores_stride,
    count,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    visible = tl.load(visible_ptr + row)
    wanted = tl.minimum(visible, count)
    picks_ptr += row.to(tl.int64) * count
    steps = tl.arange(0, CHUNK)
    if chunk == 0:
        for start in range(0, count, CHUNK):
            places = start + steps
            tl.store(picks_ptr + places, -1, mask=(places >= wanted) & (places < count))
    places = chunk * CHUNK + steps
    if chunk * CHUNK >= visible:
        return
    keys = _sortable(tl.load(scores_ptr + row.to(tl.int64) * scores_stride + places, mask=places < visible, other=0.0))
    last, free = _last_kept(hist_ptr, row, wanted, LEVELS)
    chunks = tl.arange(0, CHUNKS)
    earlier = kept_ptr + (row * num_chunks + chunks) * 2
    above_before = tl.sum(tl.load(earlier, mask=chunks < chunk, other=0), 0)
    equal_before = tl.sum(tl.load(earlier + 1, mask=chunks < chunk, other=0), 0)
    here = places < visible
    equal = (here & (keys == last)).to(tl.int32)
    kept_equal = (equal > 0) & (equal_before + tl.cumsum(equal, 0) <= free)
    chosen = (here & (keys > last)) | kept_equal
    rank = above_before + tl.minimum(equal_before, free) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(picks_ptr + rank, places, mask=chosen)


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
    picks = torch.empty((num_rows, count), dtype=torch.int32, device=scores.device)
    num_chunks = max(1, triton.cdiv(num_keys, CHUNK))
    hist = torch.zeros((num_rows, LEVELS.value, BINS.value), dtype=torch.int32, device=scores.device)
    kept = torch.empty((num_rows, num_chunks, 2), dtype=torch.int32, device=scores.device)
    grid = (num_chunks, num_rows)
    stride = scores.stride(0)
    for level in range(LEVELS.value):
        _count_kernel[grid](scores, visible, hist, stride, count, LEVEL=level, CHUNK=CHUNK, num_warps=8)
    _survey_kernel[grid](scores, visible, hist, kept, stride, count, CHUNK=CHUNK, num_warps=8)
    _write_kernel[grid](
        scores,
        visible,
        hist,
        kept,
        picks,
        stride,
        count,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )
    return picks
