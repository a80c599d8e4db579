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
from torch.nn import functional

from kernels import (
    delta_mixer,
    gated_norm,
    hyper_connections,
    indexer,
    mla,
    moe,
    norms,
    paged_attention,
    qk_rope,
    sampling_rows,
    slot_forms,
    sparse_attention,
)
from kernels.causal_conv import ConvWeights
from kernels.delta_mixer import DeltaMixer, ProjectedRows
from kernels.hyper_connections import HyperMix, HyperRule, HyperWeights
from kernels.indexer import Selection
from kernels.key_tiles import BatchSpan
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.moe import Activation, Mixture, Routing, SigmoidRule
from kernels.norms import RmsWeights
from kernels.paged_attention import GatedQueries, PagedRows
from kernels.qk_rope import HeadNorms, Heads, Places
from kernels.recurrent_slots import RecurrentSlots
from kernels.sampling_rows import SamplingRows

Tensor = torch.Tensor


class LatentAttention(Protocol):
    """As kernels/mla.py's mla_attention. `span` is a `BatchSpan` where `span_batch` made one."""

    def __call__(self, queries: Tensor, plane: Tensor, span: Any, *, latent_dim: int, scale: float) -> Tensor: ...


class SelectKeys(Protocol):
    """As kernels/indexer.py's select_keys."""

    def __call__(
        self, queries: Tensor, weights: Tensor, plane: Tensor, span: Any, *, pool: int, count: int
    ) -> Selection: ...


class SparseAttention(Protocol):
    """As kernels/sparse_attention.py's sparse_attention."""

    def __call__(
        self, queries: Tensor, key_plane: Tensor, value_plane: Tensor, span: Any, selection: Selection, *, scale: float
    ) -> Tensor: ...


class SparseLatentAttention(Protocol):
    """As kernels/sparse_attention.py's sparse_mla."""

    def __call__(
        self, queries: Tensor, plane: Tensor, span: Any, selection: Selection, *, latent_dim: int, scale: float
    ) -> Tensor: ...


class GroupNorm(Protocol):
    """As kernels/gated_norm.py's gated_group_rms_norm, in the dtype of the gate."""

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, *, num_groups: int, eps: float) -> Tensor: ...


class RouteSoftmax(Protocol):
    """As kernels/moe.py's route_softmax."""

    def __call__(self, logits: Tensor, *, top_k: int, renormalise: bool) -> Routing: ...


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What laying out a batch's attention needs to know of the model."""

    block_size: int
    tile: int  # keys of a prefill tile in torch's form
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionForms:
    """Attention over whole keys: `plan` lays out a batch for `attend`. The rest takes spans of rows."""

    plan: Callable[[PagedRows, AttentionSizes], object]
    attend: Callable[[Tensor, Tensor, Tensor, Any, float], Generator[None, None, Tensor]]
    # The same times sigmoid(gate), [num_rows, num_heads head_dim].
    attend_gated: Callable[[GatedQueries, Tensor, Tensor, Any, float], Generator[None, None, Tensor]]
    turns: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]  # cos and sin of rows' positions
    turn_and_write: Callable[[Heads, Tensor, Tensor, HeadNorms, Places], Tensor]
    span_batch: Callable[[PagedRows, int], BatchSpan | None]  # of a block size; None: rows go sequence by sequence
    latent: LatentAttention
    select_keys: SelectKeys
    sparse: SparseAttention
    sparse_latent: SparseLatentAttention


@dataclass(frozen=True, slots=True)
class RecurrentForms:
    """Convolutions and recurrences over slots: a chunk's rows are of one sequence, a step's each of its own."""

    conv_chunk: Callable[[Tensor, Tensor, Tensor, Tensor, ConvWeights], Tensor]
    conv_step: Callable[[Tensor, Tensor, Tensor, Tensor, ConvWeights], Tensor]
    delta_step: Callable[[ProjectedRows, DeltaMixer, RecurrentSlots], Tensor]
    delta_chunk: Callable[[ProjectedRows, DeltaMixer, RecurrentSlots], Tensor]
    delta_norm: Callable[[Tensor, Tensor, DeltaMixer], Tensor]
    mamba2_step: Callable[[Mamba2Rows, Mamba2Weights, RecurrentSlots], Tensor]
    mamba2_chunk: Callable[[Mamba2Rows, Mamba2Weights, RecurrentSlots], Tensor]
    group_norm: GroupNorm


@dataclass(frozen=True, slots=True)
class RowForms:
    """What looks at one row at a time."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, RmsWeights], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, RmsWeights], Tensor]
    activate: Callable[[Tensor, Activation], Tensor]
    route_softmax: RouteSoftmax
    route_sigmoid: Callable[[Tensor, Tensor, SigmoidRule], Routing]
    experts: Callable[[Tensor, Routing, Tensor, Tensor, Activation], Tensor]
    expert_rows: Callable[[int], int]  # of so many choices a row: how many rows `experts` takes between two pauses
    few_experts: Callable[[Tensor, Routing, Mixture], Tensor] | None  # routed and shared ones at once
    few_rows: int  # the most that `few_experts` is for
    mix_streams: Callable[[Tensor, HyperWeights, HyperRule], HyperMix]
    inject: Callable[[Tensor, Tensor, HyperMix], Tensor]
    draw: Callable[[Tensor, SamplingRows], Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One form of every operation."""

    name: str  # part of the numerics profile
    replays: bool  # a step of decode rows reads the device alone, so that it can be captured and replayed
    attention: AttentionForms
    recurrent: RecurrentForms
    rows: RowForms
    # Rows of a byte matrix by ids to rows of another, (source, source_ids, target, target_ids), either on the device or
    # in pinned memory. None: this form knows its own memory alone.
    move_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None


def _plan_in_torch(rows: PagedRows, sizes: AttentionSizes) -> paged_attention.AttentionPlan:
    return paged_attention.plan_attention(rows, sizes.block_size, sizes.tile, sizes.dtype)


def _by_sequence(_rows: PagedRows, _block_size: int) -> BatchSpan | None:
    return None


def _group_norm_in_torch(x: Tensor, gate: Tensor, weight: Tensor, *, num_groups: int, eps: float) -> Tensor:
    return gated_norm.gated_group_rms_norm(x, gate, weight, num_groups=num_groups, eps=eps).to(gate.dtype)


def _attend_gated_in_torch(
    queries: GatedQueries, k_plane: Tensor, v_plane: Tensor, plan: Any, scale: float
) -> Generator[None, None, Tensor]:
    found = yield from paged_attention.paged_attention(queries.q, k_plane, v_plane, plan, scale)
    return torch.sigmoid(queries.gate).mul_(found).flatten(1)


def _slab_rows(_top_k: int) -> int:
    return 256  # experts of a long chunk run slab by slab, so that the engine can pause between them


TORCH = Kernels(
    name="torch",
    replays=False,
    attention=AttentionForms(
        plan=_plan_in_torch,
        attend=paged_attention.paged_attention,
        attend_gated=_attend_gated_in_torch,
        turns=qk_rope.turns,
        turn_and_write=qk_rope.turn_and_write,
        span_batch=_by_sequence,
        latent=mla.mla_attention,
        select_keys=indexer.select_keys,
        sparse=sparse_attention.sparse_attention,
        sparse_latent=sparse_attention.sparse_mla,
    ),
    recurrent=RecurrentForms(
        conv_chunk=slot_forms.causal_conv_chunk,
        conv_step=slot_forms.causal_conv_step,
        delta_step=delta_mixer.delta_decode,
        delta_chunk=delta_mixer.delta_chunk,
        delta_norm=delta_mixer.delta_norm,
        mamba2_step=slot_forms.mamba2_step,
        mamba2_chunk=slot_forms.mamba2_chunk,
        group_norm=_group_norm_in_torch,
    ),
    rows=RowForms(
        linear=functional.linear,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        activate=moe.activate,
        route_softmax=moe.route_softmax,
        route_sigmoid=moe.route_sigmoid,
        experts=moe.grouped_experts,
        expert_rows=_slab_rows,
        few_experts=None,
        few_rows=0,
        mix_streams=hyper_connections.mix_streams,
        inject=hyper_connections.inject,
        draw=sampling_rows.draw_rows,
    ),
)


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Triton's forms on an NVIDIA card for bfloat16, torch's everywhere else; the name says which."""
    if device.type == "cuda" and dtype == torch.bfloat16 and find_spec("triton") is not None:
        return importlib.import_module("kernels.triton_forms").TRITON
    return TORCH
