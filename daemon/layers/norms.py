"""Normalisations."""

from typing import cast

import torch

from daemon.layers.parameters import Scope


class RmsNorm:
    """x / rms(x) in float32, cast, then times the weight; over the last dimension."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        self.weight = scope.tensor(f"{name}.weight", size)
        self.eps = torch.tensor(eps, dtype=torch.float32, device=self.weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        return _by_rms(x, self.eps).to(x.dtype).mul_(self.weight)


class WideRmsNorm:
    """x / rms(x) times the weight, all in float32, then cast; over the last dimension."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        self.weight = scope.tensor(f"{name}.weight", size, dtype=torch.float32)
        self.eps = torch.tensor(eps, dtype=torch.float32, device=self.weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        return _by_rms(x, self.eps).mul_(self.weight).to(x.dtype)


class ZeroCentredRmsNorm(WideRmsNorm):
    """The same for checkpoints that hold the weight less one."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float) -> None:
        super().__init__(scope, name, size, eps)
        scope.parameters.when_filled(self._add_one)

    def _add_one(self) -> None:
        self.weight.add_(1)


def _by_rms(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, a new float32 tensor.

    By the vector's length: alone, on a CPU, that is several times as fast for a chunk's rows as torch's own rms_norm.
    """
    wide = x.clone() if x.dtype == torch.float32 else x.float()
    length = cast(torch.Tensor, torch.linalg.vector_norm(wide, dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    return wide.mul_(torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_())
