"""Two ways of carrying several residual streams past a block: hyper-connections and gated residuals.

Both have the same shape: `enter` gives the row that the block reads and what is needed to leave; `leave` puts the
block's output back into the streams. A model with one plain stream needs neither.
"""

from dataclasses import dataclass

import torch

from daemon.layers.parameters import Scope
from kernels.gated_residual import (
    GatedMix,
    GatedResidualWeights,
    inject_residual,
    mix_residual,
)
from kernels.hyper_connections import HyperMix, HyperRule, HyperWeights


class HyperConnection:
    """Of one block; streams are [rows, n, D]. Base and scale stay fp32."""

    def __init__(self, scope: Scope, name: str, *, num_streams: int, hidden: int, rule: HyperRule) -> None:
        num_mixes = (2 + num_streams) * num_streams
        self.rule = rule
        self._forms = scope.kernels.rows
        self.weights = HyperWeights(
            fn=scope.tensor(f"{name}_fn", num_mixes, num_streams * hidden),
            base=scope.tensor(f"{name}_base", num_mixes, dtype=torch.float32),
            scale=scope.tensor(f"{name}_scale", 3, dtype=torch.float32),
        )

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.weights.fn.numel()

    def enter(self, streams: torch.Tensor) -> HyperMix:
        """What the block reads."""
        return self._forms.mix_streams(streams, self.weights, self.rule)

    def leave(self, output: torch.Tensor, streams: torch.Tensor, mix: HyperMix) -> torch.Tensor:
        """The streams after the block."""
        return self._forms.inject(output, streams, mix)


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """Of gated residual streams."""

    num_streams: int
    hidden: int
    rank: int
    norm_eps: float


class GatedResidual:
    """Of one block, or of the end of the stack, which injects nothing; streams are [rows, n D]."""

    def __init__(self, scope: Scope, sizes: StreamSizes, *, is_last: bool) -> None:
        width = sizes.num_streams * sizes.hidden
        self.sizes = sizes
        self.weights = GatedResidualWeights(
            norm=scope.tensor("hc_norm.weight", width),
            down=scope.tensor("input_mix_weight_down.weight", sizes.rank, width),
            up=scope.tensor("input_mix_weight_up.weight", width, sizes.rank),
            inject=None if is_last else scope.tensor("block_inject_weight.weight", sizes.num_streams, width),
        )

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        weights = self.weights
        return weights.down.numel() + weights.up.numel() + (0 if weights.inject is None else weights.inject.numel())

    def enter(self, streams: torch.Tensor) -> GatedMix:
        """What the block reads."""
        return mix_residual(streams, self.weights, num_streams=self.sizes.num_streams, eps=self.sizes.norm_eps)

    def leave(self, output: torch.Tensor, streams: torch.Tensor, mix: GatedMix) -> torch.Tensor:
        """The streams after the block."""
        assert mix.injection is not None, "the end of the stack injects nothing"
        return inject_residual(output, streams, mix.injection)
