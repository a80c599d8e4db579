"""The gated norms against their formulas in float64."""

import pytest
import torch

from kernels.gated_norm import gated_group_rms_norm, rms_norm_sigmoid_gate, rms_norm_silu_gate

EPS = 1e-5

torch.set_num_threads(1)


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    x, gate = torch.randn((5, 3, 12), generator=gen) * 3, torch.randn((5, 3, 12), generator=gen)
    return x.to(dtype), gate.to(dtype), torch.randn(12, generator=gen).to(dtype)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_comes_before_the_gate_in_delta_mixers(dtype: torch.dtype) -> None:
    x, gate, weight = make(dtype)
    wide, sigmoid = normed(x.double()) * weight.double(), torch.sigmoid(gate.double())
    rounded = normed(x.double()).to(dtype) * weight  # twice: the norm, then its product with the weight
    silu = rms_norm_silu_gate(x, gate, weight, EPS)
    assert silu.dtype == torch.float32
    torch.testing.assert_close(silu.double(), rounded.double() * sigmoid * gate.double(), atol=1e-5, rtol=1e-5)
    got = rms_norm_sigmoid_gate(x, gate, weight, EPS)
    torch.testing.assert_close(got.double(), wide * sigmoid, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_gate_comes_before_the_grouped_norm_in_mamba2(num_groups: int) -> None:
    x, gate, weight = make()
    got = gated_group_rms_norm(x, gate, weight, num_groups=num_groups, eps=EPS)
    gated = x.double() * gate.double() * torch.sigmoid(gate.double())
    parts = [normed(p) for p in gated.chunk(num_groups, dim=-1)]
    torch.testing.assert_close(got.double(), torch.cat(parts, -1) * weight.double(), atol=1e-5, rtol=1e-5)


def test_a_row_of_zeros_stays_zero_and_inputs_are_not_written() -> None:
    x, gate, weight = make()
    x[0] = 0.0
    copies = (x.clone(), gate.clone(), weight.clone())
    for norm in (rms_norm_silu_gate, rms_norm_sigmoid_gate):
        assert torch.equal(norm(x, gate, weight, EPS)[0], torch.zeros(3, 12))
    assert torch.equal(gated_group_rms_norm(x, gate, weight, num_groups=2, eps=EPS)[0], torch.zeros(3, 12))
    assert all(torch.equal(now, before) for now, before in zip((x, gate, weight), copies, strict=True))


def test_wrong_shapes_are_refused() -> None:
    x, gate, weight = make()
    with pytest.raises(AssertionError):
        rms_norm_silu_gate(x, gate[1:], weight, EPS)
    with pytest.raises(AssertionError):
        gated_group_rms_norm(x, gate, weight, num_groups=5, eps=EPS)
