"""Gluon as the kernels use it: what a launch tells the copy engine of a tensor, and names that Tritons do not share.

Its interface is experimental. Names that changed between Triton 3.6 and 3.9 stand here alone, and `is_available` says
whether this Triton has what the kernels are written with.
"""

# pyright: reportMissingTypeStubs=false

from functools import cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Each by its latest name, else by the one before it, which a later Triton lacks or refuses.
bring_tile: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
take_tile: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)
bring_values: Any = getattr(async_copy, "async_load", None) or getattr(async_copy, "async_copy_global_to_shared", None)
barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)  # of a program's threads


def is_available() -> bool:
    """Whether this Triton offers what the kernels are written with."""
    return bring_tile is not None and hasattr(gl, "warp_specialize")


def shrinks_tiles() -> bool:
    """Whether shared memory may be seen as a smaller tile than it holds: refused from Triton 3.8 on."""
    return hasattr(gl.shared_memory_descriptor, "_reinterpret") and not hasattr(tma, "async_load")


@cache
def tile_layout(rank: int) -> "gl.NVMMASharedLayout":
    """How tiles lie in shared memory; every launch names it, and making one takes microseconds."""
    return gl.NVMMASharedLayout(128, 16, rank=rank)


def head_blocks(plane: torch.Tensor) -> TensorDescriptor:
    """One head of one block of [num_blocks, block_size, num_heads, width], at [block, head, 0, 0]."""
    by_head = plane.transpose(1, 2)
    block = [1, 1, plane.shape[1], plane.shape[3]]
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), block, tile_layout(4))
