"""Recurrent mixers, experts, norms and sampling compiled for sm_90 at the shapes that models have."""

import pytest
import torch

from kernels.causal_conv import ConvWeights
from kernels.delta_mixer import DecayKind, DeltaMixer, OutputGate, ProjectedRows, no_arrivals, split_heads
from kernels.delta_rule import INNER
from kernels.gluon_delta_scan import grouped_scan
from kernels.gluon_delta_terms import fill_channel_terms, fill_head_terms
from kernels.gluon_interface import is_available, shrinks_tiles
from kernels.hyper_connections import HyperRule, HyperWeights
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.moe import Activation, ActivationKind, SigmoidRule
from kernels.recurrent_slots import RecurrentSlots
from kernels.sampling_rows import SamplingRows
from kernels.triton_causal_conv import causal_conv_chunk, causal_conv_step
from kernels.triton_delta_chunk import delta_chunk
from kernels.triton_delta_decode import delta_decode
from kernels.triton_delta_scan import DeltaTerms
from kernels.triton_hyper_connections import inject, mix_streams
from kernels.triton_mamba2 import mamba2_chunk, mamba2_step
from kernels.triton_moe import grouped_experts
from kernels.triton_norms import add_rms_norm, gated_group_rms_norm, rms_norm, rms_norm_silu_gate
from kernels.triton_routing import route_sigmoid, route_softmax
from kernels.triton_sampling import draw_rows
from tests.kernels.gpu.compiler import machine_code
from tests.kernels.gpu.fractions import some

BF16 = torch.bfloat16
DIM = 128
MIXERS = [
    (DecayKind.HEAD_SOFTPLUS, OutputGate.SILU, 16, 32),
    (DecayKind.CHANNEL_BOUNDED, OutputGate.SIGMOID, 64, 64),
    (DecayKind.CHANNEL_SOFTPLUS, OutputGate.SIGMOID, 32, 32),
]


def bf16(*shape):
    return torch.empty(shape, dtype=BF16)


def slots_of(num_rows, channels, state_shape):
    ids = torch.zeros(num_rows, dtype=torch.int64)
    return RecurrentSlots(bf16(2, 3, channels), torch.empty(2, *state_shape), ids, ids)


def mixer_of(decay, gate, k_heads, heads, num_rows):
    channels = 2 * k_heads * DIM + heads * DIM
    width = heads if decay is DecayKind.HEAD_SOFTPLUS else heads * DIM
    conv = ConvWeights(torch.empty(4, channels), None, True)
    vectors, arrivals = (
        (torch.empty(heads), torch.empty(width), torch.empty(DIM)),
        no_arrivals(heads, torch.device("cpu")),
    )
    mixer = DeltaMixer(conv, *vectors, 1e-6, decay, -5.0, gate, arrivals)
    rows = ProjectedRows(
        bf16(num_rows, channels), bf16(num_rows, heads * DIM), bf16(num_rows, heads), bf16(num_rows, width)
    )
    return rows, mixer, (channels, (heads, DIM, DIM))


@pytest.mark.parametrize(("decay", "gate", "k_heads", "heads"), some(MIXERS, 1))
def test_delta_decode(decay, gate, k_heads, heads):
    rows, mixer, sizes = mixer_of(decay, gate, k_heads, heads, 2)
    with machine_code() as code:
        delta_decode(rows, mixer, slots_of(2, *sizes))
    assert code.of("_delta_decode_kernel").instructions["LDG"] >= 48, "a tile of state and all else come at once"


@pytest.mark.parametrize(("decay", "gate", "k_heads", "heads"), some(MIXERS, 1))
def test_delta_chunk(decay, gate, k_heads, heads):
    rows, mixer, sizes = mixer_of(decay, gate, k_heads, heads, 200)
    # With a decay a channel two registers are put aside, once a part of the channels.
    with machine_code(8 if mixer.per_channel else 0) as code:
        delta_chunk(rows, mixer, slots_of(1, *sizes))
    assert len(code.kernels) == 2
    for kernel in code.kernels:
        assert kernel.instructions["HGMMA"]
    scan = code.of("_scan_kernel")
    assert scan.stack_bytes == 0
    assert not scan.instructions["HMMA"]
    assert scan.instructions["UTMALDG"], "tiles come by the copy engine"


@pytest.mark.skipif(not is_available(), reason="this Triton has another interface")
@pytest.mark.parametrize(("decay", "gate", "k_heads", "heads"), MIXERS[:2])
def test_grouped_delta_chunk(decay, gate, k_heads, heads):
    if decay is DecayKind.CHANNEL_BOUNDED and not shrinks_tiles():
        pytest.skip("this Triton sees no smaller tile in a larger one")
    rows, mixer, sizes = mixer_of(decay, gate, k_heads, heads, 200)
    q, k, v = split_heads(rows.mixed, sizes[1])
    keep = torch.empty((4, heads, DIM) if mixer.per_channel else (4, heads, 4, INNER))
    made = bf16(3, 200, heads, DIM) if mixer.per_channel else (q, k, k)
    terms = DeltaTerms(bf16(4, heads, INNER, INNER), bf16(4, heads, INNER, INNER), keep, *made)
    # With a decay a channel a thread has a whole strip of q or of k beside its decays, which is all but what fits.
    with machine_code(160 if mixer.per_channel else 0) as code:
        (fill_channel_terms if mixer.per_channel else fill_head_terms)(rows, mixer, (q, k), terms)
    for kernel in code.kernels:
        assert kernel.instructions["HGMMA"]
        assert kernel.instructions["UTMASTG"], "squares leave by the copy engine"
    with machine_code() as code:
        grouped_scan(terms, v, torch.empty_like(v, memory_format=torch.contiguous_format), slots_of(1, *sizes))
    scan = code.of("_grouped_scan_kernel")
    assert scan.instructions["HGMMA"] == 32, "no product is done twice, and none by parts"
    assert scan.instructions["UTMALDG"]
    assert scan.instructions["LDSM"], "v is transposed on its way"


def test_mamba2():
    heads, groups, n, p = 128, 8, 128, 64
    x, b, c = bf16(200, heads * p), bf16(200, groups * n), bf16(200, groups * n)
    rows = Mamba2Rows(
        x.unflatten(1, (heads, p)), bf16(200, heads), b.unflatten(1, (groups, n)), c.unflatten(1, (groups, n))
    )
    weights = Mamba2Weights(torch.empty(heads), torch.empty(heads), torch.empty(heads), 0.001)
    with machine_code() as code:
        mamba2_chunk(rows, weights, slots_of(1, 8, (heads, n, p)))
        one = Mamba2Rows(*(part[:2] for part in (rows.x, rows.dt, rows.b, rows.c)))
        mamba2_step(one, weights, slots_of(2, 8, (heads, n, p)))
    assert code.of("_chunk_kernel").instructions["HGMMA"]
    assert code.of("_chunk_kernel").instructions["UTMALDG"]


def test_causal_conv():
    weights = ConvWeights(torch.empty(4, 8192), torch.empty(8192), True)
    slots = slots_of(1, 8192, (1, 1, 1))
    with machine_code() as code:
        causal_conv_chunk(bf16(100, 8192), slots.tails, slots.slot_in, slots.slot_out, weights)
        causal_conv_step(bf16(1, 8192), slots.tails, slots.slot_in, slots.slot_out, weights)
    assert [kernel.name for kernel in code.kernels] == ["_chunk_kernel", "_tail_kernel", "_step_kernel"]


@pytest.mark.parametrize("num_rows", [16, 512, 4096])
def test_experts(num_rows):
    # 256 experts of 2,048 x 512, as views of one: nothing is launched.
    up, down = torch.empty((256, 1024, 2048), dtype=BF16), torch.empty((256, 2048, 512), dtype=BF16)
    with machine_code() as code:
        routing = route_softmax(torch.empty(num_rows, 256), top_k=8, renormalise=True)
        grouped_experts(bf16(num_rows, 2048), routing, up, down, Activation(ActivationKind.SWIGLU, None))
    for name in ("_up_kernel", "_down_kernel"):
        assert code.of(name).instructions["HGMMA"]
        assert code.of(name).instructions["UTMALDG"]


def test_experts_without_gates_and_sigmoid_routing():
    up, down = torch.empty((128, 1856, 2688), dtype=BF16), torch.empty((128, 2688, 1856), dtype=BF16)
    with machine_code():
        routing = route_sigmoid(torch.empty(64, 128), torch.empty(128), SigmoidRule(6, 1, 1, True, 2.5))
        grouped_experts(bf16(64, 2688), routing, up, down, Activation(ActivationKind.RELU_SQUARED, None))
        route_sigmoid(torch.empty(64, 256), torch.empty(256), SigmoidRule(8, 8, 4, True, 2.5))


def test_norms():
    with machine_code():
        rms_norm(bf16(64, 2048), torch.empty(2048), 1e-6, cast_first=False)
        add_rms_norm(bf16(64, 4096), bf16(64, 4096), bf16(4096), 1e-6, cast_first=True)
        rms_norm(bf16(64, 16, 256), torch.empty(256), 1e-6, cast_first=False)
        rms_norm_silu_gate(bf16(64, 32, 128), bf16(64, 4096), torch.empty(128), 1e-6)
        gated_group_rms_norm(bf16(64, 8192), bf16(64, 8192), torch.empty(8192), num_groups=8, eps=1e-6)


def test_hyper_connections():
    streams = bf16(32, 4, 6144)
    weights = HyperWeights(bf16(24, 4 * 6144), torch.empty(24), torch.empty(3))
    with machine_code() as code:
        inject(bf16(32, 6144), streams, mix_streams(streams, weights, HyperRule(1e-6, 1e-6, 20)))
    assert code.of("_sum_kernel").instructions["HMMA"]


def test_sampling():
    wide = [torch.empty(4, dtype=torch.float64) for _ in range(3)]
    rows = SamplingRows(torch.empty(4), torch.empty(4, dtype=torch.int32), *wide)
    with machine_code() as code:
        draw_rows(torch.empty((4, 151_936)), rows)
    assert code.of("_groups_kernel").instructions["LDG"]
