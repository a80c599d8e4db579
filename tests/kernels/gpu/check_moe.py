"""Routing and grouped experts: against kernels/moe.py and float64."""

import pytest
import torch

from kernels import moe
from kernels.moe import Activation, ActivationKind, Routing, SigmoidRule, experts_reference
from kernels.triton_moe import MOST, MoeTiles, ProductTiles, grouped_experts
from kernels.triton_routing import ALONE, group_by_expert, most_tiles, route_sigmoid, route_softmax
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, randn, relative_error

SWIGLU = Activation(ActivationKind.SWIGLU, None)
CLAMPED = Activation(ActivationKind.SWIGLU, 0.5)
RELU_SQUARED = Activation(ActivationKind.RELU_SQUARED, None)
SMALL = MoeTiles(16, 0, ProductTiles(16, 32, 4, 2), ProductTiles(16, 16, 4, 2))
RESTING = MoeTiles(16, 16, ProductTiles(16, 32, 4, 2), ProductTiles(32, 16, 4, 2))
LARGE = MoeTiles(64, 32, ProductTiles(64, 64, 4, 3), ProductTiles(128, 64, 4, 3))

SIZES = [
    *[(1, 48, 24, SMALL), (7, 40, 16, SMALL), (33, 64, 32, None), (24, 40, 24, RESTING)],
    *(
        []
        if INTERPRETED
        else [(70, 192, 96, LARGE), (300, 256, 128, LARGE), (64, 2048, 512, None), (900, 256, 128, MOST)]
    ),
]


def same_routing(got, want):
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights, want.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("experts", "top_k"), [(5, 3), (64, 8), (256, 8)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_routing_equals_the_torch_form(experts, top_k, renormalise):
    logits = randn(9, experts, seed=1, dtype=torch.float32)
    logits[3] = 0.0  # all equal: the lowest experts
    got = route_softmax(logits, top_k=top_k, renormalise=renormalise)
    same_routing(got, moe.route_softmax(logits, top_k=top_k, renormalise=renormalise))
    assert got.experts[3].tolist() == list(range(top_k))


@pytest.mark.parametrize(
    "rule", [SigmoidRule(8, 8, 4, True, 2.5), SigmoidRule(3, 1, 1, False, 1.0), SigmoidRule(2, 64, 5, True, 1.0)]
)
def test_sigmoid_routing_equals_the_torch_form(rule):
    logits, bias = randn(9, 64, seed=2, dtype=torch.float32), randn(64, seed=3, dtype=torch.float32)
    logits[2], logits[5] = 0.0, -200.0
    bias = torch.where(bias.abs() < 0.5, 0.0, bias)
    same_routing(route_sigmoid(logits, bias, rule), moe.route_sigmoid(logits, bias, rule))


def test_a_nan_row_has_experts_that_exist_and_harms_no_other():
    logits = randn(3, 20, seed=4, dtype=torch.float32)
    clean = route_softmax(logits, top_k=4, renormalise=True)
    logits[1, 7] = torch.nan
    got = route_softmax(logits, top_k=4, renormalise=True)
    assert ((got.experts >= 0) & (got.experts < 20)).all()
    assert torch.equal(got.weights[[0, 2]], clean.weights[[0, 2]])
    rule = SigmoidRule(4, 4, 2, True, 1.0)
    chosen = route_sigmoid(logits * torch.nan, torch.zeros(20, device=DEVICE), rule).experts
    assert ((chosen >= 0) & (chosen < 20)).all()


@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("num_rows", [1, 16, 64, ALONE // 4, ALONE // 4 + 1, 500])
def test_groups_are_sorted_by_expert_then_number(num_rows, rest):
    num_experts, top_k, tile_rows = 24, 4, 16
    experts = torch.randint(0, num_experts - 1, (num_rows, top_k), generator=torch.Generator().manual_seed(5))
    groups = group_by_expert(experts.to(DEVICE), num_experts, tile_rows, rest)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    assert groups.order.tolist() == order.tolist()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    tiles = []
    first = 0
    for expert, count in enumerate(counts):
        cuts = [j for j in range(0, count, tile_rows) if j == 0 or count - j > rest]
        tiles += [(expert, first + j, first + end) for j, end in zip(cuts, [*cuts, count][1:], strict=True)]
        first += count
    n = int(groups.num_tiles)
    got = zip(*(x[:n].tolist() for x in (groups.tile_expert, groups.tile_first, groups.tile_end)), strict=True)
    assert list(got) == tiles
    assert n <= most_tiles(flat.numel(), num_experts, tile_rows)


@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED, RELU_SQUARED])
@pytest.mark.parametrize(("num_rows", "width", "inner", "tiles"), SIZES)
def test_experts_equal_float64(activation, num_rows, width, inner, tiles):
    num_experts, top_k = 6, 3
    factor = 2 if activation.kind is ActivationKind.SWIGLU else 1
    up = randn(num_experts, factor * inner, width, seed=6)
    down = randn(num_experts, width + 8, inner, seed=7)
    up[5], down[5] = torch.nan, torch.nan  # an expert without rows is never read into anyone's result
    rows = randn(num_rows, width + 3, seed=8)[:, :width]
    logits = randn(num_rows, num_experts, seed=9, dtype=torch.float32)
    logits[:, 5] = -torch.inf
    routing = route_softmax(logits, top_k=top_k, renormalise=True)
    got = grouped_experts(rows, routing, up, down, activation, tiles=tiles)
    wide = Routing(routing.experts.cpu(), routing.weights.double().cpu())
    want = experts_reference(rows.double().cpu(), wide, up.double().cpu(), down.double().cpu(), activation)
    assert relative_error(got.cpu(), want) < 6e-3


def test_a_row_alone_gives_the_bytes_it_gives_among_others():
    up, down = randn(4, 64, 32, seed=10), randn(4, 32, 32, seed=11)
    rows, logits = randn(40, 32, seed=12), randn(40, 4, seed=13, dtype=torch.float32)
    routing = route_softmax(logits, top_k=2, renormalise=True)
    out = grouped_experts(rows, routing, up, down, SWIGLU, tiles=SMALL)
    for r in (0, 17, 39):
        own = Routing(routing.experts[r : r + 1], routing.weights[r : r + 1])
        assert torch.equal(grouped_experts(rows[r : r + 1], own, up, down, SWIGLU, tiles=SMALL)[0], out[r])


def test_no_rows_are_no_launch():
    routing = route_softmax(torch.empty((0, 4), device=DEVICE), top_k=2, renormalise=True)
    out = grouped_experts(randn(0, 32, seed=1), routing, randn(4, 64, 32, seed=2), randn(4, 32, 32, seed=3), SWIGLU)
    assert out.shape == (0, 32)
