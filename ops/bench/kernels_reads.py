"""Nothing but reading: what a kernel that must read as many bytes is held against."""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
import triton
import triton.language as tl

from ops.bench.kernels_timing import DEVICE, Run, Way

CHUNK = 1 << 13  # words of one load of a program
TIMES = 2  # loads of a program; more of fewer programs was slower on an H200


@triton.jit
def _read_kernel(data_ptr, sums_ptr, CHUNK: tl.constexpr, TIMES: tl.constexpr):
    """Reads TIMES * CHUNK int32 a program, and keeps one."""
    first = tl.program_id(0).to(tl.int64) * (TIMES * CHUNK)
    total = tl.zeros((CHUNK,), tl.int32)
    for step in range(TIMES):
        total += tl.load(data_ptr + first + step * CHUNK + tl.arange(0, CHUNK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def read_way(num_bytes: int) -> Way:
    """Reads about `num_bytes` that lie side by side: whole programs of them."""
    num_programs = round(num_bytes / (4 * CHUNK * TIMES))

    def make(_inputs: object) -> Run:
        words = torch.ones(num_programs * CHUNK * TIMES, dtype=torch.int32, device=DEVICE)
        sums = torch.empty(num_programs, dtype=torch.int32, device=DEVICE)

        def run() -> None:
            _read_kernel[(num_programs,)](words, sums, CHUNK=CHUNK, TIMES=TIMES, num_warps=8)

        return run

    return Way("reading as much", make, is_peer=True, exact=False)
