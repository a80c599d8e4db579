"""The device's memory for state: one byte matrix of blocks and one of slots, made once at start-up.

A row of `blocks` is a block image, a row of `slots` a slot image, as tiers/layout.py places their parts; planes and
slot tensors are strided views into them, so that moving a block of all layers is one copy of one row. Nothing here is
allocated per sequence: a sequence holds ids.
"""

import torch

from tiers.layout import Part, StateLayout


class DevicePools:
    """Views by name: `planes[name]` is [num_blocks, rows, *row_shape], `slot_tensors[name]` is [num_slots, *shape]."""

    def __init__(self, layout: StateLayout, num_blocks: int, num_slots: int, device: torch.device) -> None:
        assert num_blocks > 0
        assert num_slots > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        # Zeroed, which also touches every page now instead of inside a step.
        self.blocks = torch.zeros((num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)
        self.slots = torch.zeros((num_slots, layout.slot_bytes), dtype=torch.uint8, device=device)
        self.planes = {part.name: _view(self.blocks, part) for part in layout.block_parts}
        self.slot_tensors = {part.name: _view(self.slots, part) for part in layout.slot_parts}

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the device."""
        return self.blocks.nbytes + self.slots.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """All planes of all layers, one copy."""
        self.blocks[target].copy_(self.blocks[source])

    def copy_slot(self, source: int, target: int) -> None:
        """All slot tensors of all layers, one copy."""
        self.slots[target].copy_(self.slots[source])

    def clear_slot(self, slot_id: int) -> None:
        """The state before the first token."""
        self.slots[slot_id].zero_()


class HostArena:
    """The host tier's memory, [num_chunks, chunk_bytes], touched when made; pinned where there is an accelerator."""

    def __init__(self, num_chunks: int, chunk_bytes: int, *, is_pinned: bool) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = torch.zeros((num_chunks, chunk_bytes), dtype=torch.uint8, pin_memory=is_pinned)

    def planes(self, layout: StateLayout) -> dict[str, torch.Tensor]:
        """Views of block images as the pools have them: [num_chunks, rows, *row_shape] by name."""
        return {part.name: _view(self.chunks, part) for part in layout.block_parts}


def _view(images: torch.Tensor, part: Part) -> torch.Tensor:
    dtype = getattr(torch, part.dtype)
    columns = images[:, part.offset : part.offset + part.num_bytes].view(dtype)
    return columns.view(images.shape[0], *part.shape)
