"""A model's parameters: allocated once, in their final dtype and place, each with the checkpoint tensor that fills it.

A layer asks its scope for tensors by checkpoint name. Merged projections and stacked experts are one tensor, and the
checkpoint's own tensors are views into it, so that the loader copies every byte straight to where it stays.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kernels.dispatch import Kernels, choose_kernels


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes. The view has as many elements as the checkpoint tensor, in the same order."""

    view: torch.Tensor
    shape: tuple[int, ...]  # that the checkpoint must have


class Parameters:
    """All parameters of one model. Layers allocate through scopes; the loader fills `targets`, then calls `finish`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self.kernels = kernels or choose_kernels(device, dtype)  # the form that all layers compute in
        self.targets: dict[str, Target] = {}
        self.num_parameters = 0
        self.num_bytes = 0
        self._ignored: list[re.Pattern[str]] = []
        self._when_filled: list[Callable[[], None]] = []

    @property
    def root(self) -> "Scope":
        """The scope of full checkpoint names."""
        return Scope(self, "")

    def ignore(self, *patterns: str) -> None:
        """Checkpoint tensors whose whole name matches one of these are passed over."""
        self._ignored.extend(re.compile(pattern) for pattern in patterns)

    def is_ignored(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._ignored)

    def when_filled(self, action: Callable[[], None]) -> None:
        """Runs `action` once all targets have their values, such as bringing a weight into a kernel's own order."""
        self._when_filled.append(action)

    def finish(self) -> None:
        """Called once by the loader, after the last byte."""
        for action in self._when_filled:
            action()
        self._when_filled.clear()
        self.targets.clear()  # else they would keep the memory of tensors that an action replaced

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """An unfilled tensor that counts as parameters."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_parameters += tensor.numel()
        self.num_bytes += tensor.nbytes
        return tensor

    def fill(self, name: str, view: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Declares that checkpoint tensor `name` fills `view`; `shape` where the checkpoint's differs in form."""
        assert name not in self.targets, f"{name} fills two places"
        target = Target(view, tuple(view.shape) if shape is None else shape)
        assert view.numel() == torch.Size(target.shape).numel()
        self.targets[name] = target


@dataclass(frozen=True, slots=True)
class Scope:
    """Parameters below a prefix of checkpoint names."""

    parameters: Parameters
    prefix: str

    @property
    def kernels(self) -> Kernels:
        """The form that all layers compute in."""
        return self.parameters.kernels

    def __truediv__(self, name: str) -> "Scope":
        """The scope one level down."""
        return Scope(self.parameters, f"{self.prefix}{name}.")

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter of its own."""
        tensor = self.parameters.allocate(shape, dtype)
        self.parameters.fill(self.prefix + name, tensor)
        return tensor

    def rows(self, parts: Iterable[tuple[str, int]], *rest: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Checkpoint tensors [size, *rest] one below the other in a single tensor."""
        sized = tuple(parts)
        tensor = self.parameters.allocate((sum(size for _, size in sized), *rest), dtype)
        begin = 0
        for name, size in sized:
            self.parameters.fill(self.prefix + name, tensor[begin : begin + size])
            begin += size
        return tensor

    def fill(self, name: str, view: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Declares that checkpoint tensor `name` of this scope fills `view`."""
        self.parameters.fill(self.prefix + name, view, shape)
