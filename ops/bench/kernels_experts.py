"""Rows of what stands between mixers and after them: experts, norms, residual streams, sampling."""

# Peers and tensors' own methods have no full types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from kernels.hyper_connections import HyperRule, HyperWeights
from kernels.moe import Activation, ActivationKind, Routing, experts_reference
from kernels.sampling import Filters, draw
from kernels.sampling_rows import SamplingRows
from kernels.triton_hyper_connections import inject, mix_streams
from kernels.triton_moe import MoeTiles, ProductTiles, grouped_experts
from kernels.triton_norms import add_rms_norm, rms_norm_reference
from kernels.triton_routing import route_softmax
from kernels.triton_sampling import SAMPLING_TILES, SamplingTiles, draw_rows
from ops.bench.kernels_timing import DEVICE, Row, Run, Way, relative_error, seeded

TOP_K = 8
SWIGLU = Activation(ActivationKind.SWIGLU, None)
VOCAB = 151_936


@dataclass(frozen=True, slots=True)
class Experts:
    """One set: all sets of a row share the matrices, and choose other experts."""

    rows: torch.Tensor
    logits: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Of a layer's experts."""

    count: int = 256
    width: int = 2048
    inner: int = 512

    @property
    def num_bytes(self) -> int:
        """Of one."""
        return 3 * self.width * self.inner * 2


def expert_rows() -> list[Row]:
    """Experts by the number of rows."""
    return [_moe_row(num_rows, ExpertShape()) for num_rows in (1, 16, 64, 4096)]


def other_rows() -> list[Row]:
    """The rest of the file."""
    usual = Filters(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02)
    return [
        _norm_row(8192, 4096),
        _norm_row(64, 2048),
        _sampling_row("sampling 64 x 152K", usual),
        _sampling_row("sampling, top-p alone", Filters(top_p=0.9)),
        _sampling_row("sampling, no filter", Filters()),
        _sampling_row("sampling, greedy", Filters(temperature=0.0)),
        _hyper_row(64),
        _hyper_row(4096),
    ]


def _as_experts(inputs: object) -> Experts:
    assert isinstance(inputs, Experts)
    return inputs


def _moe_sweep(num_rows: int) -> list[MoeTiles]:
    if num_rows <= 64:
        cuts = (
            [(64, 128, 4, 4), (128, 128, 8, 3), (64, 256, 4, 3)],
            [(128, 64, 4, 4), (128, 128, 4, 4), (256, 64, 8, 4)],
        )
        rows = [(16, 0)]
    else:
        cuts = [(64, 64, 4, 3), (128, 64, 8, 4)], [(128, 64, 4, 3), (256, 64, 8, 4)]
        rows = [(64, 0), (64, 32), (128, 0), (128, 32)]
    return [MoeTiles(*places, ProductTiles(*up), ProductTiles(*down)) for places, up, down in product(rows, *cuts)]


def _tiles_name(tiles: MoeTiles) -> str:
    up, down = (f"{p.columns}x{p.inner} w{p.num_warps} s{p.num_stages}" for p in (tiles.up, tiles.down))
    return f"m{tiles.rows}+{tiles.rest} up {up} down {down}"


def _moe_row(num_rows: int, shape: ExpertShape) -> Row:
    shared: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make_inputs(seed: int) -> Experts:
        seeded(seed)
        if not shared:
            sizes = (shape.count, 2 * shape.inner, shape.width), (shape.count, shape.width, shape.inner)
            up, down = (torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02) for size in sizes)
            shared.append((up, down))
        rows = torch.randn((num_rows, shape.width), device=DEVICE).bfloat16()
        return Experts(rows, torch.randn((num_rows, shape.count), device=DEVICE), *shared[0])

    def ours(tiles: MoeTiles | None) -> Way:
        def make(inputs: object) -> Run:
            x = _as_experts(inputs)

            def run() -> torch.Tensor:
                routing = route_softmax(x.logits, top_k=TOP_K, renormalise=True)
                return grouped_experts(x.rows, routing, x.up, x.down, SWIGLU, tiles=tiles)

            return run

        return Way("ours" if tiles is None else _tiles_name(tiles), make)

    def by_torch(inputs: object) -> Run:
        x = _as_experts(inputs)
        grouped_mm: Any = torch._grouped_mm  # pyright: ignore[reportPrivateUsage]

        def run() -> torch.Tensor:
            weights, experts = torch.topk(x.logits.softmax(-1), TOP_K)
            weights = weights / weights.sum(-1, keepdim=True)
            order = experts.flatten().argsort()
            ends = torch.histc(experts.float(), shape.count, 0, shape.count - 1).cumsum(0).int()
            inner = grouped_mm(x.rows[order // TOP_K], x.up.transpose(1, 2), offs=ends)
            gate, raised = inner.chunk(2, -1)
            made = grouped_mm(functional.silu(gate) * raised, x.down.transpose(1, 2), offs=ends)
            out = torch.empty_like(made)
            out[order] = made
            return (out.view(num_rows, TOP_K, shape.width).float() * weights[..., None]).sum(1).bfloat16()

        return run

    def error(out: object, inputs: object) -> float:
        x = _as_experts(inputs)
        assert isinstance(out, torch.Tensor)
        few = torch.arange(0, num_rows, max(1, num_rows // 3), device=DEVICE)
        routing = route_softmax(x.logits[few], top_k=TOP_K, renormalise=True)
        used = routing.experts.unique()
        local = torch.searchsorted(used, routing.experts).cpu()
        wanted = experts_reference(
            x.rows[few].double().cpu(),
            Routing(local, routing.weights.double().cpu()),
            x.up[used].double().cpu(),
            x.down[used].double().cpu(),
            SWIGLU,
        )
        return relative_error(out[few].cpu(), wanted)

    active = shape.count * (1 - (1 - TOP_K / shape.count) ** num_rows)
    return Row(
        f"MoE {shape.count} experts top {TOP_K}, B{num_rows}",
        make_inputs,
        active * shape.num_bytes,
        [ours(None), Way("torch grouped_mm", by_torch, is_peer=True)],
        [ours(tiles) for tiles in _moe_sweep(num_rows)],
        read_bytes=active * shape.num_bytes + 2.0 * num_rows * shape.width,
        written_bytes=2.0 * num_rows * shape.width,
        flops=2.0 * num_rows * TOP_K * 3 * shape.width * shape.inner,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class NormInputs:
    """One set."""

    hidden: torch.Tensor  # becomes the sum on every run
    first: torch.Tensor  # as it was
    addend: torch.Tensor
    weight: torch.Tensor


def _norm_row(num_rows: int, width: int) -> Row:
    def make_inputs(seed: int) -> NormInputs:
        seeded(seed)
        hidden, addend = (torch.randn((num_rows, width), device=DEVICE).bfloat16() for _ in range(2))
        return NormInputs(hidden, hidden.clone(), addend, torch.randn(width, device=DEVICE).bfloat16())

    def way(name: str, function: Callable[[NormInputs], torch.Tensor], *, is_peer: bool = False) -> Way:
        def make(inputs: object) -> Run:
            assert isinstance(inputs, NormInputs)
            inputs.hidden.copy_(inputs.first)
            return lambda: function(inputs)

        return Way(name, make, is_peer=is_peer)

    def ours(x: NormInputs) -> torch.Tensor:
        return add_rms_norm(x.hidden, x.addend, x.weight, 1e-6, cast_first=True)

    def by_torch(x: NormInputs) -> torch.Tensor:
        x.hidden.add_(x.addend)
        return functional.rms_norm(x.hidden, (width,), x.weight, 1e-6)

    compiled: Any = torch.compile(by_torch)

    def error(out: object, inputs: object) -> float:
        assert isinstance(inputs, NormInputs)
        assert isinstance(out, torch.Tensor)
        return relative_error(out, rms_norm_reference(inputs.first + inputs.addend, inputs.weight, 1e-6))

    matrix_bytes = 2.0 * num_rows * width
    return Row(
        f"sum and norm {num_rows} x {width}",
        make_inputs,
        2 * matrix_bytes,
        [
            way("ours", ours),
            way("torch", by_torch, is_peer=True),
            way("torch.compile", lambda x: compiled(x), is_peer=True),
        ],
        [],
        read_bytes=2 * matrix_bytes,
        written_bytes=2 * matrix_bytes,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """One set."""

    logits: torch.Tensor
    rows: SamplingRows


def _sampling_row(name: str, filters: Filters, num_rows: int = 64, vocab_size: int = VOCAB) -> Row:
    def make_inputs(seed: int) -> SamplingInputs:
        seeded(seed)

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=DEVICE)

        rows = SamplingRows(
            column(filters.temperature, torch.float32),
            column(filters.top_k, torch.int32),
            column(filters.top_p, torch.float64),
            column(filters.min_p, torch.float64),
            torch.rand(num_rows, dtype=torch.float64, device=DEVICE),
        )
        return SamplingInputs(3 * torch.randn((num_rows, vocab_size), device=DEVICE), rows)

    def ours(tiles: SamplingTiles, title: str) -> Way:
        def make(inputs: object) -> Run:
            assert isinstance(inputs, SamplingInputs)
            return lambda: draw_rows(inputs.logits, inputs.rows, tiles=tiles)

        return Way(title, make)

    # All rows run the same two kernels: their cuts are tried on the first alone.
    cuts = ((512, 4096, 8), (512, 2048, 8), (256, 2048, 8), (256, 4096, 4), (256, 4096, 16))
    sweep = [
        ours(SamplingTiles(sorted=few, listed=listed, num_warps=warps), f"sorted {few} listed {listed} w{warps}")
        for few, listed, warps in cuts
        if filters.top_k
    ]

    def by_torch(inputs: object) -> Run:
        assert isinstance(inputs, SamplingInputs)
        return lambda: torch.sort(inputs.logits, descending=True)

    def error(tokens: object, inputs: object) -> float:
        """The share of some rows that got another token than the reference draws."""
        assert isinstance(inputs, SamplingInputs)
        assert isinstance(tokens, torch.Tensor)
        numbers: list[float] = inputs.rows.number.tolist()
        checked = range(0, num_rows, 8)
        wrong = [int(tokens[r]) != draw(inputs.logits[r].cpu(), filters, numbers[r]) for r in checked]
        return sum(wrong) / len(wrong)

    return Row(
        name,
        make_inputs,
        4.0 * num_rows * vocab_size,
        [ours(SAMPLING_TILES, "ours"), Way("torch.sort alone", by_torch, is_peer=True, exact=False)],
        sweep,
        read_bytes=4.0 * num_rows * vocab_size,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class HyperInputs:
    """One set."""

    streams: torch.Tensor
    output: torch.Tensor
    weights: HyperWeights


def _hyper_row(num_rows: int, width: int = 4096) -> Row:
    rule = HyperRule(1e-6, 1e-6, 20)

    def make_inputs(seed: int) -> HyperInputs:
        seeded(seed)
        weights = HyperWeights(
            torch.randn((24, 4 * width), device=DEVICE).bfloat16(),
            torch.randn(24, device=DEVICE),
            torch.ones(3, device=DEVICE),
        )
        streams = torch.randn((num_rows, 4, width), device=DEVICE).bfloat16()
        return HyperInputs(streams, torch.randn((num_rows, width), device=DEVICE).bfloat16(), weights)

    def ours(inputs: object) -> Run:
        assert isinstance(inputs, HyperInputs)
        return lambda: inject(inputs.output, inputs.streams, mix_streams(inputs.streams, inputs.weights, rule))

    streams_bytes = 2.0 * num_rows * 4 * width
    return Row(
        f"hyper-connections {num_rows} x 4 x {width}",
        make_inputs,
        streams_bytes * 1.25,
        [Way("ours", ours)],
        [],
        read_bytes=2.25 * streams_bytes,
        written_bytes=1.25 * streams_bytes,
    )
