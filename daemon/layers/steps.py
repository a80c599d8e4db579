"""Computations that can be paused."""

from collections.abc import Generator

import torch


class HostStageError(Exception):
    """What the host was to fetch for a forward could not be had. Nothing of a decode step has been written yet."""


Steps = Generator[None, None, torch.Tensor]
"""Yields wherever the engine may pause, and returns its result.

A paused one may be closed at any pause without harm: it has written only rows of its own sequences and their slot_out.
"""
