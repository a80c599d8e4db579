"""Triton's form of every operation, for kernels/dispatch.py."""

from kernels import triton_attention, triton_spans
from kernels.dispatch import AttentionSizes, Kernels
from kernels.paged_attention import PagedRows


def _plan(rows: PagedRows, sizes: AttentionSizes) -> triton_attention.TritonPlan:
    return triton_attention.plan_attention(rows, sizes.block_size, sizes.head_dim)


TRITON = Kernels(
    name="triton",
    plan_attention=_plan,
    paged_attention=triton_attention.paged_attention,
    mla_attention=triton_spans.mla_attention,
    select_keys=triton_spans.select_keys,
    sparse_attention=triton_spans.sparse_attention,
    sparse_mla=triton_spans.sparse_mla,
)
