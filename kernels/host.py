"""Small tensors as host values, typed: torch's own `tolist` says nothing about what it returns."""

import torch


def ints(tensor: torch.Tensor) -> list[int]:
    """A one-dimensional integer tensor as a list."""
    assert tensor.dim() == 1
    return tensor.tolist()


def bools(tensor: torch.Tensor) -> list[bool]:
    """A one-dimensional boolean tensor as a list."""
    assert tensor.dim() == 1
    return tensor.tolist()
