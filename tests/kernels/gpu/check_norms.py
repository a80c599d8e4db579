"""Norms and the convolution over slots, against float64."""

import pytest
import torch

from kernels import gated_norm
from kernels.causal_conv import causal_conv_reference
from kernels.triton_activate import gate_heads
from kernels.triton_causal_conv import CHUNK_TILES, causal_conv_chunk, causal_conv_step
from kernels.triton_norms import (
    add_rms_norm,
    gated_group_rms_norm,
    rms_norm,
    rms_norm_reference,
    rms_norm_sigmoid_gate,
    rms_norm_silu_gate,
)
from tests.kernels.gpu.paged import INTERPRETED, randn, relative_error
from tests.kernels.gpu.slots import F32, conv_weights, copy_of, make_slots, same_bytes

WIDTHS = [(3, 96), (5, 64)] if INTERPRETED else [(3, 96), (700, 64), (33, 2048), (64, 4096), (7, 6144)]


@pytest.mark.parametrize(("num_rows", "width"), WIDTHS)
@pytest.mark.parametrize("cast_first", [True, False])
def test_rms_norm_of_strided_rows_equals_float64(num_rows, width, cast_first):
    x, weight = randn(num_rows, width + 8, seed=1)[:, :width], randn(width, seed=2, dtype=F32)
    got = rms_norm(x, weight, 1e-6, cast_first=cast_first)
    assert relative_error(got, rms_norm_reference(x, weight, 1e-6)) < 4e-3


@pytest.mark.parametrize(("num_rows", "width"), WIDTHS)
def test_the_sum_is_kept_and_normed_as_it_was_rounded(num_rows, width):
    hidden, addend, weight = randn(num_rows, width, seed=3), randn(num_rows, width, seed=4), randn(width, seed=5)
    expected = hidden + addend
    got = add_rms_norm(hidden, addend, weight, 1e-5, cast_first=True)
    assert same_bytes(hidden, expected)
    assert relative_error(got, rms_norm_reference(expected, weight, 1e-5)) < 4e-3


def test_heads_are_normed_in_place():
    x, weight = randn(5, 3, 64, seed=6), randn(64, seed=7, dtype=F32)
    expected = rms_norm_reference(x, weight, 1e-6)
    assert rms_norm(x, weight, 1e-6, cast_first=False, out=x).data_ptr() == x.data_ptr()
    assert relative_error(x, expected) < 4e-3


@pytest.mark.parametrize(("num_rows", "heads", "width"), [(3, 2, 20), (4, 5, 64)])
def test_gated_norms_equal_float64(num_rows, heads, width):
    x = randn(num_rows, heads, width, seed=8, dtype=F32)
    gate = randn(num_rows, heads * width + 3, seed=9)[:, : heads * width]
    weight, wide = randn(width, seed=10, dtype=F32), randn(heads * width, seed=11, dtype=F32)
    gate_heads = gate.double().unflatten(1, (heads, width))
    normed = rms_norm_reference(x, weight, 1e-6)
    shut = torch.sigmoid(gate_heads)
    assert relative_error(rms_norm_silu_gate(x, gate, weight, 1e-6), normed * gate_heads * shut) < 4e-3
    assert relative_error(rms_norm_sigmoid_gate(x, gate, weight, 1e-6), normed * shut) < 4e-3
    got = gated_group_rms_norm(x.flatten(1), gate, wide, num_groups=heads, eps=1e-6)
    gated = x.double() * gate_heads * shut
    assert relative_error(got, rms_norm_reference(gated, torch.ones_like(weight), 1e-6).flatten(1) * wide) < 4e-3
    torch_form = gated_norm.gated_group_rms_norm(x.flatten(1), gate, wide, num_groups=heads, eps=1e-6)
    assert relative_error(got, torch_form) < 4e-3


def test_heads_are_gated_by_a_sigmoid():
    x, wide = randn(3, 5, 16, seed=18), randn(3, 10, 16, seed=19)
    gate = wide[:, 1::2]  # every other head
    assert relative_error(gate_heads(x, gate), (x.double() * gate.double().sigmoid()).flatten(1)) < 4e-3


@pytest.mark.parametrize("num_rows", [1, 2, 3, CHUNK_TILES.rows, CHUNK_TILES.rows + 1, 3 * CHUNK_TILES.rows - 1])
@pytest.mark.parametrize(("taps", "bias"), [(4, True), (3, False)])
@pytest.mark.parametrize("slot_out", [0, 1])
def test_chunks_carry_the_tail_from_slot_to_slot(num_rows, taps, bias, slot_out):
    channels = 40 if INTERPRETED else 8192 + 40
    weights = conv_weights(taps, channels, bias=bias, seed=12)
    slots = make_slots([0], [slot_out], (taps - 1, channels), (1, 1, 1), seed=13)
    before = copy_of(slots)
    x = randn(num_rows, channels + 7, seed=14)[:, :channels]
    got = causal_conv_chunk(x, slots.tails, slots.slot_in, slots.slot_out, weights)
    want = causal_conv_reference(x.double(), before.tails[0].double(), weights)
    assert relative_error(got, want.out) < 4e-3
    assert same_bytes(slots.tails[slot_out], want.tail.bfloat16())
    assert same_bytes(slots.tails[slot_out + 1], before.tails[slot_out + 1])


def test_steps_equal_chunks_of_one_row():
    channels = 600
    weights = conv_weights(4, channels, bias=True, seed=15)
    slots = make_slots([2, 0, 3], [2, 0, 1], (3, channels), (1, 1, 1), seed=16)
    alone = copy_of(slots)
    x = randn(3, channels + 5, seed=17)[:, 5:]
    got = causal_conv_step(x, slots.tails, slots.slot_in, slots.slot_out, weights)
    for r in range(3):
        ids = slots.slot_in[r : r + 1], slots.slot_out[r : r + 1]
        want = causal_conv_chunk(x[r : r + 1], alone.tails, *ids, weights)
        assert relative_error(got[r : r + 1], want) < 1e-6
    assert same_bytes(slots.tails, alone.tails)
