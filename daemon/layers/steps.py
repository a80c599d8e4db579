"""Computations that can be paused."""

from collections.abc import Generator

import torch

Steps = Generator[None, None, torch.Tensor]
"""Yields wherever the engine may pause, and returns its result.

A paused one may be closed at any pause without harm: it has written only rows of its own sequences and their slot_out.
"""
