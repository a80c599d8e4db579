"""A decode step of a delta-rule mixer for few rows: a program for every value head, after the convolution.

kernels/triton_delta_decode.py has all of it in one kernel, a program for every key head, which leaves most of a card
idle while there are few rows. Here a program takes a head's whole state at once. The convolution is a launch of its
own, or the end of the projection, whose programs have whole channels.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.delta_mixer import DeltaMixer, OutputGate, ProjectedRows
from kernels.delta_rule import MIN_LOG_DECAY, UNIT_EPS
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_causal_conv import causal_conv_step
from kernels.triton_chain import chained, follow
from kernels.triton_delta_decode import softplus
from kernels.triton_few_linear import FEW_ROWS, PIECE, add_products, fetch

PROJECT_COLUMNS, PROJECT_WARPS = 2, 4


@triton.jit
def _project_kernel(
    x_ptr,  # [ROWS, WIDTH]
    weights_ptr,  # [num_columns, WIDTH]
    out_ptr,  # [ROWS, num_columns]; the first CHANNELS columns convolved
    tails_ptr,
    slot_in_ptr,
    slot_out_ptr,
    taps_ptr,
    num_columns,
    x_stride,
    tail_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,  # TAPS, padded
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    columns = tl.program_id(0) * N + tl.arange(0, N)
    inside = columns < num_columns
    tiles = fetch(weights_ptr, columns, inside, WIDTH, PIECE)
    age = tl.arange(0, PADDED)[:, None]
    mixed = columns < CHANNELS
    at = age * CHANNELS + columns[None, :]
    taps = tl.load(taps_ptr + at, mask=(age < TAPS) & mixed[None, :], other=0.0)
    follow(CHAINED)
    # Rows of padding share a slot: all tails are read before any is written.
    tails = ()
    for row in tl.static_range(ROWS):
        tail_ptr = tails_ptr + tl.load(slot_in_ptr + row) * tail_stride
        tails += (tl.load(tail_ptr + at, mask=(age < TAPS - 1) & mixed[None, :], other=0.0),)
    tl.debug_barrier()
    for row in tl.static_range(ROWS):
        acc = add_products(tl.zeros((N, PIECE), tl.float32), tiles, x_ptr + row * x_stride, 1.0, WIDTH, PIECE)
        made = tl.sum(acc, 1).to(out_ptr.dtype.element_ty)
        window = tl.where(age == TAPS - 1, made[None, :], tails[row])
        turned = tl.sum(window.to(tl.float32) * taps, 0)
        turned = (turned * tl.sigmoid(turned)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * num_columns + columns, tl.where(mixed, turned, made), mask=inside)
        target_ptr = tails_ptr + tl.load(slot_out_ptr + row) * tail_stride
        tl.store(target_ptr + at - CHANNELS, window, mask=(age > 0) & (age < TAPS) & mixed[None, :])


@triton.jit
def _delta_head_kernel(
    mixed_ptr,  # [rows, CHANNELS], convolved, any stride between rows
    gate_ptr,
    beta_ptr,
    decay_ptr,
    out_ptr,  # [rows, HEADS * DV]
    states_ptr,
    slot_in_ptr,
    slot_out_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    mixed_stride,
    gate_stride,
    beta_stride,
    decay_stride,
    state_stride,
    norm_eps,
    lower_bound,
    HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,  # DK and DV, padded to powers of two
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST: tl.constexpr,
    EPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k_head = head // (HEADS // K_HEADS)
    keys = tl.arange(0, BK)
    values = tl.arange(0, BV)
    in_keys = keys < DK
    in_values = values < DV
    held = in_keys[:, None] & in_values[None, :]
    at = head * (DK * DV) + keys[:, None] * DV + values[None, :]
    # The launch before this one makes `mixed`, and does not touch states. Caches of a multiprocessor may hold what was
    # there a step ago.
    source_ptr = states_ptr + tl.load(slot_in_ptr + row) * state_stride
    state = tl.load(source_ptr + at, mask=held, other=0.0, cache_modifier=".cg")
    target_ptr = states_ptr + tl.load(slot_out_ptr + row) * state_stride
    rate = tl.exp(tl.load(a_log_ptr + head))
    norm = tl.load(norm_ptr + values, mask=in_values, other=0.0)
    follow(CHAINED)
    x_ptr = mixed_ptr + row * mixed_stride
    q = tl.load(x_ptr + k_head * DK + keys, mask=in_keys, other=0.0).to(tl.float32)
    k = tl.load(x_ptr + (K_HEADS + k_head) * DK + keys, mask=in_keys, other=0.0).to(tl.float32)
    v = tl.load(x_ptr + 2 * K_HEADS * DK + head * DV + values, mask=in_values, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (DK**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32))
    if DECAY == 0:
        raised = tl.load(decay_ptr + row * decay_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
        state *= tl.exp(tl.maximum(-rate * softplus(raised), LEAST))
    else:
        f = tl.load(decay_ptr + row * decay_stride + head * DK + keys, mask=in_keys, other=0.0).to(tl.float32)
        raised = f + tl.load(dt_bias_ptr + head * DK + keys, mask=in_keys, other=0.0)
        log_decay = -rate * softplus(raised) if DECAY == 1 else lower_bound * tl.sigmoid(rate * raised)
        state *= tl.exp(tl.maximum(log_decay, LEAST))[:, None]
    delta = (v - tl.sum(k[:, None] * state, 0)) * beta
    out = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * delta
    state += k[:, None] * delta[None, :]
    tl.store(target_ptr + at, state, mask=held)
    out *= tl.rsqrt(tl.sum(out * out, 0) / DV + norm_eps)
    gate = tl.load(gate_ptr + row * gate_stride + head * DV + values, mask=in_values, other=0.0).to(tl.float32)
    shut = tl.sigmoid(gate)
    if not SIGMOID:
        shut *= gate
    out *= norm * shut
    tl.store(out_ptr + row * (HEADS * DV) + head * DV + values, out.to(out_ptr.dtype.element_ty), mask=in_values)


def delta_few(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """As `delta_decode` of kernels/triton_delta_decode.py, for few rows."""
    # What comes before is a projection.
    mixed = causal_conv_step(rows.mixed, slots.tails, slots.slot_in, slots.slot_out, mixer.conv, early=True)
    return _delta_heads(replace(rows, mixed=mixed), mixer, slots)


def delta_from_rows(x: torch.Tensor, weight: torch.Tensor, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """The same from the rows that are projected: x [rows, in] of up to FEW_ROWS, weight [out, in].

    The projection's columns are [channels | gate | beta | decay], as `ProjectedRows` has them.
    """
    num_rows, width = x.shape
    taps, channels = mixer.conv.taps.shape
    heads, _, dv = slots.states.shape[1:]
    num_columns = weight.shape[0]
    slots.check(num_rows)
    assert 0 < num_rows <= FEW_ROWS
    assert weight.shape == (num_columns, width)
    assert weight.is_contiguous()
    assert num_columns == channels + heads * dv + heads + mixer.dt_bias.shape[0]
    assert channels % PROJECT_COLUMNS == 0, "a program convolves all of its columns or none"
    assert x.stride(1) == 1
    assert slots.tails.shape[1:] == (taps - 1, channels)
    assert slots.tails[0].is_contiguous(), "a slot's own tail is contiguous"
    assert slots.tails.dtype == weight.dtype
    assert mixer.conv.silu
    assert mixer.conv.bias is None
    assert mixer.conv.taps.is_contiguous()
    out = torch.empty((num_rows, num_columns), dtype=weight.dtype, device=x.device)
    _project_kernel[(triton.cdiv(num_columns, PROJECT_COLUMNS),)](
        *(x, weight, out, slots.tails, slots.slot_in, slots.slot_out, mixer.conv.taps, num_columns),
        *(x.stride(0), slots.tails.stride(0)),
        WIDTH=width,
        CHANNELS=channels,
        TAPS=taps,
        PADDED=triton.next_power_of_2(taps),
        ROWS=num_rows,
        PIECE=min(PIECE, triton.next_power_of_2(width)),
        N=PROJECT_COLUMNS,
        **chained(),
        num_warps=PROJECT_WARPS,
    )
    parts = out.split((channels, heads * dv, heads, mixer.dt_bias.shape[0]), 1)
    return _delta_heads(ProjectedRows(*parts), mixer, slots)


def _delta_heads(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """From rows as the convolution left them."""
    num_rows, channels = rows.mixed.shape
    heads, dk, dv = slots.states.shape[1:]
    k_heads = (channels - heads * dv) // (2 * dk)
    slots.check(num_rows)
    assert channels == 2 * k_heads * dk + heads * dv
    assert heads % k_heads == 0, f"{k_heads} key heads do not divide {heads} value heads"
    assert not mixer.per_channel or k_heads == heads, "a decay a channel has a key head for every value head"
    assert mixer.a_log.shape == (heads,)
    assert mixer.dt_bias.shape == ((heads * dk,) if mixer.per_channel else (heads,))
    assert mixer.norm.shape == (dv,)
    assert mixer.a_log.dtype == mixer.dt_bias.dtype == mixer.norm.dtype == torch.float32
    assert rows.gate.shape == (num_rows, heads * dv)
    assert rows.beta.shape == (num_rows, heads)
    assert rows.decay.shape == (num_rows, mixer.dt_bias.shape[0])
    for part in (rows.mixed, rows.gate, rows.beta, rows.decay):
        assert part.stride(1) == 1, "columns are side by side"
    out = torch.empty((num_rows, heads * dv), dtype=rows.mixed.dtype, device=rows.mixed.device)
    if num_rows:
        _delta_head_kernel[(heads, num_rows)](
            *(rows.mixed, rows.gate, rows.beta, rows.decay, out, slots.states, slots.slot_in, slots.slot_out),
            *(mixer.a_log, mixer.dt_bias, mixer.norm, rows.mixed.stride(0), rows.gate.stride(0), rows.beta.stride(0)),
            *(rows.decay.stride(0), slots.states.stride(0), mixer.norm_eps, mixer.lower_bound),
            HEADS=heads,
            K_HEADS=k_heads,
            DK=dk,
            DV=dv,
            BK=triton.next_power_of_2(dk),
            BV=triton.next_power_of_2(dv),
            DECAY=mixer.decay.value,
            SIGMOID=mixer.gate is OutputGate.SIGMOID,
            LEAST=MIN_LOG_DECAY,
            EPS=UNIT_EPS,
            **chained(),
            num_warps=8,
        )
    return out
