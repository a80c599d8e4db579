"""Torch's forms of convolution and Mamba2 over slots, as kernels/triton_causal_conv.py and triton_mamba2.py have them.

They take the state out of the pool by id, compute, and put it back; kernels/delta_mixer.py does so for delta rules.
"""

import torch

from kernels import causal_conv, mamba2
from kernels.causal_conv import ConvWeights
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.recurrent_slots import RecurrentSlots


def causal_conv_chunk(
    x: torch.Tensor, tails: torch.Tensor, slot_in: torch.Tensor, slot_out: torch.Tensor, weights: ConvWeights
) -> torch.Tensor:
    """Rows [rows, channels] of one sequence; its tail moves from slot_in to slot_out, each [1] int64."""
    result = causal_conv.causal_conv_chunk(x, tails.index_select(0, slot_in)[0], weights)
    tails.index_copy_(0, slot_out, result.tail[None])
    return result.out


def causal_conv_step(
    x: torch.Tensor, tails: torch.Tensor, slot_in: torch.Tensor, slot_out: torch.Tensor, weights: ConvWeights
) -> torch.Tensor:
    """One row [rows, channels] of each of several sequences, whose slots are [rows] int64."""
    result = causal_conv.causal_conv_step(x, tails.index_select(0, slot_in), weights)
    tails.index_copy_(0, slot_out, result.tail)
    return result.out


def mamba2_chunk(rows: Mamba2Rows, weights: Mamba2Weights, slots: RecurrentSlots) -> torch.Tensor:
    """Rows of one sequence, from slot_in to slot_out, each [1] int64; tails untouched. Returns [rows, H, P] fp32."""
    slots.check(1)
    result = mamba2.mamba2_chunk(rows, weights, slots.states.index_select(0, slots.slot_in)[0])
    slots.states.index_copy_(0, slots.slot_out, result.state[None])
    return result.out


def mamba2_step(rows: Mamba2Rows, weights: Mamba2Weights, slots: RecurrentSlots) -> torch.Tensor:
    """One row of each of several sequences, whose slots are [rows] int64. Returns [rows, H, P] fp32."""
    slots.check(rows.num_rows)
    result = mamba2.mamba2_step(rows, weights, slots.states.index_select(0, slots.slot_in))
    slots.states.index_copy_(0, slots.slot_out, result.state)
    return result.out
