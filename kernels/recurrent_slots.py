"""Where the recurrent state of each row of a decode step lies: slots of a pool, by id.

Kernels read the state at `slot_in` and write it at `slot_out`; nothing else in the pool is touched. Rows of one step
have different slots, but for padding rows, which may share one whose content nobody reads.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RecurrentSlots:
    """One mixer's two slot tensors, with any stride between slots, and the rows' ids."""

    tails: torch.Tensor  # [num_slots, K - 1, channels] in the activations' dtype
    states: torch.Tensor  # [num_slots, heads, *state_shape] fp32
    slot_in: torch.Tensor  # [num_rows] int64
    slot_out: torch.Tensor  # [num_rows] int64; may equal slot_in

    def check(self, num_rows: int) -> None:
        """Asserts what every kernel that takes slots relies on."""
        assert self.tails.dim() == 3
        assert self.tails[0].is_contiguous(), "a slot's own tail is contiguous"
        assert self.states.dim() == 4
        assert self.states[0].is_contiguous(), "a slot's own state is contiguous"
        assert self.states.dtype == torch.float32
        assert self.tails.shape[0] == self.states.shape[0]
        assert self.slot_in.shape == self.slot_out.shape == (num_rows,)
        assert self.slot_in.dtype == self.slot_out.dtype == torch.int64
        assert self.slot_in.is_contiguous()
        assert self.slot_out.is_contiguous()
