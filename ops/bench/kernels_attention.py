"""Rows of paged attention: decode over ragged and equal histories, and chunks of a prompt over what came before."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.gluon_paged_prefill import ROWS_PER_TILE, GroupTiles, grouped_prefill, is_fit
from kernels.triton_paged_decode import (
    SPLITS,
    DecodePlan,
    DecodeRows,
    DecodeTiles,
    SplitRule,
    paged_decode,
    plan_decode,
)
from kernels.triton_paged_prefill import ChunkRows, PrefillTiles, paged_prefill, plan_prefill, prefill_tiles
from ops.bench.kernels_reads import read_way
from ops.bench.kernels_timing import DEVICE, Row, Run, Way, relative_error, seeded

BLOCK = 64
FP8 = torch.float8_e4m3fn
CHECKED_HEADS = 4  # of a result, compared with float64
CHECKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a layer."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.dim}" + (" fp8" if self.dtype == FP8 else "")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Queries and the pages they read."""

    q: torch.Tensor
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    tables: torch.Tensor
    lengths: list[int]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def history(self, plane: torch.Tensor, s: int) -> torch.Tensor:
        """[length, kv_heads, dim] of one sequence, copied out."""
        return plane[self.tables[s, : -(-self.lengths[s] // BLOCK)].long()].flatten(0, 1)[: self.lengths[s]]

    def contiguous(self, plane: torch.Tensor) -> torch.Tensor:
        """[num_seqs, kv_heads, length, dim] bfloat16, of sequences of equal length."""
        rows = torch.stack([self.history(plane, s) for s in range(len(self.lengths))])
        return rows.bfloat16().transpose(1, 2).contiguous()


def make_inputs(shape: Shape, lengths: list[int], num_rows: int, seed: int) -> Inputs:
    """Shuffled blocks whose planes are two of four parts of an image."""
    seeded(seed)
    counts = [-(-length // BLOCK) for length in lengths]
    part = BLOCK * shape.kv_heads * shape.dim
    images = torch.empty((sum(counts), 4, part), dtype=shape.dtype, device=DEVICE)
    for block in range(0, images.shape[0], 1024):
        piece = images[block : block + 1024, 1:3]
        piece.copy_(torch.randn(piece.shape, device=DEVICE))
    k_plane, v_plane = (images[:, i].view(-1, BLOCK, shape.kv_heads, shape.dim) for i in (1, 2))
    order = torch.randperm(images.shape[0], device=DEVICE, dtype=torch.int32)
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32, device=DEVICE)
    for s, count in enumerate(counts):
        first = sum(counts[:s])
        tables[s, :count] = order[first : first + count]
    q = torch.randn((num_rows, shape.heads, shape.dim), device=DEVICE).bfloat16()
    return Inputs(q, k_plane, v_plane, tables, lengths)


def decode_rows() -> list[Row]:
    """One row a sequence."""
    wide, deep = Shape(32, 8, 128), Shape(16, 2, 256)
    ragged = [int(1024 * 128 ** (i / 15)) for i in range(16)]
    return [
        _decode_row("decode B1 128K", wide, [131_072]),
        _decode_row("decode B32 4K", wide, [4_096] * 32),
        _decode_row("decode B8 128K", deep, [131_072] * 8),
        _decode_row("decode B1 128K", deep, [131_072]),
        _decode_row("decode B1 32K", deep, [32_768]),
        _decode_row("decode B1 8K", deep, [8_192]),
        _decode_row("decode B1 8K", wide, [8_192]),
        _decode_row("decode B1 128K", Shape(32, 8, 128, FP8), [131_072]),
        _decode_row("decode B8 128K", Shape(16, 2, 256, FP8), [131_072] * 8),
        _decode_row("decode ragged 1K-128K", wide, ragged),
    ]


def _decode_row(name: str, shape: Shape, lengths: list[int]) -> Row:
    tokens = sum(lengths)
    fixed = [SplitRule(split, split) for split in (256, 512, 1024, 2048)]
    sweep = [_decode_way(rule, DecodeTiles(64, 4, stages)) for rule in (SPLITS, *fixed) for stages in (2, 3)]
    sweep += [_decode_way(SPLITS, DecodeTiles(*cut)) for cut in ((64, 2, 2), (64, 2, 3), (64, 4, 4), (32, 4, 4))]
    sweep += [_decode_way(SPLITS, DecodeTiles(64, 4, 2, most_programs=528))]
    peers: list[Way] = []
    if len(set(lengths)) == 1:
        peers = [_sdpa_decode(backend) for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)]
    else:
        even = [tokens // len(lengths)] * len(lengths)
        # Another question over the same blocks: what an even split of the same tokens would take.
        run_even: Callable[[object], Run] = lambda x: _decode_run(_as_inputs(x), None, even)  # noqa: E731
        peers = [Way("ours, even lengths", run_even, is_peer=True, exact=False)]
    return Row(
        name=f"{name} {shape}",
        make_inputs=lambda seed: make_inputs(shape, lengths, len(lengths), seed),
        input_bytes=tokens * shape.kv_bytes,
        ways=[Way("ours", lambda x: _decode_run(_as_inputs(x), None)), *peers, read_way(tokens * shape.kv_bytes)],
        sweep=sweep,
        read_bytes=tokens * shape.kv_bytes,
        flops=4.0 * tokens * shape.heads * shape.dim if shape.heads > 8 * shape.kv_heads else 0.0,
        error=lambda out, x: _decode_error(out, _as_inputs(x)),
    )


def _as_inputs(inputs: object) -> Inputs:
    assert isinstance(inputs, Inputs)
    return inputs


def _decode_way(rule: SplitRule, tiles: DecodeTiles) -> Way:
    name = f"split {rule.shortest}-{rule.longest} keys {tiles.keys} w{tiles.num_warps} s{tiles.num_stages}"
    if tiles.most_programs < 1 << 16:
        name += f" p{tiles.most_programs}"
    return Way(name, lambda x: _decode_run(_as_inputs(x), tiles, rule=rule))


def _decode_run(
    x: Inputs, tiles: DecodeTiles | None, lengths: list[int] | None = None, *, rule: SplitRule = SPLITS
) -> Run:
    plan = _plan(x, lengths or x.lengths, rule)
    return lambda: paged_decode(x.q, x.k_plane, x.v_plane, plan, x.scale, tiles=tiles)


def _plan(x: Inputs, lengths: list[int], rule: SplitRule) -> DecodePlan:
    seqs = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    tables = x.tables
    if lengths is not x.lengths:
        # Other lengths over the same blocks: the blocks are dealt out anew.
        blocks = torch.cat([row[: -(-n // BLOCK)] for row, n in zip(x.tables, x.lengths, strict=True)])
        width = -(-max(lengths) // BLOCK)
        tables = blocks[torch.arange(len(lengths) * width, device=DEVICE) % blocks.numel()].view(len(lengths), width)
    rows = DecodeRows(tables, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), seqs)
    most = sum(rule.num_splits(length) for length in lengths)
    return plan_decode(rows, block_size=BLOCK, rule=rule, most_items=most)


def _sdpa_decode(backend: SDPBackend) -> Way:
    def make(inputs: object) -> Run:
        x = _as_inputs(inputs)
        q = x.q.unsqueeze(2)  # [B, heads, 1, dim]
        k, v = x.contiguous(x.k_plane), x.contiguous(x.v_plane)

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, scale=x.scale, enable_gqa=True)

        return run

    return Way(f"SDPA {backend.name.split('_')[0].lower()}, contiguous", make, is_peer=True)


def _decode_error(out: object, x: Inputs) -> float:
    assert isinstance(out, torch.Tensor)
    out = out.view(x.q.shape)
    errors: list[float] = []
    for s in range(0, len(x.lengths), max(1, len(x.lengths) // CHECKED_ROWS)):
        errors.append(_exact_error(out[s], x.q[s], x, s, x.lengths[s]))
    return max(errors)


def _exact_error(out: torch.Tensor, q: torch.Tensor, x: Inputs, s: int, num_keys: int) -> float:
    """Of some heads of one row, against float64."""
    group = q.shape[0] // x.k_plane.shape[2]
    heads = list(range(0, q.shape[0], max(1, q.shape[0] // CHECKED_HEADS)))
    keys, values = (x.history(plane, s)[:num_keys] for plane in (x.k_plane, x.v_plane))
    expected: list[torch.Tensor] = []
    for head in heads:
        shares = torch.softmax(keys[:, head // group].double() @ q[head].double() * x.scale, 0)
        expected.append(shares @ values[:, head // group].double())
    return relative_error(out[heads], torch.stack(expected))


def prefill_rows() -> list[Row]:
    """A chunk over its history, and whole prompts."""
    wide, deep = Shape(32, 8, 128), Shape(16, 2, 256)
    return [
        _prefill_row("prefill 16K", wide, 16_384, 16_384),
        _prefill_row("prefill 8K over 128K", wide, 131_072, 8_192),
        _prefill_row("prefill 4K over 32K", wide, 32_768, 4_096),
        _prefill_row("prefill 16K", deep, 16_384, 16_384),
        _prefill_row("prefill 4K over 32K", deep, 32_768, 4_096),
        _prefill_row("prefill 64 over 128K", wide, 131_136, 64),
        _prefill_row("prefill 64 over 128K", deep, 131_136, 64),
        _prefill_row("prefill 512 over 128K", deep, 131_584, 512),
        _prefill_row("prefill 16K", Shape(32, 8, 64), 16_384, 16_384),
    ]


def _group_run(x: Inputs, tiles: GroupTiles | None) -> Run:
    num_rows = x.q.shape[0]
    chunks = ChunkRows(x.tables, (x.lengths[0] - num_rows,), (0, num_rows))
    plan = plan_prefill(chunks, (0,), block_size=BLOCK, rows_per_tile=ROWS_PER_TILE)
    return lambda: grouped_prefill(x.q, x.k_plane, x.v_plane, plan, x.scale, tiles=tiles)


def _our_prefill_run(x: Inputs) -> Run:
    """As kernels/triton_attention.py chooses."""
    if is_fit(x.q.device, block_size=BLOCK, head_dim=x.q.shape[2]):
        return _group_run(x, None)
    return _prefill_run(x, prefill_tiles(x.q.shape[2]))


def _prefill_row(name: str, shape: Shape, num_keys: int, num_rows: int) -> Row:
    pairs = num_rows * (num_keys - num_rows) + num_rows * (num_rows + 1) // 2
    tiles = [
        PrefillTiles(64, 64, 4, 3, bulk_copies=True),
        PrefillTiles(128, 64, 8, 2, bulk_copies=True),
        PrefillTiles(128, 64, 8, 4, bulk_copies=True),
        PrefillTiles(128, 32, 8, 3, bulk_copies=True),
        PrefillTiles(64, 64, 4, 3, bulk_copies=False),
    ]
    by_groups = [
        Way(f"groups s{stages}", lambda x, s=stages: _group_run(_as_inputs(x), GroupTiles(s))) for stages in (2, 3, 4)
    ]
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    peers = [_sdpa_prefill(backend, shape, num_keys, num_rows) for backend in backends]
    return Row(
        name=f"{name} {shape}",
        make_inputs=lambda seed: make_inputs(shape, [num_keys], num_rows, seed),
        input_bytes=1 << 30,  # one set: what is read once does not stay in the cache
        ways=[Way("ours", lambda x: _our_prefill_run(_as_inputs(x))), *peers],
        sweep=[*by_groups, *(_prefill_way(cut) for cut in tiles)],
        flops=4.0 * pairs * shape.heads * shape.dim,
        error=lambda out, x: _prefill_error(out, _as_inputs(x)),
    )


def _prefill_way(tiles: PrefillTiles) -> Way:
    name = f"{tiles.rows}x{tiles.keys} w{tiles.num_warps} s{tiles.num_stages}" + (" bulk" if tiles.bulk_copies else "")
    return Way(name, lambda x: _prefill_run(_as_inputs(x), tiles))


def _prefill_run(x: Inputs, tiles: PrefillTiles) -> Run:
    num_rows = x.q.shape[0]
    chunks = ChunkRows(x.tables, (x.lengths[0] - num_rows,), (0, num_rows))
    plan = plan_prefill(chunks, (0,), block_size=BLOCK, rows_per_tile=tiles.rows)
    return lambda: paged_prefill(x.q, x.k_plane, x.v_plane, plan, x.scale, tiles=tiles)


def _sdpa_prefill(backend: SDPBackend, shape: Shape, num_keys: int, num_rows: int) -> Way:
    """A chunk over history goes without a mask, and its FLOPs are counted so: not every backend has one for it."""
    whole = num_keys == num_rows

    def make(inputs: object) -> Run:
        x = _as_inputs(inputs)
        q = x.q.transpose(0, 1).unsqueeze(0)
        k, v = x.contiguous(x.k_plane), x.contiguous(x.v_plane)

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=whole, scale=x.scale, enable_gqa=True)

        return run

    flops = None if whole else 4.0 * num_keys * num_rows * shape.heads * shape.dim
    name = f"SDPA {backend.name.split('_')[0].lower()}" + ("" if whole else ", no mask")
    return Way(name, make, flops=flops, is_peer=True, exact=whole)


def _prefill_error(out: object, x: Inputs) -> float:
    assert isinstance(out, torch.Tensor)
    num_rows = x.q.shape[0]
    if out.ndim == 4:
        out = out[0].transpose(0, 1)
    errors: list[float] = []
    for row in {0, 1, num_rows // 2 + 1, num_rows - 1}:
        num_keys = x.lengths[0] - num_rows + row + 1
        errors.append(_exact_error(out[row], x.q[row], x, 0, num_keys))
    return max(errors)
