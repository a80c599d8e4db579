"""A decode row of a delta-rule mixer in one kernel: convolution, gates, normalising, recurrence, gated output norm.

All that lies between the input projection and the output projection of GDN and KDA (kernels/delta_mixer.py spells it
out and has the reference). A program has one row and one key head with all
value heads that share it, so that every channel of the convolution's tail has one reader and writer and can be moved
on in place. The state is read once and written once, which is all that bounds the time: 2 x 4 x Hv dk dv bytes a row.
While a tile of it is worked on, the next one is on its way.
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
    num_warps: int = 4


HEAD_TILES = DeltaDecodeTiles(values=64)  # a decay a head
CHANNEL_TILES = DeltaDecodeTiles(values=32)


@triton.jit
def softplus(x):
    """log(1 + e^x), for any x."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _load_inputs(x_ptr, tail_ptr, taps_ptr, at, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """The convolution's inputs at channels `at`, oldest first, and what multiplies them: a tuple of vectors each."""
    inputs = ()
    taps = ()
    for j in tl.static_range(TAPS - 1):
        inputs += (tl.load(tail_ptr + j * CHANNELS + at, mask=inside, other=0.0),)
    inputs += (tl.load(x_ptr + at, mask=inside, other=0.0),)
    for j in tl.static_range(TAPS):
        taps += (tl.load(taps_ptr + j * CHANNELS + at, mask=inside, other=0.0),)
    return inputs, taps


@triton.jit
def convolve(inputs, taps, TAPS: tl.constexpr):
    """SiLU of the convolution, rounded as a chunk's convolution rounds it, in float32."""
    acc = inputs[0].to(tl.float32) * taps[0]
    for j in tl.static_range(1, TAPS):
        acc += inputs[j].to(tl.float32) * taps[j]
    return (acc * tl.sigmoid(acc)).to(inputs[0].dtype).to(tl.float32)


@triton.jit
def move_tail(inputs, tail_ptr, at, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Writes the tail after the row."""
    for j in tl.static_range(1, TAPS):
        tl.store(tail_ptr + (j - 1) * CHANNELS + at, inputs[j], mask=inside)


@triton.jit
def _load_state(ptr, tile, keys, DK: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    values = (tile % TILES) * TILE + tl.arange(0, TILE)
    at = (tile // TILES) * (DK * DV) + keys[:, None] * DV + values[None, :]
    return tl.load(ptr + at, mask=(keys < DK)[:, None] & (values < DV)[None, :], other=0.0)


@triton.jit
def add_pairs(a_0, a_1, b_0, b_1):
    return a_0 + b_0, a_1 + b_1


@triton.jit
def add_triples(a_0, a_1, a_2, b_0, b_1, b_2):
    return a_0 + b_0, a_1 + b_1, a_2 + b_2


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
    DECAY: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST: tl.constexpr,
    EPS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # REPEATS, padded
    TILE: tl.constexpr,
):
    k_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = K_HEADS * REPEATS
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + HEADS * DV
    TILES: tl.constexpr = BV // TILE  # of a head's state, by value channels
    first_head = k_head * REPEATS
    source = tl.load(slot_in_ptr + row)
    target = tl.load(slot_out_ptr + row)
    x_ptr = mixed_ptr + row * mixed_stride
    tail_ptr = tails_ptr + source * tail_stride
    target_ptr = tails_ptr + target * tail_stride
    from_ptr = states_ptr + source * state_stride + first_head * (DK * DV)
    to_ptr = states_ptr + target * state_stride + first_head * (DK * DV)
    keys = tl.arange(0, BK)
    in_keys = keys < DK
    q_at = k_head * DK + keys
    k_at = (K_HEADS + k_head) * DK + keys
    # The values of all heads that share the key head, each padded to BV channels.
    flat = tl.arange(0, HEADS_PADDED * BV)
    in_values = (flat // BV < REPEATS) & (flat % BV < DV)
    v_at = 2 * K_HEADS * DK + (first_head + flat // BV) * DV + flat % BV
    repeat = tl.arange(0, HEADS_PADDED)
    is_head = repeat < REPEATS
    heads = first_head + repeat
    values = tl.arange(0, BV)[None, :]
    out_held = is_head[:, None] & (values < DV)
    out_at = heads[:, None] * DV + values

    # All that is read but the state's later tiles, before anything waits for any of it.
    k_inputs, k_taps = _load_inputs(x_ptr, tail_ptr, taps_ptr, k_at, in_keys, CHANNELS, TAPS)
    q_inputs, q_taps = _load_inputs(x_ptr, tail_ptr, taps_ptr, q_at, in_keys, CHANNELS, TAPS)
    v_inputs, v_taps = _load_inputs(x_ptr, tail_ptr, taps_ptr, v_at, in_values, CHANNELS, TAPS)
    beta = tl.load(beta_ptr + row * beta_stride + heads, mask=is_head, other=0.0)
    a_log = tl.load(a_log_ptr + heads, mask=is_head, other=0.0)
    if DECAY == 0:
        f = tl.load(decay_ptr + row * decay_stride + heads, mask=is_head, other=0.0)
        bias = tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0)
    else:  # one head
        f = tl.load(decay_ptr + row * decay_stride + k_head * DK + keys, mask=in_keys, other=0.0)
        bias = tl.load(dt_bias_ptr + k_head * DK + keys, mask=in_keys, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + out_at, mask=out_held, other=0.0)
    norm = tl.load(norm_ptr + values, mask=values < DV, other=0.0)
    next_state = _load_state(from_ptr, 0, keys, DK, DV, TILE, TILES)

    k = convolve(k_inputs, k_taps, TAPS)
    q = convolve(q_inputs, q_taps, TAPS)
    v = convolve(v_inputs, v_taps, TAPS)
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    unit_q = tl.rsqrt(qq + EPS) * (DK**-0.5)
    unit_k = tl.rsqrt(kk + EPS)
    q *= unit_q
    k *= unit_k
    qk *= unit_q * unit_k
    tl.debug_barrier()  # threads may hold copies of a value: all have read the old tail before it is written
    move_tail(q_inputs, target_ptr, q_at, in_keys, CHANNELS, TAPS)
    move_tail(k_inputs, target_ptr, k_at, in_keys, CHANNELS, TAPS)
    move_tail(v_inputs, target_ptr, v_at, in_values, CHANNELS, TAPS)
    beta = tl.sigmoid(beta.to(tl.float32))
    rate = tl.exp(a_log)
    raised = f.to(tl.float32) + bias
    if DECAY == 0:
        keep = tl.exp(tl.maximum(-rate * softplus(raised), LEAST))
    else:
        rate = tl.sum(rate, 0)
        log_decay = -rate * softplus(raised) if DECAY == 1 else lower_bound * tl.sigmoid(rate * raised)
        keep = tl.exp(tl.maximum(log_decay, LEAST))

    v = tl.reshape(v, (HEADS_PADDED * TILES, TILE))
    outs = tl.zeros((HEADS_PADDED * TILES, TILE), tl.float32)
    tiles = tl.arange(0, HEADS_PADDED * TILES)
    for tile in range(0, REPEATS * TILES):
        state = next_state
        next_state = _load_state(from_ptr, tl.minimum(tile + 1, REPEATS * TILES - 1), keys, DK, DV, TILE, TILES)
        is_tile = (tiles == tile)[:, None]
        if DECAY == 0:
            state *= tl.sum(tl.where(repeat == tile // TILES, keep, 0.0), 0)
        else:
            state *= keep[:, None]
        k_read, q_read = tl.reduce((k[:, None] * state, q[:, None] * state), 0, add_pairs)
        delta = tl.sum(tl.where(is_tile, v, 0.0), 0) - k_read
        delta *= tl.sum(tl.where(repeat == tile // TILES, beta, 0.0), 0)
        out = q_read + qk * delta
        places = (tile % TILES) * TILE + tl.arange(0, TILE)
        at = (tile // TILES) * (DK * DV) + keys[:, None] * DV + places[None, :]
        held = in_keys[:, None] & (places < DV)[None, :]
        tl.store(to_ptr + at, state + k[:, None] * delta[None, :], mask=held)
        outs = tl.where(is_tile, out[None, :], outs)

    outs = tl.reshape(outs, (HEADS_PADDED, BV))
    outs *= tl.rsqrt(tl.sum(outs * outs, 1) / DV + norm_eps)[:, None]
    gate = gate.to(tl.float32)
    shut = tl.sigmoid(gate)
    if not SIGMOID:
        shut *= gate
    outs *= norm * shut
    tl.store(out_ptr + row * (HEADS * DV) + out_at, outs.to(out_ptr.dtype.element_ty), mask=out_held)


def delta_decode(
    rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots, *, tiles: DeltaDecodeTiles | None = None
) -> torch.Tensor:
    """One row of each of several sequences; reads and writes their slots. Returns [rows, Hv dv] as `mixed`'s dtype."""
    num_rows = rows.mixed.shape[0]
    heads, dk, dv = slots.states.shape[1:]
    k_heads = check_step(rows, mixer, slots)
    out = torch.empty((num_rows, heads * dv), dtype=rows.mixed.dtype, device=rows.mixed.device)
    if num_rows == 0:
        return out
    tiles = tiles or (CHANNEL_TILES if mixer.per_channel else HEAD_TILES)
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
        TAPS=mixer.conv.taps.shape[0],
        DECAY=mixer.decay.value,
        SIGMOID=mixer.gate is OutputGate.SIGMOID,
        LEAST=MIN_LOG_DECAY,
        EPS=UNIT_EPS,
        HEADS_PADDED=triton.next_power_of_2(heads // k_heads),
        TILE=min(tiles.values, triton.next_power_of_2(dv)),
        num_warps=tiles.num_warps,
    )
    return out


def check_step(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> int:
    """Asserts that shapes, dtypes and strides of a step fit together; returns the number of key heads."""
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
    return k_heads
