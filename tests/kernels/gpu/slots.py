"""What the checks of recurrent kernels share: pools of slots full of NaN, and parameters of a mixer."""

import torch

from kernels.causal_conv import ConvWeights
from kernels.recurrent_slots import RecurrentSlots
from tests.kernels.gpu.paged import DEVICE, pool, randn

BF16 = torch.bfloat16
F32 = torch.float32


def make_slots(
    slot_in: list[int], slot_out: list[int], tail_shape: tuple[int, ...], state_shape: tuple[int, ...], *, seed: int
) -> RecurrentSlots:
    """Random state in the slots that are read; every other byte is NaN."""
    num_slots = max(slot_in + slot_out) + 2
    (tails,) = pool(num_slots, [tail_shape], BF16)
    (states,) = pool(num_slots, [state_shape], F32)
    for slot in slot_in:
        tails[slot] = randn(*tail_shape, seed=seed + slot)
        states[slot] = randn(*state_shape, seed=seed + 100 + slot, dtype=F32)
    return RecurrentSlots(tails, states, *(torch.tensor(ids, device=DEVICE) for ids in (slot_in, slot_out)))


def copy_of(slots: RecurrentSlots) -> RecurrentSlots:
    return RecurrentSlots(slots.tails.clone(), slots.states.clone(), slots.slot_in, slots.slot_out)


def conv_weights(taps: int, channels: int, *, bias: bool, seed: int) -> ConvWeights:
    return ConvWeights(
        randn(taps, channels, seed=seed, dtype=F32), randn(channels, seed=seed + 1, dtype=F32) if bias else None, True
    )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN of the same bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
