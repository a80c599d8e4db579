"""Which form of each operation a process uses: torch's, or Triton's on an NVIDIA card. Chosen once, at start-up.

A form is a value that is handed to the layers; nothing looks at a device again. Triton is imported only where it is
chosen, so a machine without a card needs neither it nor its start-up time.
"""

import importlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from kernels import indexer, mla, paged_attention, sparse_attention
from kernels.indexer import Selection
from kernels.key_tiles import Span
from kernels.paged_attention import PagedRows

PagedAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, float], Generator[None, None, torch.Tensor]]


class PlanAttention(Protocol):
    """Lays out a batch's attention for the `paged_attention` of the same form."""

    def __call__(self, rows: PagedRows, sizes: "AttentionSizes") -> object: ...


class LatentAttention(Protocol):
    """As kernels/mla.py's mla_attention."""

    def __call__(
        self, queries: torch.Tensor, plane: torch.Tensor, span: Span, *, latent_dim: int, scale: float
    ) -> torch.Tensor: ...


class SelectKeys(Protocol):
    """As kernels/indexer.py's select_keys."""

    def __call__(
        self, queries: torch.Tensor, weights: torch.Tensor, plane: torch.Tensor, span: Span, *, pool: int, count: int
    ) -> Selection: ...


class SparseAttention(Protocol):
    """As kernels/sparse_attention.py's sparse_attention."""

    def __call__(
        self,
        queries: torch.Tensor,
        key_plane: torch.Tensor,
        value_plane: torch.Tensor,
        span: Span,
        selection: Selection,
        *,
        scale: float,
    ) -> torch.Tensor: ...


class SparseLatentAttention(Protocol):
    """As kernels/sparse_attention.py's sparse_mla."""

    def __call__(
        self,
        queries: torch.Tensor,
        plane: torch.Tensor,
        span: Span,
        selection: Selection,
        *,
        latent_dim: int,
        scale: float,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What laying out a batch's attention needs to know of the model."""

    block_size: int
    tile: int  # keys of a prefill tile in torch's form
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """One form of every operation."""

    name: str  # part of the numerics profile
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    mla_attention: LatentAttention
    select_keys: SelectKeys
    sparse_attention: SparseAttention
    sparse_mla: SparseLatentAttention


def _plan_in_torch(rows: PagedRows, sizes: AttentionSizes) -> paged_attention.AttentionPlan:
    return paged_attention.plan_attention(rows, sizes.block_size, sizes.tile, sizes.dtype)


TORCH = Kernels(
    name="torch",
    plan_attention=_plan_in_torch,
    paged_attention=paged_attention.paged_attention,
    mla_attention=mla.mla_attention,
    select_keys=indexer.select_keys,
    sparse_attention=sparse_attention.sparse_attention,
    sparse_mla=sparse_attention.sparse_mla,
)


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Triton's forms on an NVIDIA card for bfloat16, torch's everywhere else; the name says which."""
    if device.type == "cuda" and dtype == torch.bfloat16 and find_spec("triton") is not None:
        return importlib.import_module("kernels.triton_forms").TRITON
    return TORCH
