"""FLOPs of tokens by position."""

from tiers.flops import ComputeCost


def test_flops_are_the_sum_over_tokens_of_their_linear_layers_their_history_and_their_states() -> None:
    cost = ComputeCost(matmul_params=1000, pair_flops=8, state_flops=70)
    assert cost.flops(5, 9) == sum(2 * 1000 + 70 + 8 * (position + 1) for position in range(5, 9))
    assert cost.flops(0, 5) + cost.flops(5, 9) == cost.flops(0, 9)
    assert cost.flops(7, 7) == 0


def test_later_tokens_cost_more_only_with_attention() -> None:
    assert ComputeCost(1000, 0).flops(0, 64) == ComputeCost(1000, 0).flops(6400, 6464)
    assert ComputeCost(1000, 8).flops(0, 64) < ComputeCost(1000, 8).flops(6400, 6464)
