"""Rows of indexers and their choice, and of what moves rows about."""

from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm

from kernels.host import ints
from kernels.qk_rope import HeadNorm, HeadNorms, Heads, Places
from kernels.triton_block_copy import gather_images, scatter_images
from kernels.triton_indexer import FP8, ScoreRows, ScoreTiles, index_scores
from kernels.triton_qk_rope import turn_and_write
from kernels.triton_topk import top_keys
from ops.bench.kernels_pages import BLOCK, Layout, as_pages, make_pages
from ops.bench.kernels_timing import DEVICE, Row, Run, Way, relative_error, seeded


def indexer_rows() -> list[Row]:
    """Scores of 64 heads, the choice of 2,048, and both."""
    return [
        _scores_row(torch.bfloat16, with_choice=False),
        _scores_row(FP8, with_choice=False),
        _choice_row(8, 131_072),
        _choice_row(128, 32_768),
        _scores_row(torch.bfloat16, with_choice=True),
        _scores_row(FP8, with_choice=True),
    ]


def _scores_row(dtype: torch.dtype, *, with_choice: bool, num_seqs: int = 8, length: int = 131_072) -> Row:
    heads, dim = 64, 128
    layout = Layout(num_seqs, length, (dim,), (heads, dim), dtype=dtype)
    sweep = [
        ScoreTiles(keys, split, 1, warps, stages)
        for keys, split, warps, stages in [
            *((128, split, 4, 3) for split in (512, 2048, 4096)),
            (128, 1024, 8, 3),
            (128, 1024, 4, 2),
            (128, 1024, 4, 4),
            (64, 1024, 4, 4),
            (64, 1024, 4, 3),
            (256, 2048, 8, 3),
        ]
    ]

    def make(inputs: object, tiles: ScoreTiles | None) -> Run:
        x = as_pages(inputs)
        visible = x.ints(length)
        rows = ScoreRows(x.tables, visible, x.seqs())
        weights = torch.rand((num_seqs, heads), device=DEVICE)

        def run() -> torch.Tensor:
            scores = index_scores(x.q, weights, x.planes[0], rows, most_keys=length, tiles=tiles)
            return top_keys(scores, visible, 2048) if with_choice else scores

        return run

    def by_torch(inputs: object) -> Run:
        x = as_pages(inputs)
        keys = torch.stack([x.rows(x.planes[0], s) for s in range(num_seqs)]).bfloat16()
        weights = torch.rand((num_seqs, heads, 1), device=DEVICE)

        def run() -> torch.Tensor:
            dots = torch.relu(torch.matmul(keys, x.q.transpose(1, 2)))
            scores = torch.matmul(dots.float(), weights).squeeze(-1)
            return scores.topk(2048, -1).indices if with_choice else scores

        return run

    kind = "fp8" if dtype == FP8 else "bf16"
    return Row(
        name=f"indexer{' + top-2048' if with_choice else ''} B8 128K {kind}",
        make_inputs=lambda seed: make_pages(layout, seed),
        input_bytes=num_seqs * length * dim * dtype.itemsize,
        ways=[
            Way("ours", lambda x: make(x, None)),
            Way("torch matmul" + (", topk" if with_choice else ""), by_torch, is_peer=True),
        ],
        sweep=[] if with_choice else [
            Way(f"keys {t.keys} split {t.split} w{t.num_warps} s{t.num_stages}", lambda x, t=t: make(x, t))
            for t in sweep
        ],
        read_bytes=num_seqs * length * dim * dtype.itemsize,
        flops=2.0 * num_seqs * length * heads * dim,
    )  # fmt: skip


def _choice_row(num_rows: int, length: int) -> Row:
    def make_inputs(seed: int) -> torch.Tensor:
        seeded(seed)
        return torch.randn((num_rows, length), device=DEVICE)

    def ours(inputs: object) -> Run:
        assert isinstance(inputs, torch.Tensor)
        visible = torch.full((num_rows,), length, dtype=torch.int32, device=DEVICE)
        return lambda: top_keys(inputs, visible, 2048)

    def peer(inputs: object) -> Run:
        assert isinstance(inputs, torch.Tensor)
        return lambda: inputs.topk(2048, -1).indices

    def error(out: object, inputs: object) -> float:
        """How many picks differ from torch's; without ties there are none."""
        assert isinstance(out, torch.Tensor)
        assert isinstance(inputs, torch.Tensor)
        return float((out.long().sort(1).values != inputs.topk(2048, -1).indices.sort(1).values).sum())

    return Row(
        name=f"top-2048 of {num_rows} x {length // 1024}K",
        make_inputs=make_inputs,
        input_bytes=num_rows * length * 4,
        ways=[Way("ours", ours), Way("torch.topk", peer, is_peer=True)],
        sweep=[],
        read_bytes=num_rows * length * 4,
        error=error,
    )


def move_rows() -> list[Row]:
    """Norm, rotation and write in one; blocks to and from images."""
    return [
        _turn_row("q/k norm + RoPE + write 4K 16/2x256", 4096, (16, 2, 256, 64), HeadNorm.WIDE),
        _turn_row("q/k norm + RoPE + write 1.3K 32/8x128", 1344, (32, 8, 128, 128), HeadNorm.CAST_FIRST),
        _turn_row("q/k norm + RoPE + write B1 16/2x256", 1, (16, 2, 256, 64), HeadNorm.WIDE),
        _copy_row("gather 256 blocks of 2 MB", to_host=False),
        _copy_row("scatter 256 blocks of 2 MB", to_host=False, back=True),
        _copy_row("gather 64 blocks of 2 MB to pinned", to_host=True),
        _copy_row("scatter 64 blocks of 2 MB from pinned", to_host=True, back=True),
    ]


@dataclass(frozen=True, slots=True)
class TurnInputs:
    """Rows of one projection, and where they go."""

    qkv: torch.Tensor  # [num_rows, heads + 2 * kv_heads, dim]
    num_kv_heads: int
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return self.qkv.shape[1] - 2 * self.num_kv_heads

    def turned(self, normed: torch.Tensor) -> torch.Tensor:
        """Rotates normed heads, in their own dtype."""
        rotary = self.cos.shape[-1]
        front = normed[..., :rotary]
        turned = torch.addcmul(front * self.cos, front.roll(rotary // 2, -1), self.sin.to(front.dtype))
        return torch.cat((turned, normed[..., rotary:]), -1)


def _turn_row(name: str, num_rows: int, sizes: tuple[int, int, int, int], kind: HeadNorm) -> Row:
    heads, kv_heads, dim, rotary = sizes
    row_bytes = (heads + 2 * kv_heads) * dim * 2

    def make_inputs(seed: int) -> TurnInputs:
        seeded(seed)
        num_blocks = -(-num_rows // BLOCK)
        images = torch.zeros((num_blocks, 4, BLOCK, kv_heads, dim), dtype=torch.bfloat16, device=DEVICE)
        places = torch.arange(num_rows, device=DEVICE)
        cos, sin = torch.randn((2, num_rows, 1, rotary), device=DEVICE).bfloat16()
        return TurnInputs(
            qkv=torch.randn((num_rows, heads + 2 * kv_heads, dim), device=DEVICE).bfloat16(),
            num_kv_heads=kv_heads,
            k_plane=images[:, 1],
            v_plane=images[:, 2],
            weight=torch.randn(dim, device=DEVICE),
            cos=cos,
            sin=sin,
            blocks=torch.randperm(num_blocks, device=DEVICE)[places // BLOCK],
            offsets=places % BLOCK,
        )

    def ours(inputs: object) -> Run:
        assert isinstance(inputs, TurnInputs)
        turning = heads + kv_heads
        q, k, v = inputs.qkv[:, :heads], inputs.qkv[:, heads:turning], inputs.qkv[:, turning:]
        norms = HeadNorms(kind, inputs.weight, inputs.weight, 1e-6)
        places = Places(inputs.blocks, inputs.offsets, inputs.cos, inputs.sin)
        return lambda: turn_and_write(Heads(q, k, v), inputs.k_plane, inputs.v_plane, norms, places)

    def by_torch(inputs: object) -> Run:
        assert isinstance(inputs, TurnInputs)
        x = inputs

        def run() -> torch.Tensor:
            wide = x.qkv[:, : heads + kv_heads].float()
            turned = x.turned(rms_norm(wide, (dim,), x.weight, 1e-6).bfloat16())
            x.k_plane.index_put_((x.blocks, x.offsets), turned[:, heads:])
            x.v_plane.index_put_((x.blocks, x.offsets), x.qkv[:, heads + kv_heads :])
            return turned[:, :heads]

        return run

    def error(out: object, inputs: object) -> float:
        assert isinstance(out, torch.Tensor)
        assert isinstance(inputs, TurnInputs)
        q = inputs.qkv[:, :heads].double()
        normed = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * inputs.weight.double()
        return relative_error(out, inputs.turned(normed))

    return Row(
        name=name,
        make_inputs=make_inputs,
        input_bytes=2 * num_rows * row_bytes,
        ways=[Way("ours", ours), Way("torch, eager operations", by_torch, is_peer=True)],
        sweep=[],
        written_bytes=2 * num_rows * row_bytes,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class CopyInputs:
    """A pool of images and images by themselves."""

    pool: torch.Tensor
    ids: torch.Tensor
    images: torch.Tensor


def _copy_row(name: str, *, to_host: bool, back: bool = False, block_bytes: int = 2 << 20) -> Row:
    num_blocks = 64 if to_host else 256
    total = num_blocks * block_bytes

    def make_inputs(seed: int) -> CopyInputs:
        seeded(seed)
        pool = torch.randint(0, 256, (2 * num_blocks, block_bytes), dtype=torch.uint8, device=DEVICE)
        ids = torch.randperm(2 * num_blocks, device=DEVICE)[:num_blocks]
        images = torch.empty((num_blocks, block_bytes), dtype=torch.uint8, device="cpu" if to_host else DEVICE)
        return CopyInputs(pool, ids, images.pin_memory() if to_host else images)

    def ours(inputs: object) -> Run:
        assert isinstance(inputs, CopyInputs)
        if back:
            return lambda: scatter_images(inputs.images, inputs.pool, inputs.ids)
        return lambda: gather_images(inputs.pool, inputs.ids, inputs.images)

    def one_by_one(inputs: object) -> Run:
        assert isinstance(inputs, CopyInputs)
        rows = [inputs.pool[row] for row in ints(inputs.ids.cpu())]

        def run() -> None:
            for image, row in zip(inputs.images, rows, strict=True):
                source, target = (image, row) if back else (row, image)
                target.copy_(source, non_blocking=True)

        return run

    return Row(
        name=name,
        make_inputs=make_inputs,
        input_bytes=1 << 30,
        ways=[
            Way("ours", ours, capture=not to_host),
            Way("a copy each", one_by_one, is_peer=True, capture=not to_host),
        ],
        sweep=[],
        written_bytes=0 if to_host else 2 * total,
        host_bytes=total if to_host else 0,
    )
