"""The fused decode of delta-rule mixers: against float64, and what it leaves alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.delta_mixer import DecayKind, DeltaMixer, OutputGate, ProjectedRows, delta_decode_reference, no_arrivals
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_delta_decode import DeltaDecodeTiles, delta_decode
from kernels.triton_delta_few import delta_few
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, randn, relative_error
from tests.kernels.gpu.slots import F32, conv_weights, copy_of, make_slots, same_bytes

TAPS = 4
SHAPES = [(2, 4, 16, 32), (1, 3, 12, 20)] if INTERPRETED else [(16, 32, 128, 128), (2, 4, 64, 64), (1, 3, 12, 20)]
STEPS = [delta_few, delta_decode, *(partial(delta_decode, tiles=DeltaDecodeTiles(*t)) for t in ((16, 4), (128, 8)))]


def make(num_rows, k_heads, heads, dk, dv, decay=DecayKind.HEAD_SOFTPLUS, gate=OutputGate.SILU, seed=0):
    channels = 2 * k_heads * dk + heads * dv
    per_channel = decay is not DecayKind.HEAD_SOFTPLUS
    decay_width = heads * dk if per_channel else heads
    widths = (channels, heads * dv, heads, decay_width)
    parts = randn(num_rows, sum(widths) + 5, seed=seed).split((*widths, 5), 1)
    mixer = DeltaMixer(
        conv=conv_weights(TAPS, channels, bias=False, seed=seed + 1),
        a_log=randn(heads, seed=seed + 3, dtype=F32),
        dt_bias=randn(decay_width, seed=seed + 4, dtype=F32),
        norm=randn(dv, seed=seed + 5, dtype=F32),
        norm_eps=1e-6,
        decay=decay,
        lower_bound=-5.0,
        gate=gate,
        arrivals=no_arrivals(heads, torch.device(DEVICE)),
    )
    return ProjectedRows(*parts[:4]), mixer


def compare(rows, mixer, slots, step=delta_decode):
    expected_slots = copy_of(slots)
    expected = delta_decode_reference(rows, mixer, expected_slots)
    out = step(rows, mixer, slots)
    written = slots.slot_out
    assert relative_error(out, expected) < 6e-3, "the convolution's output and the result are bfloat16"
    assert relative_error(slots.states[written], expected_slots.states[written]) < 6e-3
    assert same_bytes(slots.tails, expected_slots.tails)
    others = torch.ones(slots.states.shape[0], dtype=torch.bool)
    others[written.cpu()] = False
    assert same_bytes(slots.states[others], expected_slots.states[others])


@pytest.mark.parametrize(("k_heads", "heads", "dk", "dv"), SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_head_decay_equals_float64(k_heads, heads, dk, dv, step):
    rows, mixer = make(3, k_heads, heads, dk, dv)
    channels = rows.mixed.shape[1]
    compare(rows, mixer, make_slots([4, 1, 0], [4, 2, 0], (TAPS - 1, channels), (heads, dk, dv), seed=7), step)


@pytest.mark.parametrize(("k_heads", "heads", "dk", "dv"), SHAPES)
def test_rows_of_few_give_their_own_bytes_and_leave_no_arrivals(k_heads, heads, dk, dv):
    rows, mixer = make(3, k_heads, heads, dk, dv)
    slots = make_slots([4, 1, 0], [4, 2, 0], (TAPS - 1, rows.mixed.shape[1]), (heads, dk, dv), seed=7)
    alone, whole = copy_of(slots), delta_few(rows, mixer, slots)
    for r in range(3):
        row = ProjectedRows(*(part[r : r + 1] for part in (rows.mixed, rows.gate, rows.beta, rows.decay)))
        own = RecurrentSlots(alone.tails, alone.states, alone.slot_in[r : r + 1], alone.slot_out[r : r + 1])
        assert torch.equal(delta_few(row, mixer, own), whole[r : r + 1])
    assert same_bytes(alone.states, slots.states)
    assert same_bytes(alone.tails, slots.tails)
    assert not mixer.arrivals.any()


@pytest.mark.parametrize("decay", [DecayKind.CHANNEL_SOFTPLUS, DecayKind.CHANNEL_BOUNDED])
@pytest.mark.parametrize("step", STEPS)
def test_channel_decay_equals_float64(decay, step):
    heads, dk, dv = (2, 16, 16) if INTERPRETED else (64, 128, 128)
    rows, mixer = make(2, heads, heads, dk, dv, decay, OutputGate.SIGMOID, seed=20)
    slots = make_slots([1, 3], [1, 0], (TAPS - 1, rows.mixed.shape[1]), (heads, dk, dv), seed=9)
    compare(rows, mixer, slots, step)


def test_a_row_alone_gives_the_bytes_it_gives_in_a_batch():
    heads, dk, dv = (2, 16, 16) if INTERPRETED else (8, 128, 128)
    rows, mixer = make(4, heads, heads, dk, dv, seed=30)
    slots = make_slots([3, 2, 1, 0], [3, 2, 1, 0], (TAPS - 1, rows.mixed.shape[1]), (heads, dk, dv), seed=5)
    alone = copy_of(slots)
    out = delta_decode(rows, mixer, slots)
    for r in range(4):
        row = ProjectedRows(*(part[r : r + 1] for part in (rows.mixed, rows.gate, rows.beta, rows.decay)))
        own = type(slots)(alone.tails, alone.states, slots.slot_in[r : r + 1], slots.slot_out[r : r + 1])
        assert same_bytes(delta_decode(row, mixer, own)[0], out[r])
    assert same_bytes(alone.states, slots.states)
    assert same_bytes(alone.tails, slots.tails)


def test_a_decay_that_underflows_forgets_even_a_huge_state():
    rows, mixer = make(1, 2, 2, 16, 16, seed=40)
    slots = make_slots([0], [0], (TAPS - 1, rows.mixed.shape[1]), (2, 16, 16), seed=3)
    slots.states[0] *= 1e30
    strong = replace(mixer, a_log=mixer.a_log * 0 + 20, lower_bound=0.0)
    compare(rows, strong, slots)
    assert slots.states[0].abs().max() < 100


def test_no_rows_are_no_launch():
    rows, mixer = make(1, 2, 2, 16, 16)
    slots = make_slots([0], [0], (TAPS - 1, rows.mixed.shape[1]), (2, 16, 16), seed=3)
    none = ProjectedRows(*(part[:0] for part in (rows.mixed, rows.gate, rows.beta, rows.decay)))
    empty = type(slots)(slots.tails, slots.states, slots.slot_in[:0], slots.slot_out[:0])
    assert delta_decode(none, mixer, empty).shape == (0, 32)
