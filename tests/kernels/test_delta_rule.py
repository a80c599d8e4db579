"""The gated delta rule's chunk and step forms against its recurrence in float64, for both shapes of decay."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.delta_rule import INNER, DeltaResult, DeltaRows, delta_reference, delta_step, delta_verify
from kernels.gated_delta import gated_delta_chunk, gated_delta_decay
from kernels.kda import GROUP, kda_bounded_decay, kda_chunk, kda_decay

Chunk = Callable[[DeltaRows, torch.Tensor], DeltaResult]

torch.set_num_threads(1)


def make_rows(
    num_rows: int, *, per_channel: bool, seed: int = 0, strength: float = 1.0, dk: int = 12, dv: int = 20
) -> tuple[DeltaRows, torch.Tensor]:
    """Rows of 4 value heads (2 key heads where one decay serves a head) and a state, all random."""
    gen = torch.Generator().manual_seed(seed)
    k_heads, v_heads = (4, 4) if per_channel else (2, 4)
    rows = DeltaRows(
        q=torch.randn((num_rows, k_heads, dk), generator=gen),
        k=torch.randn((num_rows, k_heads, dk), generator=gen) + 0.3,
        v=torch.randn((num_rows, v_heads, dv), generator=gen),
        log_decay=-strength * torch.rand((num_rows, v_heads, dk if per_channel else 1), generator=gen),
        beta=torch.rand((num_rows, v_heads), generator=gen),
    )
    return rows, torch.randn((v_heads, dk, dv), generator=gen)


def in_double(rows: DeltaRows) -> DeltaRows:
    return DeltaRows(*(x.double() for x in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta)))


def part(rows: DeltaRows, first: int, end: int) -> DeltaRows:
    return DeltaRows(*(x[first:end] for x in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta)))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


FORMS = [pytest.param(gated_delta_chunk, False, id="gated_delta"), pytest.param(kda_chunk, True, id="kda")]


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
@pytest.mark.parametrize("strength", [1e-3, 1.0, 60.0])
@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 127, 200])
def test_chunk_form_equals_the_recurrence(chunk: Chunk, per_channel: bool, strength: float, num_rows: int) -> None:
    rows, state = make_rows(num_rows, per_channel=per_channel, strength=strength)
    want = delta_reference(in_double(rows), state.double())
    got = chunk(rows, state)
    close(got.out, want.out)
    close(got.state, want.state[-1])


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
@given(num_rows=st.integers(1, 150), seed=st.integers(0, 10**6), log_strength=st.floats(-4, 3), dk=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_chunk_form_equals_the_recurrence_for_any_size_and_decay(
    chunk: Chunk, per_channel: bool, num_rows: int, seed: int, log_strength: float, dk: int
) -> None:
    rows, state = make_rows(num_rows, per_channel=per_channel, seed=seed, strength=10**log_strength, dk=dk, dv=3)
    want = delta_reference(in_double(rows), state.double())
    got = chunk(rows, state)
    torch.testing.assert_close(got.out.double(), want.out, atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(got.state.double(), want.state[-1], atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
def test_rows_in_pieces_carry_the_state_on(chunk: Chunk, per_channel: bool) -> None:
    rows, state = make_rows(150, per_channel=per_channel)
    want = delta_reference(in_double(rows), state.double())
    outs: list[torch.Tensor] = []
    for first, end in ((0, 20), (20, 21), (21, 21), (21, 150)):
        result = chunk(part(rows, first, end), state)
        state = result.state
        outs.append(result.out)
    close(torch.cat(outs), want.out)
    close(state, want.state[-1])


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
def test_equal_rows_and_state_give_equal_bytes_wherever_they_lie(chunk: Chunk, per_channel: bool) -> None:
    rows, state = make_rows(INNER * 2 + 5, per_channel=per_channel)
    first = chunk(rows, state)
    torch.randn(3, 1001)  # another history of the allocator
    shifted = DeltaRows(*(torch.cat((x[:3], x))[3:] for x in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta)))
    again = chunk(shifted, torch.stack((state, state))[1])
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.state, again.state)


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
def test_no_rows_leave_the_state_as_it_is(chunk: Chunk, per_channel: bool) -> None:
    rows, state = make_rows(0, per_channel=per_channel)
    result = chunk(rows, state)
    assert result.out.shape == rows.v.shape
    assert torch.equal(result.state, state)
    assert delta_reference(rows, state).state.shape == (0, *state.shape)


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
def test_inputs_are_left_as_they_are(chunk: Chunk, per_channel: bool) -> None:
    rows, state = make_rows(70, per_channel=per_channel)
    copies = [x.clone() for x in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta, state)]
    chunk(rows, state)
    delta_step(rows, state.expand(70, *state.shape))
    for now, before in zip((rows.q, rows.k, rows.v, rows.log_decay, rows.beta, state), copies, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
@pytest.mark.parametrize("strength", [1e3, 1e8, float("inf")])
def test_a_decay_that_underflows_forgets_and_nothing_else(chunk: Chunk, per_channel: bool, strength: float) -> None:
    rows, state = make_rows(100, per_channel=per_channel, strength=1e-2)
    rows.log_decay[50] = -strength
    result = chunk(rows, state)
    assert result.out.isfinite().all()
    assert result.state.isfinite().all()
    forgotten = delta_reference(in_double(part(rows, 50, 100)), torch.zeros_like(state).double())
    close(result.out[50:], forgotten.out)
    close(result.state, forgotten.state[-1])
    close(delta_verify(part(rows, 50, 100), state).state[-1], forgotten.state[-1])


@pytest.mark.parametrize(("chunk", "per_channel"), FORMS)
def test_no_decay_equal_keys_and_full_beta_stay_exact(chunk: Chunk, per_channel: bool) -> None:
    """Every row overwrites the one before it: powers of the triangular system would overflow here."""
    rows, state = make_rows(INNER * 3, per_channel=per_channel)
    rows.k.copy_(rows.k[:1].expand_as(rows.k))
    rows.beta.fill_(1.0)
    rows.log_decay.zero_()
    want = delta_reference(in_double(rows), state.double())
    got = chunk(rows, state)
    close(got.out, want.out)
    close(got.state, want.state[-1])


@pytest.mark.parametrize("per_channel", [False, True])
def test_step_of_many_sequences_equals_each_alone(per_channel: bool) -> None:
    rows, _ = make_rows(5, per_channel=per_channel)
    _, one = make_rows(1, per_channel=per_channel)
    states = torch.stack([one * (s + 1) for s in range(5)])
    got = delta_step(rows, states)
    for s in range(5):
        want = delta_reference(in_double(part(rows, s, s + 1)), states[s].double())
        close(got.out[s], want.out[0])
        close(got.state[s], want.state[0])


@pytest.mark.parametrize("per_channel", [False, True])
def test_verify_rows_give_the_bytes_of_one_row_steps_and_every_state_between(per_channel: bool) -> None:
    rows, state = make_rows(4, per_channel=per_channel)
    got = delta_verify(rows, state)
    alone = state[None]
    for t in range(4):
        step = delta_step(part(rows, t, t + 1), alone)
        alone = step.state
        assert torch.equal(got.out[t], step.out[0])
        assert torch.equal(got.state[t], alone[0])


def test_kda_with_equal_channels_is_gated_delta() -> None:
    rows, state = make_rows(GROUP * INNER + 70, per_channel=True)
    scalar = DeltaRows(rows.q, rows.k, rows.v, rows.log_decay[..., :1].contiguous(), rows.beta)
    rows = DeltaRows(rows.q, rows.k, rows.v, rows.log_decay[..., :1].expand_as(rows.log_decay), rows.beta)
    want, got = gated_delta_chunk(scalar, state), kda_chunk(rows, state)
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.state, want.state, atol=1e-5, rtol=1e-5)


def test_kda_scratch_does_not_grow_with_pairs_times_channels() -> None:
    """For all pairs of a chunk, [H, n, C, C, dk] would be 512 MiB here; the terms must stay far below it."""
    rows, state = make_rows(GROUP * INNER, per_channel=True, dk=64, dv=64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        kda_chunk(rows, state)
    largest = max(event.cpu_memory_usage for event in prof.events() or () if event.name == "aten::empty")
    pairs_times_channels = 4 * GROUP * INNER * INNER * 64 * 4
    assert 0 < largest < pairs_times_channels / 8


def test_gates_follow_their_formulas() -> None:
    gen = torch.Generator().manual_seed(0)
    a, f = torch.randn((7, 3), generator=gen), torch.randn((7, 3, 5), generator=gen)
    a_log, dt_bias = torch.randn(3, generator=gen), torch.randn(3, generator=gen)
    for t in range(7):
        for h in range(3):
            rate = a_log[h].double().exp()
            want = -rate * (1 + (a[t, h].double() + dt_bias[h]).exp()).log()
            close(gated_delta_decay(a, a_log, dt_bias)[t, h, 0], want)
            close(kda_decay(f, a_log)[t, h], -rate * (1 + f[t, h].double().exp()).log())
            close(kda_bounded_decay(f, a_log, -5.0)[t, h], -5 / (1 + (-rate * f[t, h].double()).exp()))


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    rows, state = make_rows(4, per_channel=False)
    with pytest.raises(AssertionError):
        gated_delta_chunk(rows, state[:2])
    with pytest.raises(AssertionError):
        gated_delta_chunk(rows, state.double())
    with pytest.raises(AssertionError):
        kda_chunk(rows, state)
    with pytest.raises(AssertionError):
        delta_step(rows, state[None])
