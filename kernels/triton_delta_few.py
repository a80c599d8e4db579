"""A decode step of a delta-rule mixer for few rows: a program for every value head, after a convolution of its own.

kernels/triton_delta_decode.py has all of it in one kernel, a program for every key head, which leaves most of a card
idle while there are few rows. Here a program takes a head's whole state at once.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

import torch
import triton
import triton.language as tl

from kernels.delta_mixer import DeltaMixer, OutputGate, ProjectedRows
from kernels.delta_rule import MIN_LOG_DECAY, UNIT_EPS
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_causal_conv import causal_conv_step
from kernels.triton_chain import chained, follow
from kernels.triton_delta_decode import softplus


@triton.jit
def _delta_head_kernel(
    mixed_ptr,  # [rows, CHANNELS], convolved
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
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + HEADS * DV
    k_head = head // (HEADS // K_HEADS)
    keys = tl.arange(0, BK)
    values = tl.arange(0, BV)
    in_keys = keys < DK
    in_values = values < DV
    held = in_keys[:, None] & in_values[None, :]
    at = head * (DK * DV) + keys[:, None] * DV + values[None, :]
    # The launch before this one is the convolution: it has not touched states. Caches of a multiprocessor may hold
    # what was there a step ago.
    source_ptr = states_ptr + tl.load(slot_in_ptr + row) * state_stride
    state = tl.load(source_ptr + at, mask=held, other=0.0, cache_modifier=".cg")
    target_ptr = states_ptr + tl.load(slot_out_ptr + row) * state_stride
    rate = tl.exp(tl.load(a_log_ptr + head))
    norm = tl.load(norm_ptr + values, mask=in_values, other=0.0)
    follow(CHAINED)
    x_ptr = mixed_ptr + row * CHANNELS
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
    for part in (rows.gate, rows.beta, rows.decay):
        assert part.stride(1) == 1, "columns are side by side"
    # What comes before is a projection.
    mixed = causal_conv_step(rows.mixed, slots.tails, slots.slot_in, slots.slot_out, mixer.conv, early=True)
    out = torch.empty((num_rows, heads * dv), dtype=mixed.dtype, device=mixed.device)
    if num_rows:
        _delta_head_kernel[(heads, num_rows)](
            *(mixed, rows.gate, rows.beta, rows.decay, out, slots.states, slots.slot_in, slots.slot_out),
            *(mixer.a_log, mixer.dt_bias, mixer.norm, rows.gate.stride(0), rows.beta.stride(0), rows.decay.stride(0)),
            *(slots.states.stride(0), mixer.norm_eps, mixer.lower_bound),
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
