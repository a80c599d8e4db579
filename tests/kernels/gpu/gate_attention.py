"""Attention kernels compiled for sm_90 at the shapes that models have."""

import pytest
import torch

from kernels.gluon_fp8_decode import Splits, attend_splits
from kernels.gluon_interface import is_available
from kernels.gluon_latent import grouped_mla, grouped_sparse_mla
from kernels.gluon_paged_prefill import ROWS_PER_TILE, grouped_prefill
from kernels.triton_mla import latent_splits, mla_decode, sparse_mla_decode
from kernels.triton_paged_decode import FP8, SPLITS, DecodeRows, paged_decode, plan_decode
from kernels.triton_paged_prefill import ChunkRows, paged_prefill, plan_prefill, prefill_tiles
from kernels.triton_selected import SelectedRows
from kernels.triton_softmax import merge_partials
from kernels.triton_sparse_decode import sparse_decode
from tests.kernels.gpu.compiler import machine_code
from tests.kernels.gpu.fractions import some

BF16 = torch.bfloat16
MOST_PUT_ASIDE = 56  # bytes a thread of latent groups, hardly any of them in the inner loop


def plane(*shape, dtype=BF16, block_bytes=1 << 21):
    """[2, *shape], strided as one part of a block image of all layers."""
    images = torch.empty((2, block_bytes), dtype=torch.uint8)
    size = torch.Size(shape).numel() * dtype.itemsize
    return images[:, 512 : 512 + size].view(dtype).view(2, *shape)


def ids(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype)


def tables(*shape):
    """Block tables, as the daemon's batches have them."""
    return ids(*shape, dtype=torch.int64)


def decode_plan(rule=SPLITS):
    return plan_decode(DecodeRows(tables(2, 2048), ids(2), ids(2)), block_size=64, rule=rule, most_items=300)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    some(
        [
            (32, 8, 128, BF16),
            (16, 2, 256, BF16),
            (9, 3, 64, BF16),
            (32, 8, 80, BF16),
            (9, 3, 64, FP8),
            (32, 8, 128, FP8),
        ],
        3,
    ),
)
def test_paged_decode(heads, kv_heads, head_dim, dtype):
    k, v = (plane(64, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    # Some shapes put a register or two aside.
    with machine_code(8) as code:
        q = ids(2, heads, head_dim, dtype=BF16)
        paged_decode(q, k, v, decode_plan(), head_dim**-0.5, gate=q if head_dim == 256 else None)
    kernel = code.of("attend_fp8_splits_kernel" if dtype == FP8 else "_attend_splits_kernel")
    assert kernel.instructions["HMMA"]
    copies = "UTMALDG" if dtype == BF16 and head_dim != 80 else "LDGSTS"
    assert kernel.instructions[copies], "tiles are copied while others are computed"


@pytest.mark.skipif(not is_available(), reason="this Triton has another interface")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), some([(32, 8, 128), (16, 2, 256), (16, 1, 256)], 1))
def test_float8_decode_by_groups_of_warps(heads, kv_heads, head_dim):
    k, v = (plane(64, kv_heads, head_dim, dtype=FP8) for _ in range(2))
    plan = decode_plan()
    results = torch.empty(300, heads, head_dim), torch.empty(300, heads)
    with machine_code() as code:
        attend_splits(
            ids(2, heads, head_dim, dtype=BF16),
            k,
            v,
            Splits(plan.rows.block_tables, plan.first_items, plan.items, *results),
            0.1,
        )
    kernel = code.of("_attend_splits_kernel")
    assert kernel.instructions["HGMMA"]
    assert not kernel.instructions["HMMA"]
    assert kernel.instructions["UTMALDG"], "whole blocks come by the copy engine"
    assert kernel.instructions["USETMAXREG"], "the copying group gives its registers to the other"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), some([(32, 8, 128), (16, 2, 256), (9, 3, 64), (32, 8, 80)], 1)
)
def test_paged_prefill(heads, kv_heads, head_dim):
    k, v = (plane(64, kv_heads, head_dim) for _ in range(2))
    for num_rows in (1000, 40):  # few rows: their keys are split
        chunks = ChunkRows(tables(1, 256), (15_000,), (0, num_rows))
        plan = plan_prefill(chunks, (0,), block_size=64, rows_per_tile=prefill_tiles(head_dim).rows)
        assert (plan.num_splits > 1) == (num_rows == 40)
        with machine_code() as code:
            paged_prefill(ids(num_rows, heads, head_dim, dtype=BF16), k, v, plan, head_dim**-0.5)
        kernel = code.of("_attend_chunk_kernel")
        assert kernel.instructions["HGMMA"]
        assert not kernel.instructions["HMMA"]
        assert bool(kernel.instructions["UTMALDG"]) == (head_dim != 80), "whole blocks come by the copy engine"


@pytest.mark.skipif(not is_available(), reason="this Triton has another interface")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), some([(32, 8, 128), (16, 2, 256), (9, 3, 64)], 1))
def test_prefill_by_groups_of_warps(heads, kv_heads, head_dim):
    k, v = (plane(64, kv_heads, head_dim) for _ in range(2))
    for num_rows in (3000, 40):  # few rows: their keys are split
        chunks = ChunkRows(tables(1, 300), (15_000,), (0, num_rows))
        plan = plan_prefill(chunks, (0,), block_size=64, rows_per_tile=ROWS_PER_TILE)
        assert (plan.num_splits > 1) == (num_rows == 40)
        # At 256 both groups hold all they can; what little they put aside did not keep it from 88% of the matrix rate.
        most_stack_bytes = (56 if num_rows == 40 else 40) if head_dim == 256 else 0
        with machine_code(most_stack_bytes) as code:
            grouped_prefill(ids(num_rows, heads, head_dim, dtype=BF16), k, v, plan, 0.1)
        kernel = code.of("_attend_chunk_kernel")
        assert kernel.instructions["HGMMA"]
        assert kernel.instructions["UTMALDG"]
        assert kernel.instructions["USETMAXREG"], "the copying group gives its registers to the others"


@pytest.mark.parametrize(
    ("heads", "latent_dim", "rope_dim"), some([(16, 512, 64), (32, 512, 64), (128, 512, 64), (32, 512, 0)], 1)
)
def test_latent_attention(heads, latent_dim, rope_dim):
    latents = plane(64, latent_dim + rope_dim)
    q = ids(2, heads, latent_dim + rope_dim, dtype=BF16)
    selected = SelectedRows(ids(2, 2048), 1, ids(2), ids(2), tables(2, 2048))
    with machine_code() as code:
        mla_decode(q, latents, decode_plan(latent_splits(heads)), latent_dim=latent_dim, scale=0.1)
        sparse_mla_decode(q, latents, selected, latent_dim=latent_dim, scale=0.1)
    for name in ("_latent_splits_kernel", "_latent_selected_kernel"):
        assert code.of(name).instructions["HGMMA"]
        assert not code.of(name).instructions["HMMA"]
        assert code.of(name).instructions["LDGSTS"]


@pytest.mark.skipif(not is_available(), reason="this Triton has another interface")
@pytest.mark.parametrize("heads", some([16, 32, 128], 1))
def test_latent_attention_by_groups_of_warps(heads):
    latents, q = plane(64, 576), ids(2, heads, 576, dtype=BF16)
    with machine_code(MOST_PUT_ASIDE) as code:
        grouped_mla(q, latents, decode_plan(latent_splits(heads)), scale=0.1)
    assert code.of("_attend_splits_kernel").instructions["UTMALDG"], "whole blocks come by the copy engine"
    with machine_code(MOST_PUT_ASIDE) as selected_code:
        for pool in (1, 16):
            selected = SelectedRows(ids(2, 2048 // pool), pool, ids(2), ids(2), tables(2, 2048))
            grouped_sparse_mla(q, latents, selected, scale=0.1)
    for kernel in (*code.kernels, *selected_code.kernels):
        if kernel.name.startswith("_attend"):
            assert kernel.instructions["HGMMA"]
            assert not kernel.instructions["HMMA"]
            assert kernel.instructions["USETMAXREG"], "the copying group gives its registers to the others"


def test_selected_pools_of_grouped_heads():
    k, v = (plane(64, 2, 256) for _ in range(2))
    selected = SelectedRows(ids(2, 128), 16, ids(2), ids(2), tables(2, 2048))
    with machine_code() as code:
        sparse_decode(ids(2, 16, 256, dtype=BF16), k, v, selected, 0.1)
    assert code.of("_attend_selected_kernel").instructions["HMMA"]
    assert code.of("_attend_selected_kernel").instructions["LDGSTS"]


@pytest.mark.parametrize(("num_rows", "num_parts", "dim"), [(2, 33, 128), (1, 128, 256), (64, 4, 128), (4, 64, 512)])
def test_merge(num_rows, num_parts, dim):
    outs, lses = torch.empty(num_rows, num_parts, 32, dim), torch.empty(num_rows, num_parts, 32)
    with machine_code() as code:
        merge_partials(outs, lses, ids(num_rows, 32, dim, dtype=BF16), torch.empty(num_rows, 32))
    assert code.of("_merge_kernel").instructions["LDG"] >= 4, "several parts are on their way at once"
