"""Routing rules against hand-made cases, grouped experts against the float64 reference."""

import pytest
import torch

from kernels.moe import (
    Activation,
    ActivationKind,
    Routing,
    SigmoidRule,
    experts_reference,
    grouped_experts,
    route_sigmoid,
    route_softmax,
)

SWIGLU = Activation(ActivationKind.SWIGLU, None)
CLAMPED = Activation(ActivationKind.SWIGLU, 0.5)
RELU_SQUARED = Activation(ActivationKind.RELU_SQUARED, None)


def make_experts(activation: Activation, *, num_experts: int = 5, width: int = 11, inner: int = 7, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    factor = 2 if activation.kind is ActivationKind.SWIGLU else 1
    up = torch.randn(num_experts, factor * inner, width, generator=generator)
    down = torch.randn(num_experts, width, inner, generator=generator)
    return up, down


def make_rows(num_rows: int, *, width: int = 11, num_experts: int = 5, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator), torch.randn(num_rows, num_experts, generator=generator)


def in_float64(rows, routing, up, down, activation):
    wide = Routing(routing.experts, routing.weights.double())
    return experts_reference(rows.double(), wide, up.double(), down.double(), activation)


@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED, RELU_SQUARED])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_grouped_experts_equal_the_plain_mathematics(activation: Activation, num_rows: int) -> None:
    up, down = make_experts(activation)
    rows, logits = make_rows(num_rows)
    routing = route_softmax(logits, top_k=3, renormalise=True)
    want = in_float64(rows, routing, up, down, activation)
    assert torch.allclose(grouped_experts(rows, routing, up, down, activation).double(), want, atol=2e-5)


def test_the_clamp_changes_what_it_clamps() -> None:
    up, down = make_experts(SWIGLU)
    rows, logits = make_rows(9)
    routing = route_softmax(logits, top_k=2, renormalise=True)
    free = grouped_experts(rows, routing, up, down, SWIGLU)
    assert (free - grouped_experts(rows, routing, up, down, CLAMPED)).abs().max() > 0.1


def test_four_thousand_rows_go_through_as_they_do_in_parts() -> None:
    up, down = make_experts(SWIGLU)
    rows, logits = make_rows(4096)
    routing = route_softmax(logits, top_k=3, renormalise=True)
    whole = grouped_experts(rows, routing, up, down, SWIGLU)
    part = slice(1000, 1100)
    alone = grouped_experts(rows[part], Routing(routing.experts[part], routing.weights[part]), up, down, SWIGLU)
    assert torch.allclose(whole[part], alone, atol=1e-5)


def test_all_rows_to_one_expert_leave_the_others_untouched() -> None:
    up, down = make_experts(SWIGLU)
    up[torch.tensor([0, 1, 2, 4])] = torch.nan  # would spread if any row visited them
    rows, _ = make_rows(6)
    routing = Routing(torch.full((6, 1), 3), torch.ones(6, 1))
    out = grouped_experts(rows, routing, up, down, SWIGLU)
    assert torch.allclose(out.double(), in_float64(rows, routing, up, down, SWIGLU), atol=2e-5)


def test_an_expert_without_rows_is_never_read() -> None:
    up, down = make_experts(RELU_SQUARED)
    down[2] = torch.nan
    rows, logits = make_rows(20)
    logits[:, 2] = -torch.inf
    routing = route_softmax(logits, top_k=4, renormalise=True)
    assert not (routing.experts == 2).any()
    assert grouped_experts(rows, routing, up, down, RELU_SQUARED).isfinite().all()


def test_the_order_of_rows_changes_a_row_no_more_than_rounding() -> None:
    up, down = make_experts(SWIGLU)
    rows, logits = make_rows(17)
    routing = route_softmax(logits, top_k=3, renormalise=True)
    out = grouped_experts(rows, routing, up, down, SWIGLU)
    turned = torch.arange(16, -1, -1)
    again = grouped_experts(rows[turned], Routing(routing.experts[turned], routing.weights[turned]), up, down, SWIGLU)
    assert torch.allclose(again[turned], out, atol=1e-5)


def test_the_same_rows_give_the_same_bytes() -> None:
    up, down = make_experts(SWIGLU)
    rows, logits = make_rows(64)
    routing = route_softmax(logits, top_k=3, renormalise=True)
    first = grouped_experts(rows, routing, up, down, SWIGLU)
    assert all(torch.equal(first, grouped_experts(rows, routing, up, down, SWIGLU)) for _ in range(3))


def test_bfloat16_rows_are_combined_in_float32() -> None:
    up, down = (t.bfloat16() for t in make_experts(SWIGLU))
    rows, logits = make_rows(8)
    rows = rows.bfloat16()
    routing = route_softmax(logits, top_k=5, renormalise=True)
    out = grouped_experts(rows, routing, up, down, SWIGLU)
    want = in_float64(rows, routing, up, down, SWIGLU)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - want).abs() / (want.abs() + 1)).max() < 0.05


def test_equal_scores_go_to_the_lowest_experts() -> None:
    routing = route_softmax(torch.zeros(3, 300), top_k=4, renormalise=True)
    assert routing.experts.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.allclose(routing.weights, torch.full((3, 4), 0.25))
    rule = SigmoidRule(top_k=3, num_groups=4, top_groups=2, renormalise=True, scaling=2.0)
    routing = route_sigmoid(torch.zeros(2, 300), torch.zeros(300), rule)
    assert routing.experts.tolist() == [[0, 1, 2]] * 2


def test_weights_stay_as_the_softmax_gave_them_unless_renormalised() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    routing = route_softmax(logits, top_k=2, renormalise=False)
    assert routing.experts.tolist() == [[1, 2]]
    assert torch.allclose(routing.weights, logits.softmax(-1)[:, [1, 2]])


def test_bias_selects_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rule = SigmoidRule(top_k=2, num_groups=1, top_groups=1, renormalise=True, scaling=2.5)
    routing = route_sigmoid(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), rule)
    assert routing.experts.tolist() == [[3, 0]]
    scores = logits.sigmoid()[0, [3, 0]]
    assert torch.allclose(routing.weights[0], scores / scores.sum() * 2.5)


def test_experts_outside_the_best_groups_are_not_selected() -> None:
    # Group 0 holds the single best expert; group 1 the best pair, and so the better group.
    logits = torch.tensor([[4.0, -9.0, -9.0, 2.0, 1.5, -9.0]])
    rule = SigmoidRule(top_k=2, num_groups=2, top_groups=1, renormalise=False, scaling=1.0)
    assert route_sigmoid(logits, torch.zeros(6), rule).experts.tolist() == [[3, 4]]


def test_a_selected_group_with_scores_below_zero_still_wins_over_masked_ones() -> None:
    logits = torch.zeros(1, 4)
    bias = torch.tensor([-5.0, -6.0, -50.0, -60.0])
    rule = SigmoidRule(top_k=2, num_groups=2, top_groups=1, renormalise=True, scaling=1.0)
    assert route_sigmoid(logits, bias, rule).experts.tolist() == [[0, 1]]
