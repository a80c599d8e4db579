"""Rows of one byte matrix to rows of another, many at once.

A pool is a matrix [num_rows, row_bytes] whose rows are whole images, all layers together, or its columns that one plane
has. Either side may lie in device memory or in pinned host memory, which the device reads and writes where it lies.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch_table import Tunable, one_bucket


@dataclass(frozen=True, slots=True)
class CopyTiles:
    """How rows are cut."""

    words: int  # int32 that a program moves
    num_warps: int


# By whether one side is in host memory: then the link is what bounds the time.
MOVE = Tunable("move_rows", ("over_link",), lambda _: one_bucket(CopyTiles(4096, 8)), neutral=True)


@triton.jit
def _move_kernel(
    source_ptr,
    source_ids_ptr,
    target_ptr,
    target_ids_ptr,
    source_stride,
    target_stride,
    num_words,
    WORDS: tl.constexpr,
    FROM_IDS: tl.constexpr,
    TO_IDS: tl.constexpr,
):
    """One piece of one row; rows without ids are in order."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = tl.load(source_ids_ptr + row).to(tl.int64) if FROM_IDS else row
    target = tl.load(target_ids_ptr + row).to(tl.int64) if TO_IDS else row
    data = tl.load(source_ptr + source * source_stride + words, mask=words < num_words)
    tl.store(target_ptr + target * target_stride + words, data, mask=words < num_words)


def gather_images(pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor) -> None:
    """Copies rows `ids` [n] int64 of a pool [num_rows, row_bytes] uint8 to images [n, row_bytes] uint8."""
    assert images.shape[0] == ids.shape[0]
    _move(pool, ids, images, None)


def scatter_images(images: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
    """Copies images [n, row_bytes] uint8 to rows `ids` [n] int64, all different, of a pool."""
    assert images.shape[0] == ids.shape[0]
    _move(images, None, pool, ids)


def move_rows(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    tiles: CopyTiles | None = None,
) -> None:
    """Copies rows `source_ids` [n] int64 of one byte matrix to rows `target_ids` [n], all different, of another."""
    assert source_ids.shape == target_ids.shape
    _move(source, source_ids, target, target_ids, tiles)


def _move(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    tiles: CopyTiles | None = None,
) -> None:
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    row_bytes = source.shape[1]
    assert source.dtype == target.dtype == torch.uint8
    assert target.shape[1] == row_bytes
    assert row_bytes % 4 == 0
    assert source.stride(1) == target.stride(1) == 1
    assert source.stride(0) % 4 == target.stride(0) % 4 == 0
    assert source.data_ptr() % 16 == target.data_ptr() % 16 == 0
    assert ids.ndim == 1
    assert all(given is None or given.dtype == torch.int64 for given in (source_ids, target_ids))
    if ids.shape[0] == 0 or row_bytes == 0:
        return
    from_words, to_words = source.view(torch.int32), target.view(torch.int32)
    tiles = tiles or MOVE.look_up(ids.device, over_link=int(source.device != target.device))
    _move_kernel[(ids.shape[0], triton.cdiv(row_bytes // 4, tiles.words))](
        from_words,
        ids if source_ids is None else source_ids,
        to_words,
        ids if target_ids is None else target_ids,
        from_words.stride(0),
        to_words.stride(0),
        row_bytes // 4,
        WORDS=tiles.words,
        FROM_IDS=source_ids is not None,
        TO_IDS=target_ids is not None,
        num_warps=tiles.num_warps,
    )
