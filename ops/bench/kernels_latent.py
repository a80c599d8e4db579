"""Rows of latent attention, dense and sparse, and of sparse grouped heads."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.triton_mla import latent_splits, mla_decode, sparse_mla_decode
from kernels.triton_paged_decode import DecodeRows, SplitRule, plan_decode
from kernels.triton_selected import SelectedRows
from kernels.triton_softmax import AttentionTiles
from kernels.triton_sparse_decode import sparse_decode
from ops.bench.kernels_pages import BLOCK, Layout, Pages, as_pages, make_pages
from ops.bench.kernels_timing import DEVICE, Row, Run, Way, relative_error

LATENT, ROPE = 512, 64
SCALE = (128 + 64) ** -0.5


def _tiles_name(tiles: AttentionTiles) -> str:
    return f"split {tiles.split} keys {tiles.keys} h{tiles.heads} w{tiles.num_warps} s{tiles.num_stages}"


def latent_rows() -> list[Row]:
    """Dense and sparse MLA, and sparse grouped heads."""
    return [
        _mla_row("MLA B4 128K", 4, 131_072, 32),
        _mla_row("MLA B1 128K", 1, 131_072, 32),
        _mla_row("MLA B1 8K", 1, 8_192, 32),
        _mla_row("MLA B8 32K", 8, 32_768, 128),
        _sparse_mla_row("sparse MLA B64 2048", 64, 128),
        _sparse_mla_row("sparse MLA B1 2048", 1, 128),
        _sparse_row("sparse GQA B64 2048 16/2x256", 64),
    ]


def _mla_row(name: str, num_seqs: int, length: int, heads: int) -> Row:
    layout = Layout(num_seqs, length, (LATENT + ROPE,), (heads, LATENT + ROPE))
    few = [AttentionTiles(2048, *cut) for cut in ((64, 32, 8, 2), (32, 32, 4, 3), (64, 16, 8, 2))]
    many = [AttentionTiles(2048, *cut) for cut in ((64, 32, 8, 2), (64, 64, 8, 2), (32, 64, 8, 3))]
    bytes_read = num_seqs * length * (LATENT + ROPE) * 2
    return Row(
        name=f"{name} {heads} heads",
        make_inputs=lambda seed: make_pages(layout, seed),
        input_bytes=bytes_read,
        ways=[
            Way("ours", lambda x: _mla_run(as_pages(x), None)),
            Way("torch absorbed, contiguous", lambda x: _absorbed(as_pages(x)), is_peer=True),
        ],
        sweep=[
            *(
                Way(f"ours, split {s}", lambda x, s=s: _mla_run(as_pages(x), None, SplitRule(s, s)))
                for s in (256, 512, 1024, 2048, 4096)
            ),
            *(Way(_tiles_name(t), lambda x, t=t: _mla_run(as_pages(x), t)) for t in (few if heads <= 32 else many)),
        ],
        read_bytes=bytes_read,
        flops=2.0 * num_seqs * length * heads * (2 * LATENT + ROPE),
        error=lambda out, x: _mla_error(out, as_pages(x)),
    )


def _mla_run(x: Pages, tiles: AttentionTiles | None, rule: SplitRule | None = None) -> Run:
    rule = rule or latent_splits(x.q.shape[1])
    rows = DecodeRows(x.tables, x.ints(x.length), x.seqs())
    plan = plan_decode(rows, block_size=BLOCK, rule=rule, most_items=x.tables.shape[0] * rule.num_splits(x.length))
    return lambda: mla_decode(x.q, x.planes[0], plan, latent_dim=LATENT, scale=SCALE, tiles=tiles)


def _absorbed(x: Pages) -> Run:
    rows = torch.stack([x.rows(x.planes[0], s) for s in range(x.tables.shape[0])])

    def run() -> torch.Tensor:
        shares = torch.softmax(torch.matmul(x.q, rows.transpose(1, 2)).float() * SCALE, -1)
        return torch.matmul(shares.to(rows.dtype), rows[..., :LATENT])

    return run


def _exact_latents(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some heads of one row, float64."""
    shares = torch.softmax(q.double() @ rows.double().T * SCALE, -1)
    return shares @ rows[:, :LATENT].double()


def _mla_error(out: object, x: Pages) -> float:
    assert isinstance(out, torch.Tensor)
    last = x.tables.shape[0] - 1
    return max(relative_error(out[s, ::8], _exact_latents(x.q[s, ::8], x.rows(x.planes[0], s))) for s in {0, last})


def _sparse_mla_row(name: str, num_seqs: int, heads: int, length: int = 32_768, num_picks: int = 2_048) -> Row:

    row, query = (LATENT + ROPE,), (heads, LATENT + ROPE)
    layout = Layout(num_seqs, length, row, query, num_picks=num_picks, num_pools=length)
    bytes_read = num_seqs * num_picks * (LATENT + ROPE) * 2
    sweep = [
        *(AttentionTiles(split, 64, 32, 8, 2) for split in (256, 512, 2048)),
        AttentionTiles(1024, 64, 64, 8, 2),
        AttentionTiles(1024, 32, 64, 8, 3),
    ]
    return Row(
        name=f"{name} {heads} heads",
        make_inputs=lambda seed: make_pages(layout, seed),
        input_bytes=max(bytes_read, 64 << 20),
        ways=[
            Way("ours", lambda x: _sparse_mla_run(as_pages(x), None)),
            Way("gather + SDPA", lambda x: _gathered_mla(as_pages(x)), is_peer=True),
        ],
        sweep=[Way(_tiles_name(t), lambda x, t=t: _sparse_mla_run(as_pages(x), t)) for t in sweep],
        read_bytes=bytes_read,
        flops=2.0 * num_seqs * num_picks * heads * (2 * LATENT + ROPE),
        error=lambda out, x: _sparse_mla_error(out, as_pages(x)),
    )


def _selected(x: Pages, pool: int) -> SelectedRows:
    assert x.picks is not None
    return SelectedRows(x.picks, pool, x.ints(x.length - 1), x.seqs(), x.tables)


def _sparse_mla_run(x: Pages, tiles: AttentionTiles | None) -> Run:
    selected = _selected(x, 1)
    return lambda: sparse_mla_decode(x.q, x.planes[0], selected, latent_dim=LATENT, scale=SCALE, tiles=tiles)


def _gathered_mla(x: Pages) -> Run:
    assert x.picks is not None
    picks = x.picks.long()
    blocks = x.tables.long().gather(1, picks // BLOCK)

    def run() -> torch.Tensor:
        rows = x.planes[0][blocks, picks % BLOCK].unsqueeze(1)  # [B, 1, picks, C + R]
        return scaled_dot_product_attention(x.q.unsqueeze(1), rows, rows[..., :LATENT], scale=SCALE).squeeze(1)

    return run


def _sparse_mla_error(out: object, x: Pages) -> float:
    assert isinstance(out, torch.Tensor)
    assert x.picks is not None
    last = x.tables.shape[0] - 1
    return max(
        relative_error(out[s, ::8], _exact_latents(x.q[s, ::8], x.rows(x.planes[0], s)[x.picks[s].long()]))
        for s in {0, last}
    )


def _sparse_row(name: str, num_seqs: int, length: int = 32_768, num_tokens: int = 2_048) -> Row:
    pool, heads, kv_heads, dim = 16, 16, 2, 256
    num_picks = num_tokens // pool
    row, query = (kv_heads, dim), (heads, dim)
    layout = Layout(num_seqs, length, row, query, 2, num_picks=num_picks, num_pools=length // pool)
    bytes_read = num_seqs * num_picks * pool * kv_heads * dim * 2 * 2
    sweep = [AttentionTiles(split, 64, 16, 4, stages) for split in (512, 1024) for stages in (2, 3)]
    sweep += [AttentionTiles(512, 32, 16, 4, 4), AttentionTiles(512, 64, 16, 8, 3)]

    def make(inputs: object, tiles: AttentionTiles | None) -> Run:
        x = as_pages(inputs)
        selected = _selected(x, pool)
        return lambda: sparse_decode(x.q, x.planes[0], x.planes[1], selected, dim**-0.5, tiles=tiles)

    def gathered(inputs: object) -> Run:
        x = as_pages(inputs)
        tokens = _tokens(x, pool)
        blocks = x.tables.long().gather(1, tokens // BLOCK)

        def run() -> torch.Tensor:
            k, v = (plane[blocks, tokens % BLOCK].transpose(1, 2) for plane in x.planes)
            return scaled_dot_product_attention(x.q.unsqueeze(2), k, v, scale=dim**-0.5, enable_gqa=True)

        return run

    def error(out: object, inputs: object) -> float:
        assert isinstance(out, torch.Tensor)
        x = as_pages(inputs)
        tokens = _tokens(x, pool)[0]
        k, v = (x.rows(plane, 0)[tokens].double() for plane in x.planes)
        shares = torch.softmax(k[:, 0] @ x.q[0, 0].double() * dim**-0.5, 0)
        return relative_error(out.view(num_seqs, heads, dim)[0, 0], shares @ v[:, 0])

    return Row(
        name=name,
        make_inputs=lambda seed: make_pages(layout, seed),
        input_bytes=bytes_read,
        ways=[Way("ours", lambda x: make(x, None)), Way("gather + SDPA", gathered, is_peer=True)],
        sweep=[Way(_tiles_name(t), lambda x, t=t: make(x, t)) for t in sweep],
        read_bytes=bytes_read,
        error=error,
    )


def _tokens(x: Pages, pool: int) -> torch.Tensor:
    assert x.picks is not None
    return (x.picks.long()[:, :, None] * pool + torch.arange(pool, device=DEVICE)).flatten(1)
