"""Products and mixtures of few rows compiled for sm_90 at the shapes that models have."""

import pytest
import torch

from kernels.moe import Activation, ActivationKind, Mixture, Routing
from kernels.triton_activate import activate
from kernels.triton_few_experts import few_experts
from kernels.triton_few_linear import linear
from tests.kernels.gpu.compiler import machine_code
from tests.kernels.gpu.gate_attention import BF16, ids


@pytest.mark.parametrize(("num_rows", "width", "columns"), [(1, 2048, 12352), (4, 4096, 2048)])
def test_a_product_of_few_rows(num_rows, width, columns):
    with machine_code() as code:
        linear(ids(num_rows, width, dtype=BF16), ids(columns, width, dtype=BF16), None)
    assert code.of("_few_linear_kernel").instructions["LDG"] >= 4, "several loads are in flight"


def test_a_mixture_of_few_rows():
    up, down = ids(2, 1024, 2048, dtype=BF16), ids(2, 2048, 512, dtype=BF16)
    routing = Routing(ids(1, 8, dtype=torch.int64), torch.empty(1, 8))
    shared = ids(1024, 2048, dtype=BF16), ids(2048, 512, dtype=BF16), ids(1, 2048, dtype=BF16)
    with machine_code() as code:
        few_experts(
            ids(1, 2048, dtype=BF16), routing, Mixture(up, down, Activation(ActivationKind.SWIGLU, None), *shared)
        )
    for name in ("_up_kernel", "_down_kernel"):
        assert code.of(name).instructions["LDG"] >= 8, "several loads are in flight"


def test_an_activation():
    with machine_code() as code:
        activate(ids(4, 1024, dtype=BF16), Activation(ActivationKind.SWIGLU, 10.0))
    assert code.of("_activate_kernel").instructions["MUFU"]
