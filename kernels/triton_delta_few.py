"""A decode step of a delta-rule mixer for few rows: a program for a slice of each value head's state.

kernels/triton_delta_decode.py has a program for every key head, which leaves most of a card idle while there are few
rows. Here many programs share a key head, and all of them convolve its channels. They count each other: the last one
moves the key's tail on, which all have read by then, and norms what the others left of the heads' outputs.
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
from kernels.triton_chain import chained, lead
from kernels.triton_delta_decode import add_pairs, add_triples, check_step, convolve, move_tail, softplus

VALUES = 32  # value channels of a program


@triton.jit
def _load_old(tail_ptr, taps_ptr, at, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """The convolution's inputs before the row at channels `at`, oldest first, and all taps: a tuple of vectors each."""
    inputs = ()
    taps = ()
    for j in tl.static_range(TAPS - 1):
        inputs += (tl.load(tail_ptr + j * CHANNELS + at, mask=inside, other=0.0, cache_modifier=".cg"),)
    for j in tl.static_range(TAPS):
        taps += (tl.load(taps_ptr + j * CHANNELS + at, mask=inside, other=0.0),)
    return inputs, taps


@triton.jit
def _delta_few_kernel(
    mixed_ptr,  # [rows, CHANNELS], as projected, any stride between rows
    gate_ptr,
    beta_ptr,
    decay_ptr,
    out_ptr,  # [rows, HEADS * DV]
    parts_ptr,  # [rows, HEADS * DV] float32 scratch: outputs before the norm
    arrivals_ptr,  # [rows, K_HEADS] int32: zero, and so it is left
    tails_ptr,
    states_ptr,
    slot_in_ptr,
    slot_out_ptr,
    taps_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    mixed_stride,
    gate_stride,
    beta_stride,
    decay_stride,
    tail_stride,
    state_stride,
    norm_eps,
    lower_bound,
    K_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # REPEATS, padded
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,  # DK and DV, padded to powers of two
    BV: tl.constexpr,
    VALUES: tl.constexpr,
    TAPS: tl.constexpr,
    DECAY: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST: tl.constexpr,
    EPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    SLICES: tl.constexpr = BV // VALUES
    HEADS: tl.constexpr = K_HEADS * REPEATS
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + HEADS * DV
    head = tl.program_id(0) // SLICES
    row = tl.program_id(1).to(tl.int64)
    k_head = head // REPEATS
    keys = tl.arange(0, BK)
    values = (tl.program_id(0) % SLICES) * VALUES + tl.arange(0, VALUES)
    in_keys = keys < DK
    in_values = values < DV
    held = in_keys[:, None] & in_values[None, :]
    q_at = k_head * DK + keys
    k_at = (K_HEADS + k_head) * DK + keys
    v_at = 2 * K_HEADS * DK + head * DV + values
    state_at = head * (DK * DV) + keys[:, None] * DV + values[None, :]
    # The launches right before this one touch neither states nor tails. Caches of a multiprocessor may hold what was
    # there a step ago.
    source = tl.load(slot_in_ptr + row)
    target = tl.load(slot_out_ptr + row)
    state = tl.load(states_ptr + source * state_stride + state_at, mask=held, other=0.0, cache_modifier=".cg")
    tail_ptr = tails_ptr + source * tail_stride
    q_inputs, q_taps = _load_old(tail_ptr, taps_ptr, q_at, in_keys, CHANNELS, TAPS)
    k_inputs, k_taps = _load_old(tail_ptr, taps_ptr, k_at, in_keys, CHANNELS, TAPS)
    v_inputs, v_taps = _load_old(tail_ptr, taps_ptr, v_at, in_values, CHANNELS, TAPS)
    rate = tl.exp(tl.load(a_log_ptr + head))
    if DECAY == 0:
        bias = tl.load(dt_bias_ptr + head)
    else:
        bias = tl.load(dt_bias_ptr + head * DK + keys, mask=in_keys, other=0.0)
    lead(CHAINED)
    x_ptr = mixed_ptr + row * mixed_stride
    q_inputs += (tl.load(x_ptr + q_at, mask=in_keys, other=0.0),)
    k_inputs += (tl.load(x_ptr + k_at, mask=in_keys, other=0.0),)
    v_inputs += (tl.load(x_ptr + v_at, mask=in_values, other=0.0),)
    beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32))
    if DECAY == 0:
        raised = tl.load(decay_ptr + row * decay_stride + head).to(tl.float32) + bias
        state *= tl.exp(tl.maximum(-rate * softplus(raised), LEAST))
    else:
        f = tl.load(decay_ptr + row * decay_stride + head * DK + keys, mask=in_keys, other=0.0).to(tl.float32)
        raised = f + bias
        log_decay = -rate * softplus(raised) if DECAY == 1 else lower_bound * tl.sigmoid(rate * raised)
        state *= tl.exp(tl.maximum(log_decay, LEAST))[:, None]
    q = convolve(q_inputs, q_taps, TAPS)
    k = convolve(k_inputs, k_taps, TAPS)
    v = convolve(v_inputs, v_taps, TAPS)
    # Sums make threads wait for each other, so they are taken together, and units come after them.
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    unit_q = tl.rsqrt(qq + EPS) * (DK**-0.5)
    unit_k = tl.rsqrt(kk + EPS)
    k_read, q_read = tl.reduce((k[:, None] * state, q[:, None] * state), 0, add_pairs)
    delta = (v - k_read * unit_k) * beta
    out = q_read * unit_q + qk * unit_q * unit_k * delta
    tl.store(parts_ptr + (row * HEADS + head) * DV + values, out, mask=in_values)
    tl.debug_barrier()  # the count says that all threads have read the tail and written their outputs
    count_ptr = arrivals_ptr + row * K_HEADS + k_head
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    state += (k * unit_k)[:, None] * delta[None, :]
    tl.store(states_ptr + target * state_stride + state_at, state, mask=held)
    target_ptr = tails_ptr + target * tail_stride
    move_tail(v_inputs, target_ptr, v_at, in_values, CHANNELS, TAPS)
    if arrived == REPEATS * SLICES - 1:
        tl.store(count_ptr, 0)
        move_tail(q_inputs, target_ptr, q_at, in_keys, CHANNELS, TAPS)
        move_tail(k_inputs, target_ptr, k_at, in_keys, CHANNELS, TAPS)
        repeat = tl.arange(0, HEADS_PADDED)[:, None]
        channels = tl.arange(0, BV)[None, :]
        inside = (repeat < REPEATS) & (channels < DV)
        at = (k_head * REPEATS + repeat) * DV + channels
        whole = tl.load(parts_ptr + row * (HEADS * DV) + at, mask=inside, other=0.0, cache_modifier=".cg")
        gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + channels, mask=channels < DV, other=0.0)
        whole *= tl.rsqrt(tl.sum(whole * whole, 1) / DV + norm_eps)[:, None]
        shut = tl.sigmoid(gate)
        if not SIGMOID:
            shut *= gate
        whole *= norm * shut
        tl.store(out_ptr + row * (HEADS * DV) + at, whole.to(out_ptr.dtype.element_ty), mask=inside)


def delta_few(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """As `delta_decode` of kernels/triton_delta_decode.py, for as many rows as `mixer` has arrivals for.

    No row's slot_out is another's slot_in.
    """
    num_rows = rows.mixed.shape[0]
    heads, dk, dv = slots.states.shape[1:]
    k_heads = check_step(rows, mixer, slots)
    assert num_rows <= mixer.arrivals.shape[0]
    assert mixer.arrivals.shape[1] >= k_heads
    assert mixer.arrivals.dtype == torch.int32
    out = torch.empty((num_rows, heads * dv), dtype=rows.mixed.dtype, device=rows.mixed.device)
    if num_rows == 0:
        return out
    parts = torch.empty((num_rows, heads * dv), dtype=torch.float32, device=out.device)
    width = triton.next_power_of_2(dv)
    values = min(VALUES, width)
    _delta_few_kernel[(heads * (width // values), num_rows)](
        *(rows.mixed, rows.gate, rows.beta, rows.decay, out, parts, mixer.arrivals),
        *(slots.tails, slots.states, slots.slot_in, slots.slot_out),
        *(mixer.conv.taps, mixer.a_log, mixer.dt_bias, mixer.norm),
        *(part.stride(0) for part in (rows.mixed, rows.gate, rows.beta, rows.decay, slots.tails, slots.states)),
        *(mixer.norm_eps, mixer.lower_bound),
        K_HEADS=k_heads,
        REPEATS=heads // k_heads,
        HEADS_PADDED=triton.next_power_of_2(heads // k_heads),
        DK=dk,
        DV=dv,
        BK=triton.next_power_of_2(dk),
        BV=width,
        VALUES=values,
        TAPS=mixer.conv.taps.shape[0],
        DECAY=mixer.decay.value,
        SIGMOID=mixer.gate is OutputGate.SIGMOID,
        LEAST=MIN_LOG_DECAY,
        EPS=UNIT_EPS,
        **chained(),
        num_warps=2,
    )
    return out
