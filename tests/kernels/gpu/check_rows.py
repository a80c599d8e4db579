"""Norm, rotation and the write to the pages in one; and rows of a pool to and from images."""

from itertools import product

import pytest
import torch

from kernels.qk_rope import HeadNorm, HeadNorms, Heads, Places
from kernels.triton_block_copy import gather_images, move_rows, scatter_images
from kernels.triton_qk_rope import turn_and_write, turns
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, NAN_BYTE, pool, randn, relative_error

BLOCK = 4
ROWS = 5


def norm(x, weight, kind, eps):
    """As the layers do it, in torch."""
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if kind == HeadNorm.CAST_FIRST:
        return y.to(x.dtype) * weight
    return (y * weight).to(x.dtype) if kind == HeadNorm.WIDE else x


def turn(x, cos, sin):
    rotary = cos.shape[-1]
    front, half = x[..., :rotary].double(), rotary // 2
    turned = front * cos.double()[:, None] + front.roll(half, -1) * sin.double()[:, None]
    return torch.cat((turned, x[..., rotary:].double()), -1)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "head_dim", "rotary"),
    [
        (HeadNorm.CAST_FIRST, 4, 2, 32, 32),
        (HeadNorm.WIDE, 6, 1, 48, 16),
        (HeadNorm.NONE, 3, 3, 16, 16),
        (HeadNorm.NONE, 2, 1, 16, 0),
        *([] if INTERPRETED else [(HeadNorm.WIDE, 16, 2, 256, 64), (HeadNorm.CAST_FIRST, 32, 8, 128, 128)]),
    ],
)
def test_rows_equal_norm_rotation_and_write(kind, heads, kv_heads, head_dim, rotary):
    wide = randn(ROWS, heads + 2 * kv_heads, head_dim + 16, seed=1)[..., :head_dim]  # heads lie apart
    q, k, v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
    weight_type = torch.float32 if kind == HeadNorm.WIDE else torch.bfloat16
    weights = (None, None)
    if kind != HeadNorm.NONE:
        weights = (randn(head_dim, seed=2, dtype=weight_type), randn(head_dim, seed=3, dtype=weight_type))
    cos, sin = (randn(ROWS, rotary, seed=s) if rotary else None for s in (4, 5))
    k_plane, v_plane = pool(4, [(BLOCK, kv_heads, head_dim)] * 2, torch.bfloat16)
    blocks, offsets = torch.tensor([3, 3, 0, -1, 1], device=DEVICE), torch.tensor([0, 3, 2, 1, 1], device=DEVICE)
    norms, places = HeadNorms(kind, weights[0], weights[1], 1e-6), Places(blocks, offsets, cos, sin)
    out = turn_and_write(Heads(q, k, v), k_plane, v_plane, norms, places)
    expected_q, expected_k = norm(q, weights[0], kind, 1e-6), norm(k, weights[1], kind, 1e-6)
    if cos is not None:
        expected_q, expected_k = turn(expected_q, cos, sin), turn(expected_k, cos, sin)
    assert relative_error(out, expected_q) < 3e-3
    written = [r for r in range(ROWS) if blocks[r] >= 0]
    place = (blocks[written], offsets[written])
    assert relative_error(k_plane[place], expected_k[written]) < 3e-3
    assert torch.equal(v_plane[place], v[written])
    untouched = torch.ones(4, BLOCK, dtype=torch.bool, device=DEVICE).index_put_(
        place, torch.tensor(False, device=DEVICE)
    )
    assert k_plane[untouched].isnan().all()
    assert v_plane[untouched].isnan().all()


@pytest.mark.parametrize(("half", "scale"), [(32, 1.0), (5, 1.37)])
def test_turns_of_far_positions_are_as_exact_as_float32_angles(half, scale):
    positions = torch.tensor([0, 1, 4097, 262_143, 1 << 20], device=DEVICE)
    frequencies = (1e7 ** -(torch.arange(half, dtype=torch.float32) / half)).to(DEVICE)
    angles = (positions.float()[:, None] * frequencies).double()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        cos, sin = turns(positions, frequencies, scale, dtype)
        assert cos.shape == sin.shape == (5, 1, 2 * half)
        wanted = torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1)
        for made, want in zip((cos, sin), wanted, strict=True):
            assert (made[:, 0].double() - scale * want).abs().max() <= scale * bound


def test_planes_of_fp8_hold_scaled_rows():
    q, k, v = randn(ROWS, 2, 16, seed=6), 50 * randn(ROWS, 2, 16, seed=7), randn(ROWS, 2, 16, seed=8)
    k_plane, v_plane = pool(2, [(8, 2, 16)] * 2, torch.float8_e4m3fn)
    places = Places(torch.ones(ROWS, dtype=torch.int64, device=DEVICE), torch.arange(ROWS, device=DEVICE), None, None)
    none = HeadNorms(HeadNorm.NONE, None, None, 0.0)
    out = turn_and_write(Heads(q, k, v), k_plane, v_plane, none, places, kv_scales=(0.25, 2.0))
    assert torch.equal(out, q)
    most = torch.finfo(torch.float8_e4m3fn).max
    assert torch.equal(k_plane[1, :ROWS].float(), (k.float() * 4).clamp(-most, most).to(torch.float8_e4m3fn).float())
    assert torch.equal(v_plane[1, :ROWS].float(), (v.float() / 2).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("row_bytes", [256, 16384 + 256, 3 * 16384])
def test_images_are_the_rows_and_nothing_else_moves(row_bytes):
    generator = torch.Generator().manual_seed(9)
    rows = torch.randint(0, 256, (7, row_bytes), dtype=torch.uint8, generator=generator).to(DEVICE)
    ids = torch.tensor([5, 0, 6], device=DEVICE)
    images = torch.full((4, row_bytes), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    gather_images(rows, ids, images[:3])
    assert torch.equal(images[:3], rows[ids])
    assert (images[3] == NAN_BYTE).all()
    target = torch.zeros_like(rows)
    scatter_images(images[:3], target, ids)
    assert torch.equal(target[ids], rows[ids])
    assert not target[[1, 2, 3, 4]].any()
    moved = torch.zeros_like(rows)
    move_rows(rows, ids, moved, ids.flip(0))
    assert torch.equal(moved[ids.flip(0)], rows[ids])
    assert not moved[[1, 2, 3, 4]].any()


@pytest.mark.skipif(INTERPRETED, reason="pinned memory needs a GPU")
def test_images_may_lie_in_pinned_host_memory():
    rows = torch.randint(0, 256, (5, 1 << 16), dtype=torch.uint8, device=DEVICE)
    ids = torch.tensor([4, 1], device=DEVICE)
    images = torch.zeros((2, 1 << 16), dtype=torch.uint8).pin_memory()
    gather_images(rows, ids, images)
    torch.cuda.synchronize()
    assert torch.equal(images, rows[ids].cpu())
    back = torch.zeros_like(rows)
    scatter_images(images, back, ids)
    assert torch.equal(back[ids], rows[ids])


def test_every_offset_of_a_wide_pool_is_reached():
    """A stride between rows that is not the row's own length."""
    wide = torch.arange(6 * 512, dtype=torch.int32, device=DEVICE).view(torch.uint8).view(6, 2048)
    part = wide[:, 512:1024]
    images = torch.empty((2, 512), dtype=torch.uint8, device=DEVICE)
    gather_images(part, torch.tensor([1, 5], device=DEVICE), images)
    for image, row in product(range(2), (1, 5)):
        assert torch.equal(images[image], part[row]) == (row == (1, 5)[image])
