"""Products and mixtures of few rows compiled for sm_90 at the shapes that models have."""

import pytest
import torch

from kernels.causal_conv import ConvWeights
from kernels.delta_mixer import DecayKind, DeltaMixer, OutputGate, ProjectedRows, no_arrivals
from kernels.moe import Activation, ActivationKind, Mixture, Routing
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_activate import activate, gate_heads
from kernels.triton_delta_few import delta_few
from kernels.triton_few_experts import few_experts
from kernels.triton_few_linear import linear
from tests.kernels.gpu.compiler import machine_code
from tests.kernels.gpu.gate_attention import BF16, ids


@pytest.mark.parametrize(("num_rows", "width", "columns"), [(1, 2048, 12352), (4, 4096, 2048), (1, 29568, 8192)])
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


def test_a_mixture_of_long_experts_holds_fewer_columns():
    up, down = ids(2, 1856, 2688, dtype=BF16), ids(2, 2688, 1856, dtype=BF16)
    shared = ids(3712, 2688, dtype=BF16), ids(2688, 3712, dtype=BF16), None
    routing = Routing(ids(1, 6, dtype=torch.int64), torch.empty(1, 6))
    with machine_code():
        few_experts(
            ids(1, 2688, dtype=BF16), routing, Mixture(up, down, Activation(ActivationKind.RELU_SQUARED, None), *shared)
        )


@pytest.mark.parametrize("decay", [DecayKind.HEAD_SOFTPLUS, DecayKind.CHANNEL_BOUNDED])
def test_a_delta_step_of_few_rows(decay):
    heads, k_heads, dim = (32, 16, 128) if decay is DecayKind.HEAD_SOFTPLUS else (64, 64, 128)
    channels, biases = (2 * k_heads + heads) * dim, heads if decay is DecayKind.HEAD_SOFTPLUS else heads * dim
    conv = ConvWeights(torch.empty(4, channels), None, True)
    vectors = torch.empty(heads), torch.empty(biases), torch.empty(dim)
    mixer = DeltaMixer(conv, *vectors, 1e-6, decay, -5.0, OutputGate.SILU, no_arrivals(heads, torch.device("cpu")))
    rows = ProjectedRows(*(ids(1, n, dtype=BF16) for n in (channels, heads * dim, heads, biases)))
    slot = ids(1, dtype=torch.int64)
    slots = RecurrentSlots(ids(2, 3, channels, dtype=BF16), torch.empty(2, heads, dim, dim), slot, slot)
    with machine_code() as code:
        delta_few(rows, mixer, slots)
    kernel = code.of("_delta_few_kernel").instructions
    assert kernel["LDG"] >= 16, "a state comes at once"
    assert kernel["ACQBULK"], "and before the wait"


def test_a_gate_of_heads():
    with machine_code() as code:
        gate_heads(ids(1, 16, 256, dtype=BF16), ids(1, 36, 256, dtype=BF16)[:, 1:32:2])
    assert code.of("_gate_heads_kernel").instructions["MUFU"]


def test_an_activation():
    with machine_code() as code:
        activate(ids(4, 1024, dtype=BF16), Activation(ActivationKind.SWIGLU, 10.0))
    assert code.of("_activate_kernel").instructions["MUFU"]
