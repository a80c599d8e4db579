"""RMS norms with a gate, the last thing recurrent mixers do before their output projection. Arithmetic is fp32.

The plain mathematics is what a CPU runs, so each function is its own reference. Where a family rounds on the way, it is
said.
"""

import torch


def rms_norm_silu_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) weight silu(gate) in the last dimension, fp32 out (gated delta net); x, gate [..., d], weight [d].

    The norm is rounded to the dtype of x, and again after the weight, as the models were trained.
    """
    _check(x, gate, weight, x.shape[-1])
    normed = _normed(x.float(), eps).to(x.dtype).mul_(weight)
    return torch.nn.functional.silu(gate.float()).mul_(normed)


def rms_norm_sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) weight sigmoid(gate) over the last dimension, fp32 out (Kimi delta attention)."""
    _check(x, gate, weight, x.shape[-1])
    return _normed(x.float(), eps).mul_(weight.float()).mul_(torch.sigmoid(gate.float()))


def gated_group_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, num_groups: int, eps: float
) -> torch.Tensor:
    """weight RMSNorm(x silu(gate)), the norm within each of `num_groups` equal parts (Mamba2): the gate comes first."""
    _check(x, gate, weight, x.shape[-1])
    assert x.shape[-1] % num_groups == 0, f"{num_groups} groups do not divide {x.shape[-1]} channels"
    gated = x.float() * torch.nn.functional.silu(gate.float())
    return _normed(gated.unflatten(-1, (num_groups, -1)), eps).flatten(-2).mul_(weight.float())


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, width: int) -> None:
    assert x.shape == gate.shape, f"x is {tuple(x.shape)}, its gate {tuple(gate.shape)}"
    assert weight.shape == (width,)
