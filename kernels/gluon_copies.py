"""What a launch tells the copy engine of a tensor, for kernels in Gluon: tiles of 16-bit elements."""

# pyright: reportMissingTypeStubs=false

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@cache
def tile_layout(rank: int) -> "gl.NVMMASharedLayout":
    """How tiles lie in shared memory; every launch names it, and making one takes microseconds."""
    return gl.NVMMASharedLayout(128, 16, rank=rank)


def head_blocks(plane: torch.Tensor) -> TensorDescriptor:
    """One head of one block of [num_blocks, block_size, num_heads, width], at [block, head, 0, 0]."""
    by_head = plane.transpose(1, 2)
    block = [1, 1, plane.shape[1], plane.shape[3]]
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), block, tile_layout(4))
