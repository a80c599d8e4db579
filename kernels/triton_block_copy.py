"""Rows of a pool to and from contiguous images, many at once: what moves blocks and slots between tiers.

A pool is a byte matrix [num_rows, row_bytes] whose rows are whole images, all layers together. The images may lie in
device memory or in pinned host memory, which the device reads and writes where it lies.
"""

# What is compiled by Triton has no types.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

WORDS = 4096  # int32 that a program moves: 16 KiB


@triton.jit
def _gather_kernel(pool_ptr, ids_ptr, images_ptr, pool_stride, images_stride, num_words, WORDS: tl.constexpr):
    image = tl.program_id(1)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    row = tl.load(ids_ptr + image).to(tl.int64)
    data = tl.load(pool_ptr + row * pool_stride + words, mask=words < num_words)
    tl.store(images_ptr + image.to(tl.int64) * images_stride + words, data, mask=words < num_words)


@triton.jit
def _scatter_kernel(pool_ptr, ids_ptr, images_ptr, pool_stride, images_stride, num_words, WORDS: tl.constexpr):
    image = tl.program_id(1)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    row = tl.load(ids_ptr + image).to(tl.int64)
    data = tl.load(images_ptr + image.to(tl.int64) * images_stride + words, mask=words < num_words)
    tl.store(pool_ptr + row * pool_stride + words, data, mask=words < num_words)


def gather_images(pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor) -> None:
    """Copies rows `ids` [n] int64 of a pool [num_rows, row_bytes] uint8 to images [n, row_bytes] uint8."""
    _launch(_gather_kernel, pool, ids, images)


def scatter_images(images: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
    """Copies images [n, row_bytes] uint8 to rows `ids` [n] int64, all different, of a pool."""
    _launch(_scatter_kernel, pool, ids, images)


def _launch(kernel: Any, pool: torch.Tensor, ids: torch.Tensor, images: torch.Tensor) -> None:
    num_images, row_bytes = images.shape
    assert pool.dtype == images.dtype == torch.uint8
    assert pool.shape[1] == row_bytes
    assert row_bytes % 16 == 0
    assert pool.stride(1) == images.stride(1) == 1
    assert pool.stride(0) % 16 == images.stride(0) % 16 == 0
    assert pool.data_ptr() % 16 == images.data_ptr() % 16 == 0
    assert ids.shape == (num_images,)
    assert ids.dtype == torch.int64
    if num_images == 0 or row_bytes == 0:
        return
    words, image_words = pool.view(torch.int32), images.view(torch.int32)
    kernel[(triton.cdiv(row_bytes // 4, WORDS), num_images)](
        words,
        ids,
        image_words,
        words.stride(0),
        image_words.stride(0),
        row_bytes // 4,
        WORDS=WORDS,
        num_warps=8,
    )
