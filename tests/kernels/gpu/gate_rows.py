"""Indexer, selection, rotation and copies compiled for sm_90 at the shapes that models have."""

import pytest
import torch

from kernels.qk_rope import HeadNorm, HeadNorms, Heads, Places
from kernels.triton_block_copy import gather_images, move_rows, scatter_images
from kernels.triton_indexer import FP8, ScoreRows, index_scores
from kernels.triton_qk_rope import turn_and_write, turns
from kernels.triton_topk import top_keys
from tests.kernels.gpu.compiler import machine_code
from tests.kernels.gpu.gate_attention import BF16, ids, plane


@pytest.mark.parametrize(
    ("dtype", "per_block", "seqs"),
    [(BF16, 64, "many"), (FP8, 64, "many"), (BF16, 64, "one"), (FP8, 64, "one"), (BF16, 16, "many")],
)
def test_index_scores(dtype, per_block, seqs):
    rows = ScoreRows(ids(4 if seqs == "many" else 1, 512), ids(4), ids(4) if seqs == "many" else None)
    with machine_code() as code:
        q, weights = ids(4, 64, 128, dtype=BF16), torch.empty(4, 64)
        index_scores(q, weights, plane(per_block, 128, dtype=dtype), rows, most_keys=8000)
    assert code.of("_score_kernel").instructions["QGMMA" if dtype == FP8 else "HGMMA"]
    assert code.of("_score_kernel").instructions["LDGSTS"]


def test_top_keys():
    with machine_code() as code:
        top_keys(torch.empty(8, 131_072), ids(8), 2048)
    assert [kernel.name for kernel in code.kernels] == ["_peaks_kernel", "_list_kernel", "_choose_kernel"]
    for kernel in code.kernels:
        assert kernel.instructions["LDG"]


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "head_dim", "rotary"),
    [(HeadNorm.CAST_FIRST, 32, 8, 128, 128), (HeadNorm.WIDE, 16, 2, 256, 64), (HeadNorm.NONE, 9, 3, 64, 64)],
)
def test_turn_and_write(kind, heads, kv_heads, head_dim, rotary):
    q, k, v = (ids(4, n, head_dim, dtype=BF16) for n in (heads, kv_heads, kv_heads))
    weight = None if kind == HeadNorm.NONE else torch.empty(head_dim)
    places = Places(ids(4, dtype=torch.int64), ids(4, dtype=torch.int64), *(ids(4, rotary, dtype=BF16) for _ in "cs"))
    k_plane, v_plane = (plane(64, kv_heads, head_dim) for _ in range(2))
    with machine_code() as code:
        turn_and_write(Heads(q, k, v), k_plane, v_plane, HeadNorms(kind, weight, weight, 1e-6), places)
    assert code.of("_turn_kernel").instructions["STG"]


def test_turns():
    with machine_code(most_stack_bytes=64):  # reducing a large angle takes some words there
        turns(ids(4, dtype=torch.int64), torch.empty(32), 1.0, BF16)


def test_block_copies_move_16_bytes_a_thread():
    pool, images = torch.empty((4, 1 << 20), dtype=torch.uint8), torch.empty((2, 1 << 20), dtype=torch.uint8)
    moves = (
        lambda: gather_images(pool, ids(2, dtype=torch.int64), images),
        lambda: scatter_images(images, pool, ids(2, dtype=torch.int64)),
        lambda: move_rows(pool, ids(2, dtype=torch.int64), images, ids(2, dtype=torch.int64)),
    )
    for move in moves:
        with machine_code() as code:
            move()
        # 16 KiB by 256 threads: four loads of 16 bytes each, and the ids.
        assert code.of("_move_kernel").instructions["LDG"] <= 6
