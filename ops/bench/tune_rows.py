"""What is tuned of kernels that look at one row at a time: norms, rotation, convolution, residual streams, copies."""

# Tensors' own methods have no full types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from dataclasses import dataclass

import torch

from kernels import hyper_connections, norms, qk_rope, slot_forms
from kernels.causal_conv import ConvWeights
from kernels.gated_norm import gated_group_rms_norm, rms_norm_silu_gate
from kernels.hyper_connections import HyperMix, HyperRule, HyperWeights
from kernels.norms import RmsWeights
from kernels.qk_rope import HeadNorm, HeadNorms, Heads, Places
from kernels.triton_block_copy import MOVE, CopyTiles, move_rows
from kernels.triton_causal_conv import CHUNK, STEP, ChunkTiles, StepTiles, causal_conv_chunk, causal_conv_step
from kernels.triton_hyper_connections import INJECT, MIX, SUM, ColumnTiles, SumTiles, inject, mix_streams
from kernels.triton_norms import GATED_NORM, RMS_NORM, NormTiles, add_rms_norm
from kernels.triton_norms import gated_group_rms_norm as triton_group_norm
from kernels.triton_norms import rms_norm_silu_gate as triton_silu_gate
from kernels.triton_qk_rope import TURN, TurnTiles, turn_and_write
from ops.bench.kernels_timing import DEVICE, seeded
from ops.bench.tune_case import Case, Rows, Tensors, choices

EPS = 1e-6
TAPS = 4
BLOCK = 64  # tokens
BOTH = (4096, 64)  # a chunk and a decode step: one choice must do for both
RULE = HyperRule(EPS, EPS, 20)


def row_cases() -> list[Case]:
    """At the shapes of ops/bench/shapes and of the kernel benchmark."""
    return [
        *hyper_cases(4, 4096),
        *(conv_chunk_case(channels) for channels in (8192, 6144)),
        *(conv_step_case(channels) for channels in (8192, 6144)),
        turn_case(16, 2, 256, 64),
        turn_case(32, 8, 128, 128),
        turn_case(32, 2, 128, 0),
        *(norm_case(width) for width in (2048, 2688, 4096)),
        gated_norm_case(32, 128, gate_first=False),
        gated_norm_case(8, 512, gate_first=True),
        move_case(over_link=False),
        move_case(over_link=True),
    ]


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def _long(first: int, end: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.int64, device=DEVICE)


@dataclass(frozen=True, slots=True)
class NormInputs:
    """One set."""

    hidden: torch.Tensor  # becomes the sum on every run
    addend: torch.Tensor
    weight: torch.Tensor


def norm_case(width: int) -> Case:
    """The sum with the residual and its norm, and the norm alone, which shares its choice."""

    def make(num_rows: int, seed: int) -> NormInputs:
        seeded(seed)
        return NormInputs(_bf16(num_rows, width), _bf16(num_rows, width), _bf16(width))

    def run(x: NormInputs, tiles: NormTiles) -> Tensors:
        return add_rms_norm(x.hidden, x.addend, x.weight, EPS, cast_first=False, tiles=tiles), x.hidden

    def reference(x: NormInputs) -> Tensors:
        return norms.add_rms_norm(x.hidden, x.addend, RmsWeights(x.weight, EPS, cast_first=False)), x.hidden

    candidates = choices(NormTiles, rows=(1, 2), num_warps=(4, 8, 16)) + choices(NormTiles, rows=(1,), num_warps=(1, 2))
    return Case(
        RMS_NORM, {"width": width}, (Rows(None, BOTH, candidates),), make, run, reference, lambda n: 4.0 * n * width
    )


@dataclass(frozen=True, slots=True)
class GatedInputs:
    """One set."""

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor


def gated_norm_case(parts: int, width: int, *, gate_first: bool) -> Case:
    """As GDN takes it after its recurrence, or, gate first, Mamba2."""

    def make(num_rows: int, seed: int) -> GatedInputs:
        seeded(seed)
        weight = torch.randn(parts * width if gate_first else width, device=DEVICE)
        return GatedInputs(_bf16(num_rows, parts * width), _bf16(num_rows, parts * width), weight)

    def run(x: GatedInputs, tiles: NormTiles) -> Tensors:
        if gate_first:
            return (triton_group_norm(x.x, x.gate, x.weight, num_groups=parts, eps=EPS, tiles=tiles),)
        return (triton_silu_gate(x.x.unflatten(1, (parts, width)), x.gate, x.weight, EPS, tiles=tiles),)

    def reference(x: GatedInputs) -> Tensors:
        if gate_first:
            return (gated_group_rms_norm(x.x, x.gate, x.weight, num_groups=parts, eps=EPS),)
        x_parts, gate = (part.unflatten(1, (parts, width)) for part in (x.x, x.gate))
        return (rms_norm_silu_gate(x_parts, gate, x.weight, EPS),)

    rows = [max(1, cut // width) for cut in (1024, 2048, 4096)]
    candidates = choices(NormTiles, rows=rows, num_warps=(1, 2, 4))
    return Case(
        GATED_NORM,
        {"width": width},
        (Rows(None, BOTH, candidates),),
        make,
        run,
        reference,
        lambda n: 4.0 * n * parts * width,
    )


@dataclass(frozen=True, slots=True)
class TurnInputs:
    """One set: rows of a projection, and where they go."""

    heads: Heads
    norms: HeadNorms
    places: Places
    planes: torch.Tensor  # [2, num_blocks, BLOCK, kv_heads, head_dim]


def turn_case(heads: int, kv_heads: int, head_dim: int, rotary: int) -> Case:
    """Norm, rotation and write of one layer's heads; without rotation where `rotary` is 0."""
    sizes = (heads, kv_heads, kv_heads)

    def make(num_rows: int, seed: int) -> TurnInputs:
        seeded(seed)
        at = _long(0, num_rows)
        weights = torch.randn((2, head_dim), device=DEVICE)
        turns = torch.randn((2, num_rows, 1, rotary), device=DEVICE).bfloat16()
        cos, sin = turns if rotary else (None, None)
        num_blocks = -(-num_rows // BLOCK)
        planes = torch.zeros((2, num_blocks, BLOCK, kv_heads, head_dim), dtype=torch.bfloat16, device=DEVICE)
        return TurnInputs(
            Heads(*_bf16(num_rows, sum(sizes), head_dim).split(sizes, 1)),
            HeadNorms(HeadNorm.WIDE, weights[0], weights[1], EPS),
            Places(torch.randperm(num_blocks, device=DEVICE)[at // BLOCK], at % BLOCK, cos, sin),
            planes,
        )

    def run(x: TurnInputs, tiles: TurnTiles) -> Tensors:
        return turn_and_write(x.heads, x.planes[0], x.planes[1], x.norms, x.places, tiles=tiles), x.planes

    def reference(x: TurnInputs) -> Tensors:
        return qk_rope.turn_and_write(x.heads, x.planes[0], x.planes[1], x.norms, x.places), x.planes

    every = choices(TurnTiles, heads=(2, 4, 8, 16, 32), num_warps=(1, 2, 4, 8))
    # A thread has one load to four of each row.
    cuts = tuple(cut for cut in every if cut.heads <= heads and 8 <= cut.heads * head_dim // (32 * cut.num_warps) <= 32)
    return Case(
        TURN,
        {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        (Rows(None, BOTH, cuts),),
        make,
        run,
        reference,
        lambda n: 2.0 * n * sum(sizes) * head_dim,
    )


@dataclass(frozen=True, slots=True)
class ConvInputs:
    """One set; tails are read in one half and written in the other."""

    x: torch.Tensor
    tails: torch.Tensor
    slot_in: torch.Tensor
    slot_out: torch.Tensor
    weights: ConvWeights


def _make_conv(num_rows: int, num_slots: int, channels: int, seed: int) -> ConvInputs:
    seeded(seed)
    weights = ConvWeights(torch.randn((TAPS, channels), device=DEVICE), None, True)
    tails = _bf16(2 * num_slots, TAPS - 1, channels)
    return ConvInputs(_bf16(num_rows, channels), tails, _long(0, num_slots), _long(num_slots, 2 * num_slots), weights)


def conv_chunk_case(channels: int) -> Case:
    """A chunk of one sequence."""

    def run(x: ConvInputs, tiles: ChunkTiles) -> Tensors:
        return causal_conv_chunk(x.x, x.tails, x.slot_in, x.slot_out, x.weights, tiles=tiles), x.tails

    def reference(x: ConvInputs) -> Tensors:
        return slot_forms.causal_conv_chunk(x.x, x.tails, x.slot_in, x.slot_out, x.weights), x.tails

    every = choices(ChunkTiles, rows=(4, 8, 16, 32), channels=(128, 256, 512, 1024), num_warps=(1, 2, 4))
    # A thread has four to eight channels: one load of each row.
    cuts = tuple(cut for cut in every if cut.channels // (32 * cut.num_warps) in (4, 8))
    return Case(
        CHUNK,
        {"channels": channels},
        (Rows(1024, (512,), cuts), Rows(None, (4096,), cuts)),
        lambda num_rows, seed: _make_conv(num_rows, 1, channels, seed),
        run,
        reference,
        lambda n: 2.0 * n * channels,
    )


def conv_step_case(channels: int) -> Case:
    """A row of each of several sequences."""

    def run(x: ConvInputs, tiles: StepTiles) -> Tensors:
        return causal_conv_step(x.x, x.tails, x.slot_in, x.slot_out, x.weights, tiles=tiles), x.tails

    def reference(x: ConvInputs) -> Tensors:
        return slot_forms.causal_conv_step(x.x, x.tails, x.slot_in, x.slot_out, x.weights), x.tails

    return Case(
        STEP,
        {"channels": channels},
        (Rows(None, (64, 8), choices(StepTiles, channels=(128, 256, 512, 1024), num_warps=(1, 2, 4))),),
        lambda num_rows, seed: _make_conv(num_rows, num_rows, channels, seed),
        run,
        reference,
        lambda n: 2.0 * n * channels * TAPS,
    )


@dataclass(frozen=True, slots=True)
class HyperInputs:
    """One set."""

    streams: torch.Tensor
    output: torch.Tensor
    weights: HyperWeights
    mix: HyperMix


def hyper_cases(count: int, width: int) -> list[Case]:
    """The three launches of a block; the first two are one call, tuned one after the other."""
    mixes = (2 + count) * count

    def make(num_rows: int, seed: int) -> HyperInputs:
        seeded(seed)
        weights = HyperWeights(
            _bf16(mixes, count * width) * (count * width) ** -0.5,
            torch.randn(mixes, device=DEVICE),
            torch.ones(3, device=DEVICE),
        )
        mix = HyperMix(
            _bf16(num_rows, width), *(torch.rand((num_rows, *of), device=DEVICE) for of in ((count,), (count, count)))
        )
        return HyperInputs(_bf16(num_rows, count, width), _bf16(num_rows, width), weights, mix)

    def mixed(x: HyperInputs, sum_tiles: SumTiles | None, mix_tiles: ColumnTiles | None) -> Tensors:
        made = mix_streams(x.streams, x.weights, RULE, sum_tiles=sum_tiles, mix_tiles=mix_tiles)
        return made.collapsed, made.post, made.comb

    def mixed_in_torch(x: HyperInputs) -> Tensors:
        made = hyper_connections.mix_streams(x.streams, x.weights, RULE)
        return made.collapsed, made.post, made.comb

    shape = {"streams": count, "width": width}
    sums = tuple(
        SumTiles(*cut)
        for cut in (
            *((16, inner, cut, warps, 4) for inner, warps in ((128, 2), (256, 4)) for cut in (1024, 2048)),
            *((64, 64, cut, 4, stages) for cut in (256, 512, 1024) for stages in (3, 4)),
            *((64, 32, cut, 4, 4) for cut in (256, 512)),
            *((64, 128, cut, 4, 4) for cut in (512, 1024)),
            *((rows, 64, 512, warps, 4) for rows, warps in ((32, 4), (64, 8), (128, 4), (128, 8))),
        )
    )
    every = choices(ColumnTiles, columns=(256, 512, 1024, 2048), num_warps=(1, 2, 4, 8))
    columns = tuple(cut for cut in every if 64 <= cut.columns // cut.num_warps <= 512)
    of_sums, of_columns = (Rows(None, BOTH, sums),), (Rows(None, BOTH, columns),)

    def num_bytes(num_rows: int) -> float:
        return 2.0 * num_rows * count * width

    return [
        Case(SUM, shape, of_sums, make, lambda x, cut: mixed(x, cut, None), mixed_in_torch, num_bytes),
        Case(MIX, shape, of_columns, make, lambda x, cut: mixed(x, None, cut), mixed_in_torch, num_bytes),
        Case(
            INJECT,
            shape,
            of_columns,
            make,
            lambda x, cut: (inject(x.output, x.streams, x.mix, tiles=cut),),
            lambda x: (hyper_connections.inject(x.output, x.streams, x.mix),),
            num_bytes,
        ),
    ]


@dataclass(frozen=True, slots=True)
class MoveInputs:
    """Images, and the pool that they go to."""

    source: torch.Tensor
    pool: torch.Tensor
    source_ids: torch.Tensor
    ids: torch.Tensor


def move_case(*, over_link: bool, image_bytes: int = 2 << 20) -> Case:
    """Images of blocks from pinned memory, or from the device's own, to a pool."""

    def make(num_rows: int, seed: int) -> MoveInputs:
        seeded(seed)
        source = torch.randint(0, 256, (num_rows, image_bytes), dtype=torch.uint8, device=DEVICE)
        if over_link and DEVICE == "cuda":
            source = source.cpu().pin_memory()
        pool = torch.zeros((num_rows, image_bytes), dtype=torch.uint8, device=DEVICE)
        return MoveInputs(source, pool, _long(0, num_rows), torch.randperm(num_rows, device=DEVICE))

    def run(x: MoveInputs, tiles: CopyTiles) -> Tensors:
        move_rows(x.source, x.source_ids, x.pool, x.ids, tiles=tiles)
        return (x.pool,)

    def reference(x: MoveInputs) -> Tensors:
        x.pool[x.ids] = x.source.to(x.pool.device)
        return (x.pool,)

    return Case(
        MOVE,
        {"over_link": int(over_link)},
        (
            Rows(
                None, (64 if over_link else 256,), choices(CopyTiles, words=(1024, 2048, 4096, 8192), num_warps=(4, 8))
            ),
        ),
        make,
        run,
        reference,
        lambda _: float(1 << 30),
        few_rows=16,
        capture=not over_link,
    )
