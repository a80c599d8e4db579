"""Depthwise causal convolution over time, each channel by itself, with the rows that came before as its tail.

    y_t = act(bias + sum over j < K of weight[j] x_(t - K + 1 + j))

The tail is the last K - 1 inputs, oldest first, channels innermost: [K - 1, channels], in the activations' dtype,
zeros before the first row. Sums are fp32, and round to `sum_dtype` before `act`. Every form returns the outputs and the
outgoing tail.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """Taps oldest first."""

    taps: torch.Tensor  # [K, channels] fp32
    bias: torch.Tensor | None  # [channels] fp32
    silu: bool
    sum_dtype: torch.dtype | None = None  # that a sum rounds to before its activation; None: the input's


@dataclass(frozen=True, slots=True)
class ConvResult:
    """The outputs in the input's dtype, and the tail after the rows."""

    out: torch.Tensor  # [rows, channels]
    tail: torch.Tensor  # [K - 1, channels], or [rows, K - 1, channels] where every row is a sequence


def conv_weights(weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool) -> ConvWeights:
    """From a checkpoint's Conv1d weight [channels, 1, K]."""
    assert weight.dim() == 3
    assert weight.shape[1] == 1, "the convolution is depthwise"
    taps = weight[:, 0].t().float().contiguous()
    return ConvWeights(taps, None if bias is None else bias.float(), silu)


def causal_conv_reference(x: torch.Tensor, tail: torch.Tensor, weights: ConvWeights) -> ConvResult:
    """The sum as written above, row by row, in the input's dtype (meant for float64)."""
    _check(x, tail, weights)
    num_taps = weights.taps.shape[0]
    padded = torch.cat((tail, x))
    rows = [(padded[t : t + num_taps] * weights.taps.to(x.dtype)).sum(0) for t in range(x.shape[0])]
    out = torch.stack(rows) if rows else x.new_empty(x.shape)
    if weights.bias is not None:
        out = out + weights.bias.to(x.dtype)
    if weights.silu:
        out = out * torch.sigmoid(out)
    return ConvResult(out, padded[x.shape[0] :].clone())


def causal_conv_chunk(x: torch.Tensor, tail: torch.Tensor, weights: ConvWeights) -> ConvResult:
    """Rows [rows, channels] of one sequence, any number of them, after `tail` [K - 1, channels]."""
    _check(x, tail, weights)
    num_rows, num_taps = x.shape[0], weights.taps.shape[0]
    padded = torch.cat((tail, x))
    wide = padded.float()
    out = wide[:num_rows] * weights.taps[0]
    for j in range(1, num_taps):
        out.addcmul_(wide[j : j + num_rows], weights.taps[j])
    return ConvResult(_finish(out, weights, x.dtype), padded[num_rows:].clone())


def causal_conv_step(x: torch.Tensor, tails: torch.Tensor, weights: ConvWeights) -> ConvResult:
    """One row [rows, channels] of each of several sequences, after `tails` [rows, K - 1, channels]."""
    assert tails.shape[0] == x.shape[0]
    _check(x, tails, weights)
    window = torch.cat((tails, x[:, None]), dim=1)  # [rows, K, channels]
    out = (window.float() * weights.taps).sum(1)
    return ConvResult(_finish(out, weights, x.dtype), window[:, 1:].contiguous())


def causal_conv_tails(x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """The tail after every one of a sequence's rows, [rows, K - 1, channels], for rows that may yet be dropped."""
    assert tail.dtype == x.dtype
    padded = torch.cat((tail, x))
    return padded.unfold(0, tail.shape[0], 1)[1:].transpose(1, 2).contiguous()


def _finish(out: torch.Tensor, weights: ConvWeights, dtype: torch.dtype) -> torch.Tensor:
    if weights.bias is not None:
        out += weights.bias
    rounded = out.to(weights.sum_dtype or dtype)
    return (torch.nn.functional.silu(rounded, inplace=True) if weights.silu else rounded).to(dtype)


def _check(x: torch.Tensor, tail: torch.Tensor, weights: ConvWeights) -> None:
    num_taps, channels = weights.taps.shape
    assert x.dim() == 2
    assert x.shape[1] == channels, f"{x.shape[1]} channels for a convolution of {channels}"
    assert tail.shape[-2:] == (num_taps - 1, channels), f"tail is {tuple(tail.shape)}"
    assert tail.dtype == x.dtype
    assert weights.bias is None or weights.bias.shape == (channels,)
