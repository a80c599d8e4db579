"""Mixture of experts: which experts a row goes to, and what they make of it.

Routing and experts are apart: a router gives a `Routing`, whatever rule it follows, and `grouped_experts` computes it.
Rows are sorted by expert, each expert is one matrix product over its rows, and a row's choices are summed in the order
in which the router chose them, in fp32, each rounded as its product with its weight is. No float atomics: a row's bytes
depend on other rows no more than a matrix product does.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn import functional


class ActivationKind(Enum):
    """What stands between an expert's two matrices."""

    SWIGLU = "swiglu"  # up matrix holds [gate | up]: silu(gate) * up
    RELU_SQUARED = "relu_squared"  # no gate: relu(up)^2


@dataclass(frozen=True, slots=True)
class Activation:
    """The kind, and for SWIGLU the clamp: gate <= limit and up in [-limit, limit]. None: no clamp."""

    kind: ActivationKind
    limit: float | None


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each row, best first, and the weight of each choice."""

    experts: torch.Tensor  # [num_rows, top_k] int64
    weights: torch.Tensor  # [num_rows, top_k] float32, or the activations' dtype: products with it round to that


@dataclass(frozen=True, slots=True)
class Mixture:
    """The weights of a layer's experts, and of the shared one where there is one."""

    up: torch.Tensor  # [num_experts, 2 I, D] with gate above up for SWIGLU, [num_experts, I, D] for RELU_SQUARED
    down: torch.Tensor  # [num_experts, D_out, I]
    activation: Activation
    shared_up: torch.Tensor | None  # [2 S, D] or [S, D], as `up`
    shared_down: torch.Tensor | None  # [D_out, S]
    shared_gate: torch.Tensor | None  # [1, D]: the shared expert's output is scaled by its sigmoid


def route_softmax(logits: torch.Tensor, *, top_k: int, renormalise: bool) -> Routing:
    """Softmax over all experts, the best `top_k`, weights optionally made to sum to 1.

    Equal scores go to the lower expert. `logits` is [num_rows, num_experts]; the arithmetic is fp32, the weights then
    round to the dtype of `logits`.
    """
    assert logits.ndim == 2
    assert 0 < top_k <= logits.shape[1], "top_k must not exceed the number of experts"
    chosen, experts = _best(logits.float().softmax(dim=-1), top_k)
    if renormalise:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return Routing(experts, chosen.to(logits.dtype))


@dataclass(frozen=True, slots=True)
class SigmoidRule:
    """How `route_sigmoid` selects and weighs."""

    top_k: int
    num_groups: int  # experts lie in this many groups of equal size
    top_groups: int  # experts are selected within the best of them; a group's score is the sum of its two best
    renormalise: bool
    scaling: float


def route_sigmoid(logits: torch.Tensor, bias: torch.Tensor, rule: SigmoidRule) -> Routing:
    """Selects by sigmoid + bias within the best groups, weighs by the sigmoid alone.

    Equal scores go to the lower group and the lower expert. `logits` is [num_rows, num_experts], `bias` [num_experts]
    fp32.
    """
    assert logits.ndim == 2
    num_rows, num_experts = logits.shape
    assert bias.shape == (num_experts,)
    assert num_experts % rule.num_groups == 0, "groups are of equal size"
    assert 0 < rule.top_groups <= rule.num_groups
    group_size = num_experts // rule.num_groups
    assert 0 < rule.top_k <= rule.top_groups * group_size, "top_k must not exceed the experts of the selected groups"
    scores = logits.float().sigmoid()
    choice = scores + bias.float()
    if rule.top_groups < rule.num_groups:
        grouped = choice.view(num_rows, rule.num_groups, group_size)
        group_scores = _best(grouped, min(2, group_size))[0].sum(dim=-1)
        outside = torch.ones_like(group_scores, dtype=torch.bool)
        outside.scatter_(1, _best(group_scores, rule.top_groups)[1], False)
        choice = grouped.masked_fill(outside[:, :, None], -torch.inf).view(num_rows, num_experts)
    experts = _best(choice, rule.top_k)[1]
    weights = scores.gather(1, experts)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * rule.scaling)


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of the last dimension and their indices; the lowest index wins a tie."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], indices[..., :count]


def activate(hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Between an expert's (or a dense MLP's) two matrices: [..., 2 I] to [..., I] for SWIGLU, else the shape stays."""
    if activation.kind is ActivationKind.RELU_SQUARED:
        return functional.relu(hidden).square()
    gate, up = hidden.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(min=-activation.limit, max=activation.limit)
    return functional.silu(gate) * up


def experts_reference(
    rows: torch.Tensor, routing: Routing, up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """The plain mathematics, row by row and choice by choice: out[t] = sum_k weight[t, k] expert_k(rows[t])."""
    out = torch.zeros((rows.shape[0], down.shape[1]), dtype=rows.dtype)
    for t in range(rows.shape[0]):
        for k in range(routing.experts.shape[1]):
            expert = int(routing.experts[t, k])
            made = down[expert] @ activate(up[expert] @ rows[t], activation)
            out[t] += routing.weights[t, k].to(rows.dtype) * made
    return out


def grouped_experts(
    rows: torch.Tensor, routing: Routing, up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """Routed experts over rows: [num_rows, D] to [num_rows, D_out] in the dtype of `rows`.

    Args:
        rows: [num_rows, D].
        routing: of these rows.
        up: [num_experts, 2 I, D] with gate above up for SWIGLU, [num_experts, I, D] for RELU_SQUARED.
        down: [num_experts, D_out, I].
        activation: between the two.
    """
    num_experts = up.shape[0]
    gated = activation.kind is ActivationKind.SWIGLU
    assert rows.ndim == 2
    assert up.ndim == 3
    assert down.ndim == 3
    assert up.shape[2] == rows.shape[1]
    assert down.shape[0] == num_experts
    assert up.shape[1] == down.shape[2] * (2 if gated else 1)
    assert routing.experts.shape == routing.weights.shape
    assert routing.experts.shape[0] == rows.shape[0]
    assert rows.dtype == up.dtype == down.dtype
    num_rows, top_k = routing.experts.shape
    flat = routing.experts.reshape(-1)
    order = flat.argsort(stable=True)  # assignments by expert, then by row
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    assert len(counts) == num_experts, "an expert id is out of range"
    sorted_rows = order // top_k
    made = rows.new_empty((num_rows * top_k, down.shape[1]))
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        end = start + count
        inside = activate(functional.linear(rows.index_select(0, sorted_rows[start:end]), up[expert]), activation)
        made[start:end] = functional.linear(inside, down[expert])
        start = end
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    place = place.view(num_rows, top_k)
    out = torch.zeros((num_rows, down.shape[1]), dtype=torch.float32, device=rows.device)
    for k in range(top_k):
        out += made.index_select(0, place[:, k]) * routing.weights[:, k, None]
    return out.to(rows.dtype)
