"""Mamba2's chunk and step forms against its recurrence in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.delta_rule import INNER
from kernels.mamba2 import Mamba2Rows, Mamba2Weights, mamba2_chunk, mamba2_reference, mamba2_step, mamba2_verify

HEADS, HEAD_DIM, GROUPS, STATE = 6, 5, 2, 7

torch.set_num_threads(1)


def make_rows(num_rows: int, seed: int = 0) -> tuple[Mamba2Rows, Mamba2Weights, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    rows = Mamba2Rows(
        x=torch.randn((num_rows, HEADS, HEAD_DIM), generator=gen),
        dt=torch.randn((num_rows, HEADS), generator=gen),
        b=torch.randn((num_rows, GROUPS, STATE), generator=gen),
        c=torch.randn((num_rows, GROUPS, STATE), generator=gen),
    )
    weights = Mamba2Weights(
        a=-torch.rand(HEADS, generator=gen),
        d=torch.randn(HEADS, generator=gen),
        dt_bias=torch.randn(HEADS, generator=gen),
        time_step_min=1e-3,
    )
    return rows, weights, torch.randn((HEADS, STATE, HEAD_DIM), generator=gen)


def reference(rows: Mamba2Rows, weights: Mamba2Weights, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states after every row, float64."""
    rows = Mamba2Rows(rows.x.double(), rows.dt.double(), rows.b.double(), rows.c.double())
    weights = replace(weights, a=weights.a.double(), d=weights.d.double(), dt_bias=weights.dt_bias.double())
    result = mamba2_reference(rows, weights, state.double())
    return result.out, result.state


def part(rows: Mamba2Rows, first: int, end: int) -> Mamba2Rows:
    return Mamba2Rows(rows.x[first:end], rows.dt[first:end], rows.b[first:end], rows.c[first:end])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = max(1.0, want.abs().max().item())  # fp32 rounds against the largest term of a sum
    torch.testing.assert_close(got.double(), want, atol=2e-6 * scale, rtol=2e-5)


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 127, 200])
def test_chunk_form_equals_the_recurrence(num_rows: int) -> None:
    rows, weights, state = make_rows(num_rows)
    out, states = reference(rows, weights, state)
    got = mamba2_chunk(rows, weights, state)
    close(got.out, out)
    close(got.state, states[-1])


@given(num_rows=st.integers(1, 150), seed=st.integers(0, 10**6), log_rate=st.floats(-4, 4))
@settings(max_examples=25, deadline=None)
def test_chunk_form_equals_the_recurrence_for_any_size_and_decay(num_rows: int, seed: int, log_rate: float) -> None:
    rows, weights, state = make_rows(num_rows, seed)
    weights = replace(weights, a=weights.a * 10**log_rate)
    out, states = reference(rows, weights, state)
    got = mamba2_chunk(rows, weights, state)
    close(got.out, out)
    close(got.state, states[-1])


def test_rows_in_pieces_carry_the_state_on() -> None:
    rows, weights, state = make_rows(150)
    out, states = reference(rows, weights, state)
    outs: list[torch.Tensor] = []
    for first, end in ((0, 20), (20, 21), (21, 21), (21, 150)):
        result = mamba2_chunk(part(rows, first, end), weights, state)
        state = result.state
        outs.append(result.out)
    close(torch.cat(outs), out)
    close(state, states[-1])


def test_a_time_step_far_below_its_clamp_moves_the_state_by_the_clamp_in_chunk_and_step() -> None:
    rows, weights, state = make_rows(70)
    weights = replace(weights, time_step_min=0.01)
    rows.dt.fill_(-200.0)  # softplus is 0 here
    for got in (mamba2_chunk(rows, weights, state).state, mamba2_verify(rows, weights, state).state[-1]):
        b, c = rows.b.double(), rows.x.double()
        want = state.double()
        for t in range(70):
            added = torch.einsum("hn,hp->hnp", b[t].repeat_interleave(HEADS // GROUPS, 0), c[t]) * 0.01
            want = want * (0.01 * weights.a.double()).exp()[:, None, None] + added
        close(got, want)
        assert (got - state).abs().max() > 0.01


def test_a_decay_that_underflows_forgets_and_nothing_else() -> None:
    rows, weights, state = make_rows(100)
    rows.dt[50] = 1e9
    rows.x[50] = 0.0
    got = mamba2_chunk(rows, weights, state)
    assert got.out.isfinite().all()
    out, states = reference(part(rows, 51, 100), weights, torch.zeros_like(state))
    close(got.out[51:], out)
    close(got.state, states[-1])


def test_step_of_many_sequences_equals_each_alone() -> None:
    rows, weights, one = make_rows(5)
    before = torch.stack([one * (s + 1) for s in range(5)])
    got = mamba2_step(rows, weights, before)
    for s in range(5):
        out, states = reference(part(rows, s, s + 1), weights, before[s])
        close(got.out[s], out[0])
        close(got.state[s], states[0])


def test_verify_rows_give_the_bytes_of_one_row_steps_and_every_state_between() -> None:
    rows, weights, state = make_rows(4)
    got = mamba2_verify(rows, weights, state)
    alone = state[None]
    for t in range(4):
        step = mamba2_step(part(rows, t, t + 1), weights, alone)
        alone = step.state
        assert torch.equal(got.out[t], step.out[0])
        assert torch.equal(got.state[t], alone[0])


def test_equal_rows_and_state_give_equal_bytes_and_inputs_are_left_as_they_are() -> None:
    rows, weights, state = make_rows(INNER + 9)
    copies = [x.clone() for x in (rows.x, rows.dt, rows.b, rows.c, state)]
    first = mamba2_chunk(rows, weights, state)
    again = mamba2_chunk(Mamba2Rows(*(c.clone() for c in copies[:4])), weights, torch.stack((state, state))[1])
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.state, again.state)
    for now, before in zip((rows.x, rows.dt, rows.b, rows.c, state), copies, strict=True):
        assert torch.equal(now, before)


def test_no_rows_leave_the_state_as_it_is() -> None:
    rows, weights, state = make_rows(0)
    result = mamba2_chunk(rows, weights, state)
    assert result.out.shape == rows.x.shape
    assert torch.equal(result.state, state)


def test_wrong_shapes_are_refused() -> None:
    rows, weights, state = make_rows(4)
    with pytest.raises(AssertionError):
        mamba2_chunk(rows, weights, state.transpose(1, 2))
    with pytest.raises(AssertionError):
        mamba2_step(rows, weights, state[None])
