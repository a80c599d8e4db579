"""Which experts rows go to, and the assignments in order of their experts, ready for grouped matrix products.

An assignment is a row's choice of an expert, numbered row * top_k + choice. Grouping sorts assignments by expert, then
by number, by counting: no atomics, so that the order is the same in every run. The result says for each tile of rows
of the products which expert it belongs to; all of it stays on the device, in arrays whose sizes follow from the number
of assignments alone.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.moe import Routing, SigmoidRule
from kernels.triton_chain import chained, follow, lead

ALONE = 512  # assignments that one program sorts
STEP = 16  # of them that are compared at once
BLOCK = 128  # that a program sorts where there are more
MOST_BLOCKS = 512
SCANNED = 16  # experts whose blocks a program sums


@dataclass(frozen=True, slots=True)
class Groups:
    """Assignments by expert, and the tiles of `tile_rows` places that cover them, none of two experts."""

    order: torch.Tensor  # [num_assignments] int32: place to assignment
    num_tiles: torch.Tensor  # [1] int32
    tile_expert: torch.Tensor  # [most_tiles] int32, and so are the two below; entries past num_tiles are unwritten
    tile_first: torch.Tensor  # first place
    tile_end: torch.Tensor  # the place after the tile's last
    tile_rows: int
    top_k: int


@triton.jit
def _choose(scores, ids, TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr):
    """The TOP_K largest scores and their ids, the lowest id first among equals; the caller has made NaN into a number.

    Scores become integers of the same order, whose maximum a warp finds in one instruction.
    """
    places = tl.arange(0, CHOICES)
    chosen = tl.zeros((CHOICES,), tl.int32)
    values = tl.zeros((CHOICES,), tl.int32)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        expert = tl.min(tl.where(keys == best, ids, EXPERTS - 1), 0)
        chosen = tl.where(places == j, expert, chosen)
        values = tl.where(places == j, best, values)
        keys = tl.where(ids == expert, -0x80000000, keys)
    return chosen, tl.where(values < 0, values ^ 0x7FFFFFFF, values).to(tl.float32, bitcast=True)


@triton.jit
def _route_softmax_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    row_stride,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS, padded
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # TOP_K, padded
    RENORMALISE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    lead(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, WIDTH)
    inside = ids < EXPERTS
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(shares, 0)
    shares /= total
    scores = tl.where(inside, tl.where(shares == shares, shares, 0.0), float("-inf"))
    chosen, weights = _choose(scores, ids, TOP_K, CHOICES, EXPERTS)
    held = tl.arange(0, CHOICES) < TOP_K
    weights = tl.where(total == total, weights, total)  # a NaN stays in the row's weights, but its experts exist
    if RENORMALISE:
        weights /= tl.sum(tl.where(held, weights, 0.0), 0)
    at = row * TOP_K + tl.arange(0, CHOICES)
    tl.store(experts_ptr + at, chosen.to(tl.int64), mask=held)
    tl.store(weights_ptr + at, weights, mask=held)


@triton.jit
def _route_sigmoid_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    row_stride,
    scaling,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,  # of a group
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    lead(CHAINED)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)[:, None]
    member = tl.arange(0, SIZE_PADDED)[None, :]
    inside = (group < GROUPS) & (member < SIZE)
    ids = group * SIZE + member
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=0.0).to(tl.float32)
    scores = tl.sigmoid(logits)
    choice = scores + tl.load(bias_ptr + ids, mask=inside, other=0.0)
    choice = tl.where(inside, tl.where(choice == choice, choice, -1e30), float("-inf"))
    if TOP_GROUPS < GROUPS:
        best = tl.max(choice, 1)
        score = best
        if SIZE > 1:
            first = tl.min(tl.where(choice == best[:, None], member, SIZE), 1)
            score += tl.max(tl.where(member == first[:, None], float("-inf"), choice), 1)
        numbers = tl.arange(0, GROUPS_PADDED)
        score = tl.where(numbers < GROUPS, score, float("-inf"))
        equal_before = (score[None, :] == score[:, None]) & (numbers[None, :] < numbers[:, None])
        rank = tl.sum(((score[None, :] > score[:, None]) | equal_before).to(tl.int32), 1)
        choice = tl.where((rank < TOP_GROUPS)[:, None], choice, float("-inf"))
    WIDTH: tl.constexpr = GROUPS_PADDED * SIZE_PADDED
    flat_ids = tl.reshape(tl.where(inside, ids, EXPERTS), (WIDTH,))
    chosen, _ = _choose(tl.reshape(choice, (WIDTH,)), flat_ids, TOP_K, CHOICES, EXPERTS)
    held = tl.arange(0, CHOICES) < TOP_K
    flat = tl.reshape(scores, (WIDTH,))
    weights = tl.sum(tl.where(flat_ids[None, :] == chosen[:, None], flat[None, :], 0.0), 1)
    if RENORMALISE:
        weights /= tl.sum(tl.where(held, weights, 0.0), 0) + 1e-20
    at = row * TOP_K + tl.arange(0, CHOICES)
    tl.store(experts_ptr + at, chosen.to(tl.int64), mask=held)
    tl.store(weights_ptr + at, weights * scaling, mask=held)


def route_softmax(logits: torch.Tensor, *, top_k: int, renormalise: bool) -> Routing:
    """As kernels/moe.py's, of logits [num_rows, num_experts]: equal scores go to the lower expert."""
    num_rows, num_experts = logits.shape
    assert 0 < top_k <= num_experts, "top_k must not exceed the number of experts"
    assert logits.stride(1) == 1
    routing = _empty_routing(num_rows, top_k, logits.device)
    if num_rows:
        width = triton.next_power_of_2(num_experts)
        _route_softmax_kernel[(num_rows,)](
            logits,
            routing.experts,
            routing.weights,
            logits.stride(0),
            EXPERTS=num_experts,
            WIDTH=width,
            TOP_K=top_k,
            CHOICES=triton.next_power_of_2(top_k),
            RENORMALISE=renormalise,
            **chained(),
            num_warps=1 if width <= 512 else 4,
        )
    return routing


def route_sigmoid(logits: torch.Tensor, bias: torch.Tensor, rule: SigmoidRule) -> Routing:
    """As kernels/moe.py's, of logits [num_rows, num_experts] and a bias [num_experts] fp32."""
    num_rows, num_experts = logits.shape
    assert bias.shape == (num_experts,)
    assert bias.dtype == torch.float32
    assert bias.is_contiguous()
    assert num_experts % rule.num_groups == 0, "groups are of equal size"
    assert 0 < rule.top_groups <= rule.num_groups
    size = num_experts // rule.num_groups
    assert 0 < rule.top_k <= rule.top_groups * size, "top_k must not exceed the experts of the selected groups"
    assert logits.stride(1) == 1
    routing = _empty_routing(num_rows, rule.top_k, logits.device)
    if num_rows:
        groups_padded, size_padded = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(size)
        _route_sigmoid_kernel[(num_rows,)](
            logits,
            bias,
            routing.experts,
            routing.weights,
            logits.stride(0),
            rule.scaling,
            EXPERTS=num_experts,
            GROUPS=rule.num_groups,
            GROUPS_PADDED=groups_padded,
            SIZE_PADDED=size_padded,
            TOP_GROUPS=rule.top_groups,
            TOP_K=rule.top_k,
            CHOICES=triton.next_power_of_2(rule.top_k),
            RENORMALISE=rule.renormalise,
            **chained(),
            num_warps=1 if groups_padded * size_padded <= 512 else 4,
        )
    return routing


def _empty_routing(num_rows: int, top_k: int, device: torch.device) -> Routing:
    return Routing(
        torch.empty((num_rows, top_k), dtype=torch.int64, device=device),
        torch.empty((num_rows, top_k), dtype=torch.float32, device=device),
    )


@triton.jit
def _places(experts_ptr, num_assignments, mine, at, BLOCK_ROWS: tl.constexpr, STEP_ROWS: tl.constexpr):
    """Of each assignment: how many have a lower expert, or the same and a lower number."""
    # Summed at the end: a sum makes threads wait for each other.
    before = tl.zeros((BLOCK_ROWS, STEP_ROWS), tl.int32)
    for start in range(0, num_assignments, STEP_ROWS):
        others = start + tl.arange(0, STEP_ROWS)
        theirs = tl.load(experts_ptr + others, mask=others < num_assignments, other=1 << 30).to(tl.int32)
        equal_before = (theirs[None, :] == mine[:, None]) & (others[None, :] < at[:, None])
        before += ((theirs[None, :] < mine[:, None]) | equal_before).to(tl.int32)
    return tl.sum(before, 1)


@triton.jit
def _write_tiles(
    counts,  # [WIDTH] int32, assignments of each expert
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    TILE_ROWS: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Lays the tiles of all experts one after the other."""
    experts = tl.arange(0, WIDTH)
    first = tl.cumsum(counts, 0) - counts
    # An expert's last rows go with the tile before, where they are at most REST.
    tiles = tl.maximum((counts + TILE_ROWS - 1 - REST) // TILE_ROWS, (counts > 0).to(tl.int32))
    first_tile = tl.cumsum(tiles, 0) - tiles
    tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    for j in range(0, tl.max(tiles, 0)):
        held = j < tiles
        end = tl.where(j == tiles - 1, counts, (j + 1) * TILE_ROWS)
        tl.store(tile_expert_ptr + first_tile + j, experts, mask=held)
        tl.store(tile_first_ptr + first_tile + j, first + j * TILE_ROWS, mask=held)
        tl.store(tile_end_ptr + first_tile + j, first + end, mask=held)


@triton.jit
def _group_one_block_kernel(
    experts_ptr,
    order_ptr,
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    num_assignments,
    TILE_ROWS: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    at = tl.arange(0, BLOCK_ROWS)
    inside = at < num_assignments
    mine = tl.load(experts_ptr + at, mask=inside, other=0).to(tl.int32)
    counts = tl.histogram(mine, WIDTH, mask=inside)
    _write_tiles(counts, num_tiles_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, TILE_ROWS, REST, WIDTH)
    tl.store(order_ptr + _places(experts_ptr, num_assignments, mine, at, BLOCK_ROWS, STEP_ROWS), at, mask=inside)


@triton.jit
def _count_kernel(
    experts_ptr,
    counts_ptr,  # [num_blocks, WIDTH]
    ranks_ptr,  # [num_assignments]: how many of the block before this one have its expert
    num_assignments,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    block = tl.program_id(0)
    at = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = at < num_assignments
    mine = tl.load(experts_ptr + at, mask=inside, other=WIDTH).to(tl.int32)
    ids = tl.arange(0, WIDTH)
    tl.store(counts_ptr + block * WIDTH + ids, tl.sum((mine[:, None] == ids[None, :]).to(tl.int32), 0))
    before = (mine[None, :] == mine[:, None]) & (at[None, :] < at[:, None])
    tl.store(ranks_ptr + at, tl.sum(before.to(tl.int32), 1), mask=inside)


@triton.jit
def _scan_kernel(
    counts_ptr,  # [num_blocks, WIDTH]: becomes how many of each expert the blocks before have
    totals_ptr,  # [WIDTH]
    num_blocks,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,  # that a program takes
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    block = tl.arange(0, BLOCKS)[:, None]
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    at = counts_ptr + block * WIDTH + experts[None, :]
    counts = tl.load(at, mask=block < num_blocks, other=0)
    tl.store(at, tl.cumsum(counts, 0) - counts, mask=block < num_blocks)
    tl.store(totals_ptr + experts, tl.sum(counts, 0))


@triton.jit
def _order_kernel(
    experts_ptr,
    counts_ptr,  # as `_scan_kernel` leaves them
    totals_ptr,
    ranks_ptr,
    order_ptr,
    num_tiles_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    num_assignments,
    TILE_ROWS: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    block = tl.program_id(0) - 1
    totals = tl.load(totals_ptr + tl.arange(0, WIDTH))
    if block < 0:
        _write_tiles(totals, num_tiles_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, TILE_ROWS, REST, WIDTH)
    else:
        at = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = at < num_assignments
        mine = tl.load(experts_ptr + at, mask=inside, other=0).to(tl.int32)
        first = tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] < mine[:, None], totals[None, :], 0), 1)
        before = tl.load(counts_ptr + block * WIDTH + mine) + tl.load(ranks_ptr + at, mask=inside, other=0)
        tl.store(order_ptr + first + before, at, mask=inside)


def most_tiles(num_assignments: int, num_experts: int, tile_rows: int) -> int:
    """Tiles that any distribution needs at most."""
    return min(num_experts, num_assignments) + num_assignments // tile_rows


def group_by_expert(experts: torch.Tensor, num_experts: int, tile_rows: int, rest: int = 0) -> Groups:
    """Groups the choices [num_rows, top_k] int64, all in [0, num_experts).

    An expert's last tile holds up to `rest` places more, at most `tile_rows`.
    """
    num_assignments = experts.numel()
    assert experts.dtype == torch.int64
    assert experts.is_contiguous()
    assert num_assignments > 0
    width = max(16, triton.next_power_of_2(num_experts))
    room = most_tiles(num_assignments, num_experts, tile_rows)
    order = torch.empty(num_assignments, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((3, room), dtype=torch.int32, device=experts.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=experts.device)
    targets = (num_tiles, tiles[0], tiles[1], tiles[2])
    if num_assignments <= ALONE:
        block = max(16, triton.next_power_of_2(num_assignments))
        _group_one_block_kernel[(1,)](
            *(experts, order, *targets, num_assignments),
            TILE_ROWS=tile_rows,
            REST=rest,
            WIDTH=width,
            BLOCK_ROWS=block,
            STEP_ROWS=min(STEP, block),
            **chained(),
            num_warps=4 if block < ALONE else 8,
        )
    else:
        num_blocks = triton.cdiv(num_assignments, BLOCK)
        assert num_blocks <= MOST_BLOCKS, f"{num_assignments} assignments, at most {MOST_BLOCKS * BLOCK}"
        counts = torch.empty((num_blocks, width), dtype=torch.int32, device=experts.device)
        totals = torch.empty(width, dtype=torch.int32, device=experts.device)
        ranks = torch.empty(num_assignments, dtype=torch.int32, device=experts.device)
        _count_kernel[(num_blocks,)](
            *(experts, counts, ranks, num_assignments), WIDTH=width, BLOCK_ROWS=BLOCK, **chained(), num_warps=4
        )
        _scan_kernel[(width // SCANNED,)](
            *(counts, totals, num_blocks),
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(num_blocks),
            EXPERTS=SCANNED,
            **chained(),
            num_warps=8,
        )
        _order_kernel[(num_blocks + 1,)](
            *(experts, counts, totals, ranks, order, *targets, num_assignments),
            TILE_ROWS=tile_rows,
            REST=rest,
            WIDTH=width,
            BLOCK_ROWS=BLOCK,
            **chained(),
            num_warps=4,
        )
    return Groups(order, num_tiles, tiles[0], tiles[1], tiles[2], tile_rows, experts.shape[1])
