"""What stands between mixers: dense gated products, and mixtures of experts."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from daemon.layers.linear import Linear
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.moe import Activation, ActivationKind


class GatedMlp:
    """down(silu(gate(x)) * up(x)); reads checkpoint names gate_proj, up_proj, down_proj of its scope.

    Every product rounds to the activations' dtype before it goes on, as in the reference, so that bf16 gives the same
    numbers: fusing them would save a CPU a twelfth of this.
    """

    def __init__(self, scope: Scope, hidden_size: int, inner_size: int, *, bias: bool = False) -> None:
        self.inner_size = inner_size
        self.gate_up = Linear(scope, (("gate_proj", inner_size), ("up_proj", inner_size)), hidden_size, bias=bias)
        self.down = Linear(scope, (("down_proj", hidden_size),), inner_size, bias=bias)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return 3 * self.gate_up.in_size * self.inner_size

    def forward(self, hidden: torch.Tensor) -> Steps:
        """[num_rows, hidden_size] to the same."""
        gate, up = self.gate_up(hidden).split_with_sizes((self.inner_size, self.inner_size), 1)
        yield
        inner = functional.silu(gate).mul_(up)
        return self.down(inner)


@dataclass(frozen=True, slots=True)
class SoftmaxMoeConfig:
    """Sizes and variants of a mixture routed by softmax."""

    hidden_size: int
    inner_size: int  # of one expert
    num_experts: int
    top_k: int
    renormalise: bool


class SoftmaxMoe:
    """Reads checkpoint names gate.weight and experts.E.{gate,up,down}_proj.weight of its scope."""

    def __init__(self, scope: Scope, config: SoftmaxMoeConfig) -> None:
        self.config = config
        self._forms = scope.kernels.rows
        hidden, inner = config.hidden_size, config.inner_size
        self.router = scope.tensor("gate.weight", config.num_experts, hidden)
        self.up = scope.parameters.allocate((config.num_experts, 2 * inner, hidden))  # gate above up
        self.down = scope.parameters.allocate((config.num_experts, hidden, inner))
        for expert in range(config.num_experts):
            names = scope / "experts" / str(expert)
            names.fill("gate_proj.weight", self.up[expert, :inner])
            names.fill("up_proj.weight", self.up[expert, inner:])
            names.fill("down_proj.weight", self.down[expert])

    @property
    def active_params(self) -> int:
        """Weights that multiply each token: the router, and the chosen experts."""
        config = self.config
        return config.hidden_size * (config.num_experts + 3 * config.top_k * config.inner_size)

    def forward(self, hidden: torch.Tensor) -> Steps:
        """[num_rows, hidden_size] to the same."""
        outs: list[torch.Tensor] = []
        forms, num_rows = self._forms, self._forms.expert_rows(self.config.top_k)
        for begin in range(0, hidden.shape[0], num_rows):
            if outs:
                yield
            slab = hidden[begin : begin + num_rows]
            logits = functional.linear(slab, self.router)
            routing = forms.route_softmax(logits, top_k=self.config.top_k, renormalise=self.config.renormalise)
            outs.append(forms.experts(slab, routing, self.up, self.down, Activation(ActivationKind.SWIGLU, None)))
        return torch.cat(outs) if len(outs) > 1 else outs[0]
