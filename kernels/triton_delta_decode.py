"""A decode row of a delta-rule mixer in one kernel: convolution, gates, normalising, recurrence, gated output norm.

All that lies between the input projection and the output projection of GDN and KDA (kernels/delta_mixer.py spells it
out and has the reference). A program has one row and one key head with all
value heads that share it, so that every channel of the convolution's tail has one reader and writer and can be moved
on in place. The state is read once and written once, which is all that bounds the time: 2 x 4 x Hv dk dv bytes a row.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalOperand=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.delta_mixer import DeltaMixer, OutputGate, ProjectedRows
from kernels.delta_rule import MIN_LOG_DECAY, UNIT_EPS
from kernels.recurrent_slots import RecurrentSlots


@dataclass(frozen=True, slots=True)
class DeltaDecodeTiles:
    """How a launch is cut."""

    values: int  # value channels of a state that a program takes at once, a power of two
    num_warps: int
    num_stages: int  # pieces of state in flight


@triton.jit
def softplus(x):
    """log(1 + e^x), for any x."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _window(x_ptr, tail_ptr, at, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """The convolution's inputs at channels `at`, oldest first: [ROWS, channels], rows past TAPS 0."""
    age = tl.arange(0, ROWS)[:, None]
    old = tl.load(tail_ptr + age * CHANNELS + at[None, :], mask=(age < TAPS - 1) & inside[None, :], other=0.0)
    new = tl.load(x_ptr + age * 0 + at[None, :], mask=(age == TAPS - 1) & inside[None, :], other=0.0)
    return tl.where(age == TAPS - 1, new, old)


@triton.jit
def _convolve(window, taps_ptr, at, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """SiLU of the convolution, rounded as a chunk's convolution rounds it, in float32."""
    age = tl.arange(0, ROWS)[:, None]
    taps = tl.load(taps_ptr + age * CHANNELS + at[None, :], mask=(age < TAPS) & inside[None, :], other=0.0)
    acc = tl.sum(window.to(tl.float32) * taps, 0)
    return (acc * tl.sigmoid(acc)).to(window.dtype).to(tl.float32)


@triton.jit
def _move_tail(window, tail_ptr, at, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Writes the tail after the row."""
    age = tl.arange(0, ROWS)[:, None]
    tl.store(tail_ptr + (age - 1) * CHANNELS + at[None, :], window, mask=(age > 0) & (age < TAPS) & inside[None, :])


@triton.jit
def _delta_decode_kernel(
    mixed_ptr,
    gate_ptr,
    beta_ptr,
    decay_ptr,
    out_ptr,  # [rows, HEADS * DV]
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
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,  # DK and DV, padded to powers of two
    BV: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,  # TAPS, padded
    DECAY: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST: tl.constexpr,
    EPS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # REPEATS, padded
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    k_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = K_HEADS * REPEATS
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + HEADS * DV
    TILES: tl.constexpr = BV // TILE  # of a head's state, by value channels
    source = tl.load(slot_in_ptr + row)
    target = tl.load(slot_out_ptr + row)
    x_ptr = mixed_ptr + row * mixed_stride
    tail_ptr = tails_ptr + source * tail_stride
    target_ptr = tails_ptr + target * tail_stride
    keys = tl.arange(0, BK)
    in_keys = keys < DK
    q_at = k_head * DK + keys
    k_at = (K_HEADS + k_head) * DK + keys
    # The values of all heads that share the key head, each padded to BV channels.
    flat = tl.arange(0, HEADS_PADDED * BV)
    in_values = (flat // BV < REPEATS) & (flat % BV < DV)
    value_of = (k_head * REPEATS + flat // BV) * DV + flat % BV
    v_at = 2 * K_HEADS * DK + value_of

    q_window = _window(x_ptr, tail_ptr, q_at, in_keys, CHANNELS, TAPS, ROWS)
    k_window = _window(x_ptr, tail_ptr, k_at, in_keys, CHANNELS, TAPS, ROWS)
    v_window = _window(x_ptr, tail_ptr, v_at, in_values, CHANNELS, TAPS, ROWS)
    q = _convolve(q_window, taps_ptr, q_at, in_keys, CHANNELS, TAPS, ROWS)
    k = _convolve(k_window, taps_ptr, k_at, in_keys, CHANNELS, TAPS, ROWS)
    v = _convolve(v_window, taps_ptr, v_at, in_values, CHANNELS, TAPS, ROWS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (DK**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    qk = tl.sum(q * k, 0)

    repeat = tl.arange(0, HEADS_PADDED)
    is_head = repeat < REPEATS
    heads = k_head * REPEATS + repeat
    beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + heads, mask=is_head, other=0.0).to(tl.float32))
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=is_head, other=0.0))
    if DECAY == 0:
        f = tl.load(decay_ptr + row * decay_stride + heads, mask=is_head, other=0.0).to(tl.float32)
        raised = f + tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0)
        keep = tl.exp(tl.maximum(-rate * softplus(raised), LEAST))
    else:  # one head
        f = tl.load(decay_ptr + row * decay_stride + k_head * DK + keys, mask=in_keys, other=0.0).to(tl.float32)
        raised = f + tl.load(dt_bias_ptr + k_head * DK + keys, mask=in_keys, other=0.0)
        if DECAY == 1:
            log_decay = -tl.sum(rate, 0) * softplus(raised)
        else:
            log_decay = lower_bound * tl.sigmoid(tl.sum(rate, 0) * raised)
        keep = tl.exp(tl.maximum(log_decay, LEAST))

    v = tl.reshape(v, (HEADS_PADDED * TILES, TILE))
    outs = tl.zeros((HEADS_PADDED * TILES, TILE), tl.float32)
    tiles = tl.arange(0, HEADS_PADDED * TILES)
    for tile in tl.range(0, REPEATS * TILES, num_stages=STAGES):
        is_tile = (tiles == tile)[:, None]
        values = (tile % TILES) * TILE + tl.arange(0, TILE)
        at = (k_head * REPEATS + tile // TILES) * (DK * DV) + keys[:, None] * DV + values[None, :]
        held = in_keys[:, None] & (values < DV)[None, :]
        state = tl.load(states_ptr + source * state_stride + at, mask=held, other=0.0)
        if DECAY == 0:
            state *= tl.sum(tl.where(repeat == tile // TILES, keep, 0.0), 0)
        else:
            state *= keep[:, None]
        delta = tl.sum(tl.where(is_tile, v, 0.0), 0) - tl.sum(k[:, None] * state, 0)
        delta *= tl.sum(tl.where(repeat == tile // TILES, beta, 0.0), 0)
        out = tl.sum(q[:, None] * state, 0) + qk * delta
        tl.store(states_ptr + target * state_stride + at, state + k[:, None] * delta[None, :], mask=held)
        outs = tl.where(is_tile, out[None, :], outs)

    tl.debug_barrier()  # threads may hold copies of a value: all have read the old tail before it is written
    _move_tail(q_window, target_ptr, q_at, in_keys, CHANNELS, TAPS, ROWS)
    _move_tail(k_window, target_ptr, k_at, in_keys, CHANNELS, TAPS, ROWS)
    _move_tail(v_window, target_ptr, v_at, in_values, CHANNELS, TAPS, ROWS)

    values = tl.arange(0, BV)[None, :]
    held = is_head[:, None] & (values < DV)
    at = heads[:, None] * DV + values
    outs = tl.reshape(outs, (HEADS_PADDED, BV))
    outs *= tl.rsqrt(tl.sum(outs * outs, 1) / DV + norm_eps)[:, None]
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=held, other=0.0).to(tl.float32)
    shut = tl.sigmoid(gate)
    if not SIGMOID:
        shut *= gate
    outs *= tl.load(norm_ptr + values, mask=values < DV, other=0.0) * shut
    tl.store(out_ptr + row * (HEADS * DV) + at, outs.to(out_ptr.dtype.element_ty), mask=held)


def delta_decode(
    rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots, *, tiles: DeltaDecodeTiles | None = None
) -> torch.Tensor:
    """One row of each of several sequences; reads and writes their slots. Returns [rows, Hv dv] as `mixed`'s dtype."""
    num_rows, channels = rows.mixed.shape
    heads, dk, dv = slots.states.shape[1:]
    taps = mixer.conv.taps.shape[0]
    k_heads = (channels - heads * dv) // (2 * dk)
    slots.check(num_rows)
    assert channels == 2 * k_heads * dk + heads * dv
    assert heads % k_heads == 0, f"{k_heads} key heads do not divide {heads} value heads"
    assert not mixer.per_channel or k_heads == heads, "a decay a channel has a key head for every value head"
    assert slots.tails.shape[1:] == (taps - 1, channels)
    assert slots.tails.dtype == rows.mixed.dtype
    assert mixer.conv.taps.shape == (taps, channels)
    assert mixer.conv.taps.is_contiguous()
    assert mixer.conv.silu
    assert mixer.conv.bias is None
    assert mixer.a_log.shape == (heads,)
    assert mixer.dt_bias.shape == ((heads * dk,) if mixer.per_channel else (heads,))
    assert mixer.norm.shape == (dv,)
    assert mixer.a_log.dtype == mixer.dt_bias.dtype == mixer.norm.dtype == mixer.conv.taps.dtype == torch.float32
    assert rows.gate.shape == (num_rows, heads * dv)
    assert rows.beta.shape == (num_rows, heads)
    assert rows.decay.shape == (num_rows, mixer.dt_bias.shape[0])
    for part in (rows.mixed, rows.gate, rows.beta, rows.decay):
        assert part.stride(1) == 1, "columns are side by side"
    out = torch.empty((num_rows, heads * dv), dtype=rows.mixed.dtype, device=rows.mixed.device)
    if num_rows == 0:
        return out
    tiles = tiles or DeltaDecodeTiles(values=32, num_warps=4, num_stages=3)
    _delta_decode_kernel[(k_heads, num_rows)](
        rows.mixed,
        rows.gate,
        rows.beta,
        rows.decay,
        out,
        slots.tails,
        slots.states,
        slots.slot_in,
        slots.slot_out,
        mixer.conv.taps,
        mixer.a_log,
        mixer.dt_bias,
        mixer.norm,
        rows.mixed.stride(0),
        rows.gate.stride(0),
        rows.beta.stride(0),
        rows.decay.stride(0),
        slots.tails.stride(0),
        slots.states.stride(0),
        mixer.norm_eps,
        mixer.lower_bound,
        K_HEADS=k_heads,
        REPEATS=heads // k_heads,
        DK=dk,
        DV=dv,
        BK=triton.next_power_of_2(dk),
        BV=triton.next_power_of_2(dv),
        TAPS=taps,
        ROWS=triton.next_power_of_2(taps),
        DECAY=mixer.decay.value,
        SIGMOID=mixer.gate is OutputGate.SIGMOID,
        LEAST=MIN_LOG_DECAY,
        EPS=UNIT_EPS,
        HEADS_PADDED=triton.next_power_of_2(heads // k_heads),
        TILE=min(tiles.values, triton.next_power_of_2(dv)),
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return out
