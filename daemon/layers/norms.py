"""Normalisations."""

import torch

from daemon.layers.parameters import Scope
from kernels.norms import RmsWeights


class RmsNorm:
    """x / rms(x) in float32, cast, then times the weight; over the last dimension."""

    def __init__(
        self,
        scope: Scope,
        name: str,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        cast_first: bool = True,
    ) -> None:
        self.weights = RmsWeights(scope.tensor(f"{name}.weight", size, dtype=dtype), eps, cast_first)
        self._forms = scope.kernels.rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        return self._forms.rms_norm(x, self.weights)

    def added(self, hidden: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
        """hidden += addend, in place where there is one, and the norm of the sum; both [rows, size]."""
        return self(hidden) if addend is None else self._forms.add_rms_norm(hidden, addend, self.weights)


class WideRmsNorm(RmsNorm):
    """x / rms(x) times the weight, all in float32, then cast; over the last dimension."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        super().__init__(scope, name, size, eps, dtype=torch.float32, cast_first=False)


class ZeroCentredRmsNorm(WideRmsNorm):
    """The same for checkpoints that hold the weight less one."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        super().__init__(scope, name, size, eps)
        scope.parameters.when_filled(self._add_one)

    def _add_one(self) -> None:
        self.weights.weight.add_(1)
