"""Where a sequence's rows lie: the addresses that kernels read planes at.

A plane is [num_blocks, PAGE, ...]; blocks lie any distance apart, the rows of one block `token_stride` apart. A tile of
KEYS consecutive rows begins at a multiple of KEYS, and KEYS divides PAGE or is a multiple of it. Distances between
blocks are int64, inside a block int32.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def blocks_of(table_ptr, start, end, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The blocks of rows [start, start + KEYS), int64: one where they share it, else one a row.

    Rows from `end` on give the block of the last row before it, so that a tile may be asked for before it is known to
    be needed. Loads of keys that take their blocks from the tile before wait for no other load.
    """
    if KEYS <= PAGE:
        return tl.load(table_ptr + tl.minimum(start, end - 1) // PAGE).to(tl.int64)
    else:  # noqa: RET505 - decided while compiling
        rows = tl.minimum(start + tl.arange(0, KEYS), end - 1)
        return tl.load(table_ptr + rows // PAGE).to(tl.int64)


@triton.jit
def tile_rows(plane_ptr, blocks, start, block_stride, token_stride, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Pointers [KEYS, 1] to rows [start, start + KEYS), whose blocks are `blocks`."""
    steps = tl.arange(0, KEYS)
    if KEYS <= PAGE:
        first_ptr = plane_ptr + blocks * block_stride + start % PAGE * token_stride
        return first_ptr + (steps * token_stride)[:, None]
    else:  # noqa: RET505
        return plane_ptr + (blocks * block_stride + (start + steps) % PAGE * token_stride)[:, None]


def bulk_rows(plane: torch.Tensor, keys: int) -> TensorDescriptor:
    """Tiles of `keys` rows of one head of [num_blocks, PAGE, num_heads, width], at [block, head, row, 0].

    Heads come before rows: a reshape of a bulk copy may drop leading dimensions of one only.
    """
    by_head = plane.transpose(1, 2)
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), [1, 1, keys, plane.shape[3]])
