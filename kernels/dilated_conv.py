"""Depthwise causal convolution with gaps between its taps, with its past as data.

out[t, c] = sum_i weight[c, i] x[t - (K - 1 - i) dilation, c]. The (K - 1) dilation rows before the first come in from a
slot and the last ones go out to it; a sequence's first past is zeros.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ConvResult:
    """Output rows and the past that the next rows will need."""

    out: torch.Tensor  # [N, C]
    past: torch.Tensor  # [(K - 1) dilation, C]


def dilated_conv(past: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, dilation: int) -> ConvResult:
    """Rows [N, C] after past [(K - 1) dilation, C], by weight [C, K]; sums in fp32, in the order of the taps."""
    num_rows, num_channels = rows.shape
    taps = weight.shape[1]
    assert weight.shape == (num_channels, taps)
    assert past.shape == ((taps - 1) * dilation, num_channels)
    joined = torch.cat((past.to(rows.dtype), rows))
    out = torch.zeros((num_rows, num_channels), dtype=torch.float32, device=rows.device)
    for tap in range(taps):
        out.addcmul_(joined[tap * dilation : tap * dilation + num_rows].float(), weight[:, tap].float())
    return ConvResult(out.to(rows.dtype), joined[num_rows:].to(past.dtype))
