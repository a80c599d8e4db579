"""GDN and KDA over chunks: against the recurrence in float64, at any length and strength of decay."""

import pytest
import torch

from kernels.delta_mixer import DecayKind, DeltaMixer, OutputGate, ProjectedRows, delta_chunk_reference, no_arrivals
from kernels.delta_rule import INNER
from kernels.triton_delta_chunk import delta_chunk
from kernels.triton_delta_scan import ScanTiles
from tests.kernels.gpu.fractions import some
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, randn, relative_error
from tests.kernels.gpu.slots import F32, conv_weights, copy_of, make_slots, same_bytes

HEAD, SOFTPLUS, BOUNDED = DecayKind.HEAD_SOFTPLUS, DecayKind.CHANNEL_SOFTPLUS, DecayKind.CHANNEL_BOUNDED
LENGTHS = [1, INNER - 1, INNER, INNER + 1, 2 * INNER + 5] + ([] if INTERPRETED else [700, 4096])
SHAPES = [(1, 2, 16, 32), (1, 1, 32, 16)] if INTERPRETED else [(2, 4, 128, 128), (1, 2, 64, 32), (1, 3, 16, 256)]


def make(num_rows, k_heads, heads, dk, dv, decay=HEAD, *, seed=0, rate=0.0):
    channels = 2 * k_heads * dk + heads * dv
    width = heads if decay is HEAD else heads * dk
    mixed, beta, f, _ = randn(num_rows, channels + heads + width + 3, seed=seed).split((channels, heads, width, 3), 1)
    mixer = DeltaMixer(
        conv=conv_weights(2, channels, bias=False, seed=seed),
        a_log=randn(heads, seed=seed + 1, dtype=F32) * 0.3 + rate,
        dt_bias=randn(width, seed=seed + 2, dtype=F32),
        norm=randn(dv, seed=seed, dtype=F32),
        norm_eps=1e-6,
        decay=decay,
        lower_bound=-5.0,
        gate=OutputGate.SILU,
        arrivals=no_arrivals(heads, torch.device(DEVICE)),
    )
    slots = make_slots([1], [0], (1, channels), (heads, dk, dv), seed=seed + 3)
    return ProjectedRows(mixed.contiguous(), mixed, beta, f), mixer, slots


def compare(rows, mixer, slots, most=8e-3, **options):
    want = delta_chunk_reference(rows, mixer, slots.states[slots.slot_in[0]].clone())
    before = copy_of(slots)
    out = delta_chunk(rows, mixer, slots, **options)
    assert relative_error(out, want.out) < most
    assert relative_error(slots.states[slots.slot_out[0]], want.state[-1]) < most
    assert same_bytes(slots.tails, before.tails)
    assert same_bytes(slots.states[2], before.states[2])
    return out


@pytest.mark.parametrize("num_rows", some(LENGTHS, 3))
@pytest.mark.parametrize(("k_heads", "heads", "dk", "dv"), SHAPES)
@pytest.mark.parametrize("rate", some([-5.0, 0.0, 4.0], 2))
def test_head_decay_equals_the_recurrence(num_rows, k_heads, heads, dk, dv, rate):
    compare(*make(num_rows, k_heads, heads, dk, dv, rate=rate, seed=num_rows))


@pytest.mark.parametrize("num_rows", some(LENGTHS[2:], 2))
@pytest.mark.parametrize("decay", [SOFTPLUS, BOUNDED])
@pytest.mark.parametrize("rate", some([-5.0, 0.0, 4.0], 2))
def test_channel_decay_equals_the_recurrence(num_rows, decay, rate):
    heads, dk, dv = (1, 16, 16) if INTERPRETED else (3, 128, 128)
    compare(*make(num_rows, heads, heads, dk, dv, decay, rate=rate, seed=num_rows))


@pytest.mark.parametrize("decay", [HEAD, SOFTPLUS])
def test_pieces_carry_the_state_on_in_one_slot(decay):
    rows, mixer, slots = make(2 * INNER + 9, 2, 2, 16, 16, decay, seed=1)
    own = type(slots)(slots.tails, slots.states, slots.slot_in, slots.slot_in)
    want = delta_chunk_reference(rows, mixer, slots.states[1].clone())
    outs = []
    for first, end in ((0, 20), (20, 21), (21, 21), (21, 2 * INNER + 9)):
        piece = ProjectedRows(*(x[first:end] for x in (rows.mixed, rows.gate, rows.beta, rows.decay)))
        outs.append(delta_chunk(piece, mixer, own))
    assert relative_error(torch.cat(outs), want.out) < 8e-3
    assert relative_error(own.states[1], want.state[-1]) < 8e-3


@pytest.mark.parametrize("decay", [HEAD, SOFTPLUS])
def test_no_decay_equal_keys_and_full_beta_stay_exact(decay):
    """Every row overwrites the one before it: powers of the triangular system would overflow here."""
    rows, mixer, slots = make(2 * INNER, 1, 1, 16, 16, decay, seed=2, rate=-30.0)
    rows.mixed[:, 16:32] = rows.mixed[:1, 16:32].clone()
    rows.beta.fill_(30.0)
    compare(rows, mixer, slots)


@pytest.mark.parametrize("decay", [HEAD, SOFTPLUS])
def test_a_decay_that_underflows_forgets_and_nothing_else(decay):
    rows, mixer, slots = make(INNER + 20, 1, 1, 16, 16, decay, seed=3, rate=-4.0)
    rows.decay[50] = 30000.0
    compare(rows, mixer, slots)


def test_the_scans_cut_changes_no_byte_of_a_head():
    rows, mixer, slots = make(INNER + 3, 1, 2, 16, 64, seed=4)
    again = copy_of(slots)
    out = delta_chunk(rows, mixer, slots, tiles=ScanTiles(64, 4, 2))
    split = delta_chunk(rows, mixer, again, tiles=ScanTiles(32, 4, 2))
    assert relative_error(split, out) < 1e-3


def test_equal_rows_and_state_give_equal_bytes():
    rows, mixer, slots = make(INNER + 3, 1, 2, 16, 32, seed=5)
    again = copy_of(slots)
    shifted = ProjectedRows(*(torch.cat((x[:3], x))[3:] for x in (rows.mixed, rows.gate, rows.beta, rows.decay)))
    assert same_bytes(delta_chunk(rows, mixer, slots), delta_chunk(shifted, mixer, again))
    assert same_bytes(slots.states[0], again.states[0])


def test_no_rows_move_the_state_as_it_is():
    rows, mixer, slots = make(1, 1, 1, 16, 16, seed=6)
    none = ProjectedRows(*(x[:0] for x in (rows.mixed, rows.gate, rows.beta, rows.decay)))
    assert delta_chunk(none, mixer, slots).shape == (0, 1, 16)
    assert same_bytes(slots.states[0], slots.states[1])


@pytest.mark.skipif(INTERPRETED, reason="streams are of a card")
@pytest.mark.parametrize("decay", [HEAD, BOUNDED])
@pytest.mark.parametrize("dim", [64, 128])
def test_pieces_beside_each_other_change_no_byte(decay, dim):
    rows, mixer, slots = make(140 * INNER + 7, 2, 2, dim, dim, decay, seed=7)
    again = copy_of(slots)
    whole = delta_chunk(rows, mixer, slots, pieces=1)
    assert same_bytes(delta_chunk(rows, mixer, again, pieces=2), whole)
    assert same_bytes(slots.states, again.states)
