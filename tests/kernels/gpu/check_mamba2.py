"""Mamba2 over slots, and hyper-connections: against float64."""

import pytest
import torch

from kernels import hyper_connections
from kernels.delta_rule import INNER
from kernels.hyper_connections import HyperRule, HyperWeights
from kernels.mamba2 import Mamba2Rows, Mamba2Weights, mamba2_reference
from kernels.triton_hyper_connections import SUM_TILES, inject, mix_streams
from kernels.triton_mamba2 import mamba2_chunk, mamba2_step
from tests.kernels.gpu.paged import INTERPRETED, randn, relative_error
from tests.kernels.gpu.slots import F32, copy_of, make_slots, same_bytes

HEADS, GROUPS, N, P = (4, 2, 32, 16) if INTERPRETED else (16, 2, 128, 64)
LENGTHS = [1, INNER - 1, INNER, INNER + 1, 2 * INNER + 7] + ([] if INTERPRETED else [1000, 4096])


def make(num_rows, slot_in, slot_out, *, seed=0, rate=0.0):
    widths = (HEADS * P, GROUPS * N, GROUPS * N)
    x, b, c = randn(num_rows, sum(widths), seed=seed).split(widths, 1)
    rows = Mamba2Rows(
        x.unflatten(1, (HEADS, P)),
        randn(num_rows, HEADS + 3, seed=seed + 1)[:, :HEADS],
        b.unflatten(1, (GROUPS, N)),
        c.unflatten(1, (GROUPS, N)),
    )
    weights = Mamba2Weights(
        a=-(randn(HEADS, seed=seed + 2, dtype=F32) * 0.5 + rate).exp(),
        d=randn(HEADS, seed=seed + 3, dtype=F32),
        dt_bias=randn(HEADS, seed=seed + 4, dtype=F32),
        time_step_min=0.01,
    )
    return rows, weights, make_slots(slot_in, slot_out, (1, 8), (HEADS, N, P), seed=seed + 5)


def exact(rows, weights, state):
    a, d, dt_bias = (w.double() for w in (weights.a, weights.d, weights.dt_bias))
    return mamba2_reference(rows, Mamba2Weights(a, d, dt_bias, weights.time_step_min), state.double())


@pytest.mark.parametrize("num_rows", LENGTHS)
@pytest.mark.parametrize("rate", [-5.0, 0.0, 5.0])
def test_chunks_equal_the_recurrence(num_rows, rate):
    rows, weights, slots = make(num_rows, [1], [0], seed=num_rows, rate=rate)
    want = exact(rows, weights, slots.states[1])
    out = mamba2_chunk(rows, weights, slots)
    assert relative_error(out, want.out) < 6e-3
    assert relative_error(slots.states[0], want.state[-1]) < 6e-3


def test_pieces_carry_the_state_on_in_one_slot():
    rows, weights, slots = make(INNER + 9, [1], [1], seed=3)
    want = exact(rows, weights, slots.states[1])
    outs = []
    for first, end in ((0, 20), (20, 20), (20, INNER + 9)):
        piece = Mamba2Rows(*(x[first:end] for x in (rows.x, rows.dt, rows.b, rows.c)))
        outs.append(mamba2_chunk(piece, weights, slots))
    assert relative_error(torch.cat(outs), want.out) < 6e-3
    assert relative_error(slots.states[1], want.state[-1]) < 6e-3


def test_steps_equal_the_recurrence_and_touch_no_other_slot():
    rows, weights, slots = make(3, [2, 0, 4], [2, 1, 4], seed=4)
    before = copy_of(slots)
    out = mamba2_step(rows, weights, slots)
    for r, (source, target) in enumerate([(2, 2), (0, 1), (4, 4)]):
        row = Mamba2Rows(*(x[r : r + 1] for x in (rows.x, rows.dt, rows.b, rows.c)))
        want = exact(row, weights, before.states[source])
        assert relative_error(out[r], want.out[0]) < 4e-3
        assert relative_error(slots.states[target], want.state[0]) < 1e-5
    assert same_bytes(slots.states[[0, 3, 5]], before.states[[0, 3, 5]])


@pytest.mark.parametrize(
    ("num_rows", "width"), [(1, 48), (3, 640), (SUM_TILES.rows + 1, 32), *([] if INTERPRETED else [(70, 6144)])]
)
def test_hyper_connections_equal_float64(num_rows, width):
    n = 4
    mixes = (2 + n) * n
    streams, output = randn(num_rows, n, width, seed=5), randn(num_rows, width, seed=6)
    weights = HyperWeights(
        fn=randn(mixes, n * width, seed=7),
        base=randn(mixes, seed=8, dtype=F32),
        scale=randn(3, seed=9, dtype=F32).abs(),
    )
    rule = HyperRule(norm_eps=1e-6, eps=1e-4, iterations=20)
    want = hyper_connections.mix_streams(streams.float(), weights, rule)
    got = mix_streams(streams, weights, rule)
    assert relative_error(got.collapsed, want.collapsed) < 4e-3
    assert relative_error(got.post, want.post) < 1e-3
    assert relative_error(got.comb, want.comb) < 1e-3
    spread = want.post[:, :, None] * output[:, None, :] + want.comb.transpose(1, 2) @ streams.float()
    assert relative_error(inject(output, streams, got), spread) < 4e-3
