"""Torch's forms over slots: the state moves between the slots that are named, and no other is touched."""

import pytest
import torch

from kernels import slot_forms
from kernels.causal_conv import ConvWeights, causal_conv_reference
from kernels.delta_mixer import (
    DecayKind,
    DeltaMixer,
    OutputGate,
    ProjectedRows,
    delta_chunk,
    delta_chunk_reference,
    delta_decode,
    delta_decode_reference,
    no_arrivals,
)
from kernels.mamba2 import Mamba2Rows, Mamba2Weights, mamba2_reference
from kernels.recurrent_slots import RecurrentSlots
from kernels.sampling import Filters, draw
from kernels.sampling_rows import SamplingRows, draw_rows

HEADS, DK, DV, TAPS = 4, 6, 10, 4


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_slots(tail_shape, state_shape, slot_in, slot_out):
    """Random state in the slots that are read; the others are NaN."""
    tails, states = torch.full((6, *tail_shape), torch.nan), torch.full((6, *state_shape), torch.nan)
    for slot in slot_in:
        tails[slot], states[slot] = randn(*tail_shape, seed=slot), randn(*state_shape, seed=slot + 50)
    return RecurrentSlots(tails, states, torch.tensor(slot_in), torch.tensor(slot_out))


def copy_of(slots):
    return RecurrentSlots(slots.tails.clone(), slots.states.clone(), slots.slot_in, slots.slot_out)


def make_mixer(decay, gate, num_rows):
    k_heads = HEADS if decay is not DecayKind.HEAD_SOFTPLUS else 2
    channels = 2 * k_heads * DK + HEADS * DV
    width = HEADS if decay is DecayKind.HEAD_SOFTPLUS else HEADS * DK
    conv = ConvWeights(randn(TAPS, channels, seed=1), None, True)
    vectors = (randn(HEADS, seed=2), randn(width, seed=3), randn(DV, seed=4))
    arrivals = no_arrivals(HEADS, torch.device("cpu"))
    mixer = DeltaMixer(conv, *vectors, 1e-6, decay, -5.0, gate, arrivals)
    widths = (channels, HEADS * DV, HEADS, width)
    return ProjectedRows(*randn(num_rows, sum(widths), seed=5).split(widths, 1)), mixer, channels


MIXERS = [
    (DecayKind.HEAD_SOFTPLUS, OutputGate.SILU),
    (DecayKind.CHANNEL_SOFTPLUS, OutputGate.SIGMOID),
    (DecayKind.CHANNEL_BOUNDED, OutputGate.SIGMOID),
]


@pytest.mark.parametrize(("decay", "gate"), MIXERS)
def test_decode_rows_equal_float64(decay, gate):
    rows, mixer, channels = make_mixer(decay, gate, 3)
    slots = make_slots((TAPS - 1, channels), (HEADS, DK, DV), [4, 0, 2], [4, 1, 2])
    exact = copy_of(slots)
    want = delta_decode_reference(rows, mixer, exact)
    torch.testing.assert_close(delta_decode(rows, mixer, slots).double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slots.states, exact.states, atol=1e-4, rtol=1e-4, equal_nan=True)
    torch.testing.assert_close(slots.tails, exact.tails, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("decay", "gate"), MIXERS)
def test_a_chunk_equals_float64_and_moves_the_state_alone(decay, gate):
    rows, mixer, channels = make_mixer(decay, gate, 70)
    slots = make_slots((TAPS - 1, channels), (HEADS, DK, DV), [3], [1])
    before = copy_of(slots)
    want = delta_chunk_reference(rows, mixer, slots.states[3])
    torch.testing.assert_close(delta_chunk(rows, mixer, slots).double(), want.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slots.states[1].double(), want.state[-1], atol=1e-4, rtol=1e-4)
    untouched = [0, 2, 3, 4, 5]
    torch.testing.assert_close(slots.states[untouched], before.states[untouched], atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(slots.tails, before.tails, atol=0, rtol=0, equal_nan=True)


def test_convolution_and_mamba2_move_their_state_from_slot_to_slot():
    weights = ConvWeights(randn(TAPS, 8, seed=6), randn(8, seed=7), True)
    gates = Mamba2Weights(-randn(4, seed=8).exp(), randn(4, seed=9), randn(4, seed=10), 0.01)
    rows = Mamba2Rows(randn(5, 4, 3, seed=11), randn(5, 4, seed=12), randn(5, 2, 6, seed=13), randn(5, 2, 6, seed=14))
    slots = make_slots((TAPS - 1, 8), (4, 6, 3), [2], [5])
    x = randn(5, 8, seed=15)
    conv = causal_conv_reference(x, slots.tails[2], weights)
    ids = slots.slot_in, slots.slot_out
    torch.testing.assert_close(slot_forms.causal_conv_chunk(x, slots.tails, *ids, weights), conv.out)
    assert torch.equal(slots.tails[5], conv.tail)
    state = mamba2_reference(rows, gates, slots.states[2])
    torch.testing.assert_close(slot_forms.mamba2_chunk(rows, gates, slots), state.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slots.states[5], state.state[-1], atol=1e-4, rtol=1e-4)
    one = Mamba2Rows(*(part[:1] for part in (rows.x, rows.dt, rows.b, rows.c)))
    torch.testing.assert_close(slot_forms.mamba2_step(one, gates, slots), state.out[:1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slots.states[5], state.state[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slot_forms.causal_conv_step(x[:1], slots.tails, *ids, weights), conv.out[:1])


def test_rows_are_drawn_as_each_alone():
    filters = [Filters(temperature=0.0), Filters(), Filters(top_k=3, top_p=0.8), Filters(min_p=0.2)]
    numbers = [0.1, 0.4, 0.6, 0.9]
    rows = SamplingRows(
        torch.tensor([f.temperature for f in filters]),
        torch.tensor([f.top_k for f in filters], dtype=torch.int32),
        torch.tensor([f.top_p for f in filters], dtype=torch.float64),
        torch.tensor([f.min_p for f in filters], dtype=torch.float64),
        torch.tensor(numbers, dtype=torch.float64),
    )
    logits = randn(4, 40, seed=16)
    assert draw_rows(logits, rows).tolist() == [draw(logits[r], filters[r], numbers[r]) for r in range(4)]
