"""Normalisations."""

import torch
from torch.nn import functional

from daemon.layers.parameters import Scope


class RmsNorm:
    """x / rms(x) in float32, cast, then times the weight; over the last dimension."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        self.weight = scope.tensor(f"{name}.weight", size)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class WideRmsNorm:
    """x / rms(x) times the weight, all in float32, then cast; over the last dimension."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        self.weight = scope.tensor(f"{name}.weight", size, dtype=torch.float32)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class ZeroCentredRmsNorm(WideRmsNorm):
    """The same for checkpoints that hold the weight less one."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        super().__init__(scope, name, size, eps)
        scope.parameters.when_filled(self._add_one)

    def _add_one(self) -> None:
        self.weight.add_(1)
