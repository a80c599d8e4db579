"""Weights that a later launch reads, brought to the level-2 cache while the memory has nothing else to do.

Between a mixer's last product and the experts stand launches that read next to nothing: a norm, the router, the choice.
The experts are not known before, but the next layer's first matrix is.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

from kernels.triton_chain import chained, follow

AHEAD_BYTES = 16 << 20  # at most: what is read between may be half as much again as the cache holds
PART_BYTES = tl.constexpr(4096)  # that a thread asks for
PARTS = 128  # of a program
ASK = tl.constexpr(
    "{ .reg .b64 keep; createpolicy.fractional.L2::evict_last.b64 keep, 1.0;"
    " cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], 4096, keep; mov.u32 $0, 0; }"
)


@triton.jit
def _ask_kernel(weight_ptr, PARTS: tl.constexpr, CHAINED: tl.constexpr):
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    at = weight_ptr.to(tl.int64, bitcast=True) + part.to(tl.int64) * PART_BYTES
    tl.inline_asm_elementwise(ASK, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)
    follow(CHAINED)


def bring_near(weight: torch.Tensor) -> None:
    """Asks for the first rows of a contiguous weight; changes nothing but when they arrive."""
    launch = chained()
    programs = min(weight.nbytes, AHEAD_BYTES) // (PARTS * PART_BYTES.value)
    assert weight.is_contiguous()
    if launch["CHAINED"] and programs:
        _ask_kernel[(programs,)](weight, PARTS=PARTS, **launch, num_warps=4)
