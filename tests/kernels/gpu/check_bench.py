"""The benchmark's rows at small sizes: ours and its peers compute the same thing, so their times may be compared."""

import pytest
import torch

from ops.bench import kernels_attention, kernels_indexer, kernels_latent
from ops.bench.kernels_attention import Shape
from tests.kernels.gpu.fractions import some
from tests.kernels.gpu.paged import INTERPRETED

ROWS = [
    kernels_attention._decode_row("decode", Shape(4, 2, 64), [130, 130]),
    kernels_attention._decode_row("decode ragged", Shape(2, 1, 64), [1, 70, 300]),
    kernels_attention._decode_row("decode", Shape(2, 1, 64, kernels_attention.FP8), [100]),
    kernels_attention._prefill_row("prefill", Shape(2, 1, 64), 150, 150),
    kernels_attention._prefill_row("prefill over history", Shape(2, 1, 64), 300, 130),
    kernels_latent._mla_row("MLA", 1, 128, 16),
    kernels_latent._sparse_mla_row("sparse MLA", 1, 16, 128, 64),
    kernels_latent._sparse_row("sparse", 1, 256, 64),
    kernels_indexer._scores_row(torch.bfloat16, with_choice=False, num_seqs=1, length=256),
    kernels_indexer._choice_row(2, 9000),
    kernels_indexer._turn_row("turn", 3, (4, 2, 32, 16), kernels_indexer.HeadNorm.WIDE),
    kernels_indexer._copy_row("gather", to_host=False, block_bytes=256),
    kernels_indexer._copy_row("scatter", to_host=False, back=True, block_bytes=256),
]


@pytest.mark.parametrize("row", some(ROWS, 4), ids=lambda row: row.name)
def test_every_way_of_a_row_computes_it(row):
    inputs = row.make_inputs(3)
    tried = 0
    for way in row.ways:
        if INTERPRETED and ("cudnn" in way.name or "even" in way.name):
            continue
        out = way.make(inputs)()
        tried += 1
        if row.error is not None and way.exact:
            assert row.error(out, inputs) < (0.01 if way.is_peer else 4e-3), way.name
    assert tried
