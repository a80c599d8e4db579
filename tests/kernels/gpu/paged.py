"""What the checks share: where they run, pools full of NaN, and how far from float64 a result may be."""

import os
from dataclasses import dataclass

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
NAN_BYTE = 0xFF  # NaN in bfloat16, float32 and float8_e4m3fn alike


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same values on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def pool(
    num_blocks: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, gap_bytes: int = 256
) -> list[torch.Tensor]:
    """Planes [num_blocks, *shape] as the pools make them: views into one byte matrix, here of NaN in every byte."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
    rounded = [-(-size // 256) * 256 for size in sizes]
    images = torch.full((num_blocks, gap_bytes + sum(rounded)), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    planes: list[torch.Tensor] = []
    offset = gap_bytes
    for shape, size, step in zip(shapes, sizes, rounded, strict=True):
        planes.append(images[:, offset : offset + size].view(dtype).view(num_blocks, *shape))
        offset += step
    return planes


def shuffled_tables(lengths: list[int], block_size: int, num_blocks: int, seed: int) -> torch.Tensor:
    """Block tables [num_seqs, most + 1] int32; entries past a sequence's end name a block that does not exist."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    width = max(-(-length // block_size) for length in lengths) + 1
    tables = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)
    for s, length in enumerate(lengths):
        for b in range(-(-length // block_size)):
            tables[s, b] = order.pop()
    return tables.to(DEVICE)


def write_rows(plane: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [n, *row_shape] of one sequence, from its first."""
    places = torch.arange(rows.shape[0], device=plane.device)
    plane[table.long()[places // plane.shape[1]], places % plane.shape[1]] = rows


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of some sequences, written into shuffled blocks of a pool."""

    k_plane: torch.Tensor
    v_plane: torch.Tensor
    tables: torch.Tensor
    keys: list[torch.Tensor]  # [length, kv_heads, head_dim] of each sequence, as the planes hold them
    values: list[torch.Tensor]


def make_pages(
    lengths: list[int], kv_heads: int, head_dim: int, *, block_size: int, dtype: torch.dtype, seed: int, spare: int = 3
) -> Pages:
    """Random keys and values; every row that was not written is NaN."""
    num_blocks = sum(-(-length // block_size) for length in lengths) + spare
    shape = (block_size, kv_heads, head_dim)
    k_plane, v_plane = pool(num_blocks, [shape, shape], dtype)
    tables = shuffled_tables(lengths, block_size, num_blocks, seed)
    keys, values = (
        [randn(length, kv_heads, head_dim, seed=seed + 10 * s + kind).to(dtype) for s, length in enumerate(lengths)]
        for kind in (1, 2)
    )
    for s in range(len(lengths)):
        write_rows(k_plane, tables[s], keys[s])
        write_rows(v_plane, tables[s], values[s])
    return Pages(k_plane, v_plane, tables, keys, values)


def attend_exactly(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One row [heads, head_dim] over all keys [n, kv_heads, head_dim], float64."""
    group = q.shape[0] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    shares = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) * scale, -1)
    return torch.einsum("hn,nhd->hd", shares, v)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; NaN where out has one."""
    expected = expected.double()
    return ((out.double() - expected).norm() / expected.norm()).item()
