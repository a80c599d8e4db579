"""Mixtures of experts, and the plain gated MLP beside them.

A router's rule is the family's: softmax over all experts, or sigmoid scores with a bias that only selects. Routers of
the second kind stay fp32. All experts of a layer are two stacked tensors, into which the checkpoint's own are read.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from daemon.layers.linear import Linear
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.moe import (
    Activation,
    ActivationKind,
    Mixture,
    Routing,
    SigmoidRule,
)


class Router(Protocol):
    """Chooses experts for rows [rows, hidden]."""

    weight: torch.Tensor  # [num_experts, hidden]
    top_k: int

    def __call__(self, rows: torch.Tensor) -> Routing: ...


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of the routed experts of a layer."""

    hidden: int
    inner: int
    num_experts: int
    activation: Activation


class Mlp:
    """One expert that all rows go through."""

    def __init__(self, scope: Scope, hidden: int, inner: int, activation: Activation) -> None:
        self.activation = activation
        self._activate = scope.kernels.rows.activate
        gated = activation.kind is ActivationKind.SWIGLU
        parts = (("gate_proj", inner), ("up_proj", inner)) if gated else (("up_proj", inner),)
        self.up = Linear(scope, parts, hidden)
        self.down = Linear(scope, (("down_proj", hidden),), inner)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.up.in_size * self.up.out_size + self.down.in_size * self.down.out_size

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to the same."""
        return self.down(self._activate(self.up(rows), self.activation))

    def forward(self, hidden: torch.Tensor) -> Steps:
        """The same, with pauses."""
        inner = self.up(hidden)
        yield
        return self.down(self._activate(inner, self.activation))


class Experts:
    """The routed experts of a layer; `names` are the checkpoint's for gate, up and down."""

    def __init__(self, scope: Scope, sizes: ExpertSizes, names: tuple[str, str, str]) -> None:
        self.activation = sizes.activation
        self._forms = scope.kernels.rows
        gated = sizes.activation.kind is ActivationKind.SWIGLU
        inner, allocate = sizes.inner, scope.parameters.allocate
        self.up = allocate((sizes.num_experts, inner * (2 if gated else 1), sizes.hidden))
        self.down = allocate((sizes.num_experts, sizes.hidden, inner))
        gate_name, up_name, down_name = names
        for expert in range(sizes.num_experts):
            below = scope / "experts" / str(expert)
            if gated:
                below.fill(f"{gate_name}.weight", self.up[expert, :inner])
            below.fill(f"{up_name}.weight", self.up[expert, -inner:])
            below.fill(f"{down_name}.weight", self.down[expert])

    @property
    def params_each(self) -> int:
        """Weights of one expert."""
        return self.up[0].numel() + self.down[0].numel()

    def rows_at_once(self, top_k: int) -> int:
        """The most rows of a call, with so many choices each."""
        return self._forms.expert_rows(top_k)

    def few(self, rows: torch.Tensor, routing: Routing, mixture: Mixture) -> torch.Tensor | None:
        """[rows, hidden] through a whole mixture; None where the form does not take so many rows at once."""
        form = self._forms.few_experts
        return form(rows, routing, mixture) if form is not None and rows.shape[0] <= self._forms.few_rows else None

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[rows, hidden] to the same."""
        return self._forms.experts(rows, routing, self.up, self.down, self.activation)


class SigmoidRouter:
    """Scores by sigmoid, selects with a bias, in fp32."""

    def __init__(self, scope: Scope, sizes: ExpertSizes, rule: SigmoidRule) -> None:
        self.rule = rule
        self.top_k = rule.top_k
        self._forms = scope.kernels.rows
        self.weight = scope.tensor("gate.weight", sizes.num_experts, sizes.hidden, dtype=torch.float32)
        self.bias = scope.tensor("gate.e_score_correction_bias", sizes.num_experts, dtype=torch.float32)

    def __call__(self, rows: torch.Tensor) -> Routing:
        """Of [rows, hidden]."""
        return self._forms.route_sigmoid(self._forms.linear(rows.float(), self.weight, None), self.bias, self.rule)


class SoftmaxRouter:
    """Softmax over all experts, in fp32 of logits in the activations' dtype."""

    def __init__(self, scope: Scope, sizes: ExpertSizes, *, top_k: int, renormalise: bool) -> None:
        self.top_k = top_k
        self.renormalise = renormalise
        self._forms = scope.kernels.rows
        self.weight = scope.tensor("gate.weight", sizes.num_experts, sizes.hidden)

    def __call__(self, rows: torch.Tensor) -> Routing:
        """Of [rows, hidden]."""
        logits = self._forms.linear(rows, self.weight, None)
        return self._forms.route_softmax(logits, top_k=self.top_k, renormalise=self.renormalise)


class Moe:
    """Routed experts, and a shared one where there is one; its output may be gated by row."""

    def __init__(self, router: Router, experts: Experts, shared: Mlp | None, shared_gate: torch.Tensor | None) -> None:
        assert shared is not None or shared_gate is None
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate  # [1, hidden]

    @property
    def active_params(self) -> int:
        """Weights that multiply each token: the router, the chosen experts, and the shared one."""
        shared = 0 if self.shared is None else self.shared.active_params
        gate = 0 if self.shared_gate is None else self.shared_gate.numel()
        return self.router.weight.numel() + self.router.top_k * self.experts.params_each + shared + gate

    def forward(self, hidden: torch.Tensor) -> Steps:
        """[rows, hidden] to the same, slab by slab."""
        outs: list[torch.Tensor] = []
        num_rows = self.experts.rows_at_once(self.router.top_k)
        for first in range(0, hidden.shape[0], num_rows):
            if outs:
                yield
            slab = hidden[first : first + num_rows]
            routing = self.router(slab)
            out = self._few(slab, routing)
            if out is None:
                out = self.experts(slab, routing)
                out = out if self.shared is None else out + self._shared(self.shared, slab)
            outs.append(out)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _few(self, slab: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        """Routed and shared experts at once, where the form has that for so few rows."""
        experts, shared = self.experts, self.shared
        up, down = (None, None) if shared is None else (shared.up.weight, shared.down.weight)
        mixture = Mixture(experts.up, experts.down, experts.activation, up, down, self.shared_gate)
        return experts.few(slab, routing, mixture)

    def _shared(self, shared: Mlp, slab: torch.Tensor) -> torch.Tensor:
        out = shared(slab)
        if self.shared_gate is None:
            return out
        return torch.sigmoid(functional.linear(slab, self.shared_gate)) * out
