"""The benchmark's rows of recurrent mixers and experts at small sizes: ours computes what the row says."""

import pytest

from kernels.delta_mixer import DecayKind
from kernels.sampling import Filters
from ops.bench import kernels_experts, kernels_recurrent
from ops.bench.kernels_experts import ExpertShape
from ops.bench.kernels_recurrent import Mixer
from tests.kernels.gpu.fractions import some

GDN = Mixer(DecayKind.HEAD_SOFTPLUS, 1, 2)
KDA = Mixer(DecayKind.CHANNEL_BOUNDED, 1, 1)
ROWS = [
    kernels_recurrent._delta_decode_row("GDN decode", GDN, 2),
    kernels_recurrent._delta_decode_row("KDA decode", KDA, 2),
    kernels_recurrent._delta_chunk_row("GDN prefill", GDN, 70, None),
    kernels_recurrent._delta_chunk_row("KDA prefill", KDA, 70, None),
    kernels_experts._moe_row(3, ExpertShape(count=16, width=64, inner=32)),
    kernels_experts._norm_row(5, 96),
    kernels_experts._sampling_row("sampling", Filters(top_k=7, top_p=0.9), num_rows=1, vocab_size=600),
    kernels_experts._hyper_row(3, 96),
]


@pytest.mark.parametrize("row", some(ROWS, 3), ids=lambda row: row.name)
def test_our_way_of_a_row_computes_it(row):
    inputs = row.make_inputs(3)
    out = row.ways[0].make(inputs)()
    if row.error is not None:
        assert row.error(out, inputs) < 8e-3
