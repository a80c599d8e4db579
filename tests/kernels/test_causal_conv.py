"""The causal convolution's forms against the sum written out in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.causal_conv import (
    ConvWeights,
    causal_conv_chunk,
    causal_conv_reference,
    causal_conv_step,
    causal_conv_tails,
    conv_weights,
)

torch.set_num_threads(1)


def make(
    num_rows: int, *, taps: int = 4, bias: bool = True, silu: bool = True, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, ConvWeights]:
    gen = torch.Generator().manual_seed(seed)
    weights = conv_weights(
        torch.randn((10, 1, taps), generator=gen), torch.randn(10, generator=gen) if bias else None, silu=silu
    )
    return torch.randn((num_rows, 10), generator=gen), torch.randn((taps - 1, 10), generator=gen), weights


def reference(x: torch.Tensor, tail: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
    return causal_conv_reference(x.double(), tail.double(), weights).out


@given(
    num_rows=st.integers(1, 40), taps=st.integers(2, 6), bias=st.booleans(), silu=st.booleans(), cut=st.integers(0, 40)
)
@settings(max_examples=60, deadline=None)
def test_chunks_cut_anywhere_equal_the_sum_and_pass_the_tail_on(
    num_rows: int, taps: int, bias: bool, silu: bool, cut: int
) -> None:
    x, tail, weights = make(num_rows, taps=taps, bias=bias, silu=silu)
    cut = min(cut, num_rows)
    first = causal_conv_chunk(x[:cut], tail, weights)
    second = causal_conv_chunk(x[cut:], first.tail, weights)
    got = torch.cat((first.out, second.out))
    torch.testing.assert_close(got.double(), reference(x, tail, weights), atol=1e-5, rtol=1e-5)
    assert torch.equal(second.tail, torch.cat((tail, x))[-(taps - 1) :])


def test_the_reference_is_the_framework_s_convolution() -> None:
    x, tail, weights = make(9)
    assert weights.bias is not None
    conv = torch.nn.functional.conv1d(
        torch.cat((tail, x)).t()[None].double(), weights.taps.t()[:, None].double(), weights.bias.double(), groups=10
    )
    torch.testing.assert_close(reference(x, tail, weights), torch.nn.functional.silu(conv[0].t()))


def test_one_row_steps_of_many_sequences_equal_chunks() -> None:
    x, _, weights = make(6)
    tails = torch.randn((6, 3, 10), generator=torch.Generator().manual_seed(9))
    got = causal_conv_step(x, tails, weights)
    for s in range(6):
        alone = causal_conv_chunk(x[s : s + 1], tails[s], weights)
        torch.testing.assert_close(got.out[s], alone.out[0], atol=1e-6, rtol=1e-6)
        assert torch.equal(got.tail[s], alone.tail)


def test_tails_after_every_row_are_those_of_one_row_steps() -> None:
    x, tail, weights = make(5)
    tails = causal_conv_tails(x, tail)
    for t in range(5):
        tail = causal_conv_step(x[t : t + 1], tail[None], weights).tail[0]
        assert torch.equal(tails[t], tail)


@pytest.mark.parametrize("is_wide", [False, True])
def test_bfloat16_rounds_the_sum_where_it_is_not_wide_and_the_tail_keeps_its_bytes(is_wide: bool) -> None:
    x, tail, weights = make(33)
    x, tail = x.bfloat16(), tail.bfloat16()
    got = causal_conv_chunk(x, tail, replace(weights, sum_dtype=torch.float32 if is_wide else None))
    assert got.out.dtype == got.tail.dtype == torch.bfloat16
    assert torch.equal(got.tail, x[-3:])
    sums = reference(x, tail, replace(weights, silu=False))
    expected = torch.nn.functional.silu(sums if is_wide else sums.bfloat16().double()).bfloat16()
    assert (got.out == expected).float().mean() > 0.99, "rounded elsewhere"  # sums near the middle may go either way
    torch.testing.assert_close(got.out.double(), expected.double(), atol=1e-4, rtol=2**-6)


def test_no_rows_leave_the_tail_as_it_is_and_inputs_are_not_written() -> None:
    x, tail, weights = make(0)
    before = tail.clone()
    result = causal_conv_chunk(x, tail, weights)
    assert result.out.shape == (0, 10)
    assert torch.equal(result.tail, before)
    result.tail.zero_()
    assert torch.equal(tail, before)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    x, tail, weights = make(3)
    with pytest.raises(AssertionError):
        causal_conv_chunk(x, tail[:2], weights)
    with pytest.raises(AssertionError):
        causal_conv_chunk(x, tail.double(), weights)
    with pytest.raises(AssertionError):
        conv_weights(torch.zeros(10, 2, 4), None, silu=True)
