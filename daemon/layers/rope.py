"""Rotary positions: frequencies of each scaling rule, and the rotation of rows."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from daemon.layers.inputs import Rotary
from kernels import qk_rope
from kernels.dispatch import TORCH, Kernels


class RopeKind(StrEnum):
    """Scaling rules, as checkpoints name them."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rule and its figures; those that a rule does not read keep their defaults."""

    theta: float
    rotary_dim: int  # leading dimensions of a head that rotate, even
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_tokens: int = 1
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: from the factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn


class Rope:
    """The rotation of one model."""

    def __init__(self, config: RopeConfig, device: torch.device, kernels: Kernels = TORCH) -> None:
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
        frequencies = 1.0 / config.theta**exponents
        self.scale = 1.0  # of cos and sin
        match config.kind:
            case RopeKind.DEFAULT | RopeKind.DYNAMIC:
                # The dynamic rule leaves frequencies alone up to the model's own length, and longer ones are refused.
                pass
            case RopeKind.LINEAR:
                frequencies /= config.factor
            case RopeKind.LLAMA3:
                frequencies = _llama3(frequencies, config)
            case RopeKind.YARN:
                frequencies = _yarn(frequencies, config)
                self.scale = _yarn_scale(config)
        self.frequencies = frequencies.to(device)
        self._turns = kernels.attention.turns

    def rows(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """cos and sin for these positions, worked out in float32 and cast as checkpoints expect."""
        return Rotary(*self._turns(positions, self.frequencies, self.scale, dtype))


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotates each head's leading dimensions, first half against second: [num_rows, heads, head_dim], a new tensor."""
    return qk_rope.rotate(x, rotary.cos, rotary.sin)


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones are kept, those between are blended."""
    turns = config.original_max_tokens * frequencies / (2 * math.pi)  # within the original length
    blend = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a linear ramp over dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        return (
            config.rotary_dim
            * math.log(config.original_max_tokens / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, config.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / config.factor * slowed + frequencies * (1 - slowed)


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
