"""How a budget of bytes becomes blocks and slots: the engine's pools and every forecast use this one rule."""

from dataclasses import dataclass

import psutil
import torch

from tiers.layout import StateLayout

RESERVED_BLOCKS = 1  # padding points at it
RESERVED_SLOTS = 2  # padding's, and the shadow that a chunk writes
CHECKPOINT_SHARE = 0.25  # of the budget, the most that checkpoints may take
MAX_CHECKPOINTS = 4096
CPU_POOL_BYTES = 2 << 30  # where the host's memory is the device: at most this, unless asked for more
FREE_SHARE = {"cpu": 0.25, "cuda": 0.85}  # of what is free after the weights


@dataclass(frozen=True, slots=True)
class Division:
    """Sizes of the two pools."""

    num_blocks: int  # the reserved one included
    num_slots: int  # the reserved ones included


def divide(budget_bytes: int, layout: StateLayout, *, max_sequences: int, grid: int) -> Division:
    """Slots for all sequences first, then checkpoints, the rest is blocks.

    Raises:
        ValueError: sequences leave too little, or blocks do not make a chunk of the grid.
    """
    num_slots = max_sequences + RESERVED_SLOTS
    slots_bytes = num_slots * layout.slot_bytes
    if layout.slots:
        if 2 * slots_bytes > budget_bytes:
            raise ValueError(
                f"{max_sequences} sequences need {slots_bytes} bytes of slots, more than half of the budget of "
                f"{budget_bytes}: lower max_sequences or raise pool_bytes"
            )
        num_slots += min(MAX_CHECKPOINTS, int(CHECKPOINT_SHARE * budget_bytes) // layout.slot_bytes)
    num_blocks = (budget_bytes - num_slots * layout.slot_bytes) // layout.block_bytes
    least = grid // layout.block_size + RESERVED_BLOCKS + 1
    if num_blocks < least:
        raise ValueError(f"pool_bytes of {budget_bytes} leave {num_blocks} blocks, but a grid chunk needs {least}")
    return Division(num_blocks, num_slots)


def free_budget(device: torch.device, weight_bytes: int = 0) -> int:
    """The budget where none is asked for, with this machine as it is now and `weight_bytes` still to be loaded."""
    is_gpu = device.type == "cuda"
    free_bytes = torch.cuda.mem_get_info(device)[0] if is_gpu else psutil.virtual_memory().available
    share = int(max(0, free_bytes - weight_bytes) * FREE_SHARE[device.type])
    return share if is_gpu else min(CPU_POOL_BYTES, share)
