"""Products and mixtures of few rows, beside float64."""

import pytest
import torch

from kernels.moe import Activation, ActivationKind, Mixture, activate, experts_reference
from kernels.triton_few_experts import few_experts
from kernels.triton_few_linear import FEW_ROWS, linear
from kernels.triton_routing import route_softmax
from tests.kernels.gpu.paged import randn, relative_error


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (48, torch.float32)])
def test_a_product_of_few_rows_equals_float64(width: int, dtype: torch.dtype):
    for num_rows, columns in ((1, 5), (FEW_ROWS, 17), (FEW_ROWS + 1, 8), (0, 4)):
        x = randn(num_rows, width + 16, seed=num_rows)[:, :width]
        weight, bias = randn(columns, width, seed=7, dtype=dtype), randn(columns, seed=8, dtype=dtype)
        for added in (None, bias) if num_rows == 1 else (bias,):
            out = linear(x, weight, added)
            want = x.double() @ weight.double().T + (0 if added is None else added.double())
            assert out.dtype == dtype
            assert out.shape == (num_rows, columns)
            assert not num_rows or relative_error(out, want) < 4e-3


@pytest.mark.parametrize(
    ("kind", "limit", "inner", "shared"),
    [
        (ActivationKind.SWIGLU, None, 8, 8),
        (ActivationKind.SWIGLU, 0.5, 6, 10),
        (ActivationKind.RELU_SQUARED, None, 18, 0),
    ],
)
def test_a_mixture_of_few_rows_equals_float64(kind: ActivationKind, limit: float | None, inner: int, shared: int):
    width, width_out, num_experts, top_k = 48, 18, 6, 3
    activation, twice = Activation(kind, limit), 2 if kind is ActivationKind.SWIGLU else 1
    up, down = randn(num_experts, twice * inner, width, seed=1) / 7, randn(num_experts, width_out, inner, seed=2) / 5
    shared_up = randn(twice * shared, width, seed=3) / 7 if shared else None
    shared_down = randn(width_out, shared, seed=4) / 5 if shared else None
    gate = randn(1, width, seed=5) / 7 if shared == inner else None
    for num_rows in (1, 2):
        rows = randn(num_rows, width + 8, seed=6)[:, :width]
        routing = route_softmax(randn(num_rows, num_experts, seed=9), top_k=top_k, renormalise=True)
        out = few_experts(rows, routing, Mixture(up, down, activation, shared_up, shared_down, gate))
        cpu = type(routing)(routing.experts.cpu(), routing.weights.cpu().double())
        wide = rows.cpu().double()
        want = experts_reference(wide, cpu, up.cpu().double(), down.cpu().double(), activation)
        if shared_up is not None and shared_down is not None:
            own = activate(wide @ shared_up.cpu().double().T, activation) @ shared_down.cpu().double().T
            want += own if gate is None else own * torch.sigmoid(wide @ gate.cpu().double().T)
        assert relative_error(out.cpu(), want) < 1e-2


def test_rows_do_not_depend_on_each_other():
    mixture = Mixture(
        randn(4, 16, 32, seed=1), randn(4, 16, 8, seed=2), Activation(ActivationKind.SWIGLU, None), None, None, None
    )
    rows = randn(3, 32, seed=3)
    routing = route_softmax(randn(3, 4, seed=4), top_k=2, renormalise=True)
    whole = few_experts(rows, routing, mixture)
    for r in range(3):
        one = type(routing)(routing.experts[r : r + 1], routing.weights[r : r + 1])
        assert torch.equal(few_experts(rows[r : r + 1], one, mixture), whole[r : r + 1])
