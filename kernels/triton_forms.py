"""Triton's form of every operation, for kernels/dispatch.py."""

import torch

from kernels import (
    triton_activate,
    triton_attention,
    triton_block_copy,
    triton_causal_conv,
    triton_delta_chunk,
    triton_delta_decode,
    triton_delta_few,
    triton_few_experts,
    triton_few_linear,
    triton_hyper_connections,
    triton_mamba2,
    triton_moe,
    triton_norms,
    triton_qk_rope,
    triton_routing,
    triton_sampling,
    triton_spans,
)
from kernels.delta_mixer import COUNTED_ROWS, DeltaMixer, OutputGate, ProjectedRows
from kernels.dispatch import AttentionForms, AttentionSizes, Kernels, RecurrentForms, RowForms
from kernels.norms import RmsWeights
from kernels.paged_attention import PagedRows
from kernels.qk_rope import HeadNorms, Heads, Places
from kernels.recurrent_slots import RecurrentSlots
from kernels.sampling_rows import SamplingRows


def _plan(rows: PagedRows, sizes: AttentionSizes) -> triton_attention.TritonPlan:
    return triton_attention.plan_attention(rows, sizes.block_size, sizes.head_dim)


def _turn_and_write(
    heads: Heads, k_plane: torch.Tensor, v_plane: torch.Tensor, norms: HeadNorms, places: Places
) -> torch.Tensor:
    return triton_qk_rope.turn_and_write(heads, k_plane, v_plane, norms, places)


def _rms_norm(x: torch.Tensor, norm: RmsWeights) -> torch.Tensor:
    return triton_norms.rms_norm(x, norm.weight, norm.eps, cast_first=norm.cast_first)


def _add_rms_norm(hidden: torch.Tensor, addend: torch.Tensor, norm: RmsWeights) -> torch.Tensor:
    return triton_norms.add_rms_norm(hidden, addend, norm.weight, norm.eps, cast_first=norm.cast_first)


def _delta_step(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    if rows.mixed.shape[0] <= COUNTED_ROWS:
        return triton_delta_few.delta_few(rows, mixer, slots)
    return triton_delta_decode.delta_decode(rows, mixer, slots)


def _delta_norm(out: torch.Tensor, gate: torch.Tensor, mixer: DeltaMixer) -> torch.Tensor:
    silu = mixer.gate is OutputGate.SILU
    form = triton_norms.rms_norm_silu_gate if silu else triton_norms.rms_norm_sigmoid_gate
    return form(out, gate, mixer.norm, mixer.norm_eps).flatten(1)


def _expert_rows(top_k: int) -> int:
    return triton_routing.MOST_BLOCKS * triton_routing.BLOCK // top_k


def _draw(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return triton_sampling.draw_rows(logits, rows, refuses=True)


TRITON = Kernels(
    name="triton",
    replays=True,
    attention=AttentionForms(
        plan=_plan,
        attend=triton_attention.paged_attention,
        attend_gated=triton_attention.gated_attention,
        turns=triton_qk_rope.turns,
        turn_and_write=_turn_and_write,
        span_batch=triton_spans.span_batch,
        latent=triton_spans.mla_attention,
        select_keys=triton_spans.select_keys,
        sparse=triton_spans.sparse_attention,
        sparse_latent=triton_spans.sparse_mla,
    ),
    recurrent=RecurrentForms(
        conv_chunk=triton_causal_conv.causal_conv_chunk,
        conv_step=triton_causal_conv.causal_conv_step,
        delta_step=_delta_step,
        delta_chunk=triton_delta_chunk.delta_chunk,
        delta_norm=_delta_norm,
        mamba2_step=triton_mamba2.mamba2_step,
        mamba2_chunk=triton_mamba2.mamba2_chunk,
        group_norm=triton_norms.gated_group_rms_norm,
    ),
    rows=RowForms(
        linear=triton_few_linear.linear,
        rms_norm=_rms_norm,
        add_rms_norm=_add_rms_norm,
        activate=triton_activate.activate,
        route_softmax=triton_routing.route_softmax,
        route_sigmoid=triton_routing.route_sigmoid,
        experts=triton_moe.grouped_experts,
        expert_rows=_expert_rows,
        few_experts=triton_few_experts.few_experts,
        few_rows=triton_few_linear.FEW_ROWS,
        mix_streams=triton_hyper_connections.mix_streams,
        inject=triton_hyper_connections.inject,
        draw=_draw,
    ),
    move_rows=triton_block_copy.move_rows,
)
