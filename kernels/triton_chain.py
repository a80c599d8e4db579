"""Launches that begin while the one before them ends: programmatic dependent launch, from sm_90 on.

A decode step is a chain of small launches, and between two ordinary ones the memory idles for a microsecond or two. A
chained launch is on the multiprocessors by then, with its weights on the way. Two rules make that safe:

- Every program calls `follow` before it reads what the launch before it writes, and before it writes anything.
- Nobody lets the next launch begin before `follow` has returned. So what is read before `follow` may come from any
  launch but the last: a weight, or a state that a step before this one wrote.

A launch of few programs calls `lead` in place of `follow`: what comes after it may begin even before the launch before
it is over. What that one reads before its wait may come from any launch but the last two. Kernels that read there what
is no weight (experts' ids, states, tails) come after a product, and products follow.

A launch of more programs than fit at once calls `hold`, and `hand_over` at the end of each program: programs that wait
for its end would take the room of its own. On an H200 a merge that began early cost attention over long histories 1 to
8 us.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

FIRST_ARCH = 90


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Waits until the launch before this one is over and its writes are seen, then lets the next one begin."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def hold(CHAINED: tl.constexpr):
    """As `follow`, but the next launch begins no sooner than `hand_over` lets it."""
    if CHAINED:
        gdc_wait()


@triton.jit
def hand_over(CHAINED: tl.constexpr):
    """After `hold`, at a program's end: the next launch may begin once every program is that far."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def lead(CHAINED: tl.constexpr):
    """As `follow`, but the next launch may begin before this one's wait is over."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()


@cache
def chained() -> dict[str, bool]:
    """Launch arguments of a kernel that calls `follow`, `lead` or `hold`; the card of a process does not change."""
    if knobs.runtime.interpret:
        return {"CHAINED": False}
    target = driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < FIRST_ARCH:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}
