"""What is tuned of kernels that multiply matrices: attention of chunks, Mamba2, experts."""

# Tensors' own methods have no full types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import moe, slot_forms
from kernels.gluon_interface import is_available
from kernels.gluon_paged_prefill import GROUPS, ROWS_PER_TILE, GroupTiles, grouped_prefill, is_fit
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.moe import Activation, ActivationKind, Routing
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_mamba2 import CHUNK, STEP, ScanTiles, StepTiles, mamba2_chunk, mamba2_step
from kernels.triton_moe import EXPERTS, MoeTiles, ProductTiles, grouped_experts
from kernels.triton_paged_prefill import ChunkRows, PrefillPlan, plan_prefill
from ops.bench.kernels_attention import BLOCK, Inputs, Shape, make_inputs
from ops.bench.kernels_timing import DEVICE, seeded
from ops.bench.tune_case import Case, Rows, Tensors, choices

SWIGLU = Activation(ActivationKind.SWIGLU, None)
ONE_SET = float(1 << 30)  # bytes of a set that need no second one beside it


def wide_cases() -> list[Case]:
    """At the shapes of ops/bench/shapes and of the kernel benchmark."""
    return [
        experts_case(256, 2048, 512, 8),
        *(mamba2_chunk_case(heads, 8, 128, 64) for heads in (64, 128)),
        *(mamba2_step_case(heads, 8, 128, 64) for heads in (64, 128)),
        *(prefill_cases() if _has_groups() else []),
    ]


def _has_groups() -> bool:
    """Whether attention by groups of warps runs on the card here, or compiles where there is none."""
    return is_available() and (DEVICE == "cpu" or is_fit(torch.device(DEVICE), block_size=BLOCK, head_dim=128))


def prefill_cases() -> list[Case]:
    """By what stages fit into shared memory; of 256 channels it is two, and there is nothing to choose."""
    return [prefill_case(Shape(32, 8, 64), (2, 4, 5, 6)), prefill_case(Shape(32, 8, 128), (2, 4, 5))]


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A prompt's rows, and how they are cut."""

    inputs: Inputs
    plan: PrefillPlan


def prefill_case(shape: Shape, stages: tuple[int, ...]) -> Case:
    """A whole prompt."""

    def make(num_rows: int, seed: int) -> PrefillInputs:
        inputs = make_inputs(shape, [num_rows], num_rows, seed)
        chunks = ChunkRows(inputs.tables, (0,), (0, num_rows))
        return PrefillInputs(inputs, plan_prefill(chunks, (0,), block_size=BLOCK, rows_per_tile=ROWS_PER_TILE))

    def run(x: PrefillInputs, tiles: GroupTiles) -> Tensors:
        one = x.inputs
        return (grouped_prefill(one.q, one.k_plane, one.v_plane, x.plan, one.scale, tiles=tiles),)

    def reference(x: PrefillInputs) -> Tensors:
        one = x.inputs
        histories = (one.history(plane, 0) for plane in (one.k_plane, one.v_plane))
        q, k, v = (part.float().transpose(0, 1) for part in (one.q, *histories))
        made = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=one.scale, enable_gqa=True)
        return (made[0].transpose(0, 1),)

    rows = Rows(None, (8192,), tuple(GroupTiles(count) for count in stages))
    return Case(
        GROUPS,
        {"head_dim": shape.dim},
        (rows,),
        make,
        run,
        reference,
        lambda _: ONE_SET,
        few_rows=1024,
    )


@dataclass(frozen=True, slots=True)
class Mamba2Inputs:
    """One set; states are read in one half and written in the other."""

    rows: Mamba2Rows
    weights: Mamba2Weights
    slots: RecurrentSlots


def _make_mamba2(num_rows: int, num_slots: int, sizes: tuple[int, int, int, int], seed: int) -> Mamba2Inputs:
    seeded(seed)
    heads, groups, n, p = sizes
    widths = (heads * p, groups * n, groups * n)
    x, b, c = torch.randn((num_rows, sum(widths)), device=DEVICE).bfloat16().split(widths, 1)
    dt = torch.randn((num_rows, heads), device=DEVICE).bfloat16()
    rows = Mamba2Rows(x.unflatten(1, (heads, p)), dt, b.unflatten(1, (groups, n)), c.unflatten(1, (groups, n)))
    a, d, bias = torch.randn((3, heads), device=DEVICE)
    states = torch.randn((2 * num_slots, heads, n, p), device=DEVICE)
    tails = torch.zeros((2 * num_slots, 3, 8), dtype=torch.bfloat16, device=DEVICE)
    ids = torch.arange(2 * num_slots, device=DEVICE)
    slots = RecurrentSlots(tails, states, ids[:num_slots], ids[num_slots:])
    return Mamba2Inputs(rows, Mamba2Weights(-a.exp(), d, bias, 0.001), slots)


def mamba2_chunk_case(heads: int, groups: int, state_dim: int, head_dim: int) -> Case:
    """A chunk of one sequence."""
    sizes = (heads, groups, state_dim, head_dim)

    def run(x: Mamba2Inputs, tiles: ScanTiles) -> Tensors:
        return mamba2_chunk(x.rows, x.weights, x.slots, tiles=tiles), x.slots.states

    def reference(x: Mamba2Inputs) -> Tensors:
        return slot_forms.mamba2_chunk(x.rows, x.weights, x.slots), x.slots.states

    return Case(
        CHUNK,
        {"heads": heads, "state_dim": state_dim, "head_dim": head_dim},
        (Rows(None, (4096,), choices(ScanTiles, num_warps=(4, 8), num_stages=(3, 4, 5))),),
        lambda num_rows, seed: _make_mamba2(num_rows, 1, sizes, seed),
        run,
        reference,
        lambda n: 2.0 * n * heads * head_dim,
    )


def mamba2_step_case(heads: int, groups: int, state_dim: int, head_dim: int) -> Case:
    """A row of each of several sequences."""
    sizes = (heads, groups, state_dim, head_dim)

    def run(x: Mamba2Inputs, tiles: StepTiles) -> Tensors:
        return mamba2_step(x.rows, x.weights, x.slots, tiles=tiles), x.slots.states

    def reference(x: Mamba2Inputs) -> Tensors:
        return slot_forms.mamba2_step(x.rows, x.weights, x.slots), x.slots.states

    return Case(
        STEP,
        {"heads": heads, "state_dim": state_dim, "head_dim": head_dim},
        (Rows(None, (64, 4), choices(StepTiles, num_warps=(2, 4, 8))),),
        lambda num_rows, seed: _make_mamba2(num_rows, num_rows, sizes, seed),
        run,
        reference,
        lambda n: 8.0 * n * heads * state_dim * head_dim,
    )


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """One set."""

    rows: torch.Tensor
    routing: Routing
    up: torch.Tensor
    down: torch.Tensor


def experts_case(num_experts: int, width: int, inner: int, top_k: int) -> Case:
    """A layer's experts, routed already."""

    def make(num_rows: int, seed: int) -> ExpertInputs:
        seeded(seed)
        sizes = (num_experts, 2 * inner, width), (num_experts, width, inner)
        up, down = (torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for size in sizes)
        if DEVICE == "cuda" or up.numel() < 1 << 20:  # large ones elsewhere are compiled with and not read
            up.normal_(0, 0.02)
            down.normal_(0, 0.02)
        rows = torch.randn((num_rows, width), device=DEVICE).bfloat16()
        logits = torch.randn((num_rows, num_experts), device=DEVICE)
        routing = moe.route_softmax(logits, top_k=top_k, renormalise=True)
        return ExpertInputs(rows, Routing(routing.experts.contiguous(), routing.weights), up, down)

    def run(x: ExpertInputs, tiles: MoeTiles) -> Tensors:
        return (grouped_experts(x.rows, x.routing, x.up, x.down, SWIGLU, tiles=tiles),)

    def reference(x: ExpertInputs) -> Tensors:
        return (moe.grouped_experts(x.rows, x.routing, x.up, x.down, SWIGLU),)

    return Case(
        EXPERTS,
        {"num_experts": num_experts, "width": width, "inner": inner},
        (Rows(8, (64,), _few()), Rows(64, (1024,), _many()), Rows(None, (4096,), _most())),
        make,
        run,
        reference,
        lambda _: ONE_SET,
        load=lambda num_rows: -(-num_rows * top_k // num_experts),
    )


def _few() -> tuple[MoeTiles, ...]:
    ups = (ProductTiles(64, 128, 4, 4), ProductTiles(64, 128, 4, 5), ProductTiles(128, 64, 4, 4))
    downs = (ProductTiles(128, 128, 4, 3), ProductTiles(128, 128, 4, 4), ProductTiles(64, 128, 4, 4))
    return tuple(MoeTiles(16, 0, up, down) for up in ups for down in downs)


def _many() -> tuple[MoeTiles, ...]:
    up, down = ProductTiles(64, 64, 4, 4), ProductTiles(128, 64, 4, 4)
    wide = ProductTiles(128, 64, 8, 4)
    return (
        *(MoeTiles(rows, 0, up, down) for rows in (32, 64)),
        *(MoeTiles(rows, rest, wide, down) for rows, rest in ((32, 0), (32, 16), (64, 0), (64, 16))),
    )


def _most() -> tuple[MoeTiles, ...]:
    up, down = ProductTiles(128, 64, 8, 4), ProductTiles(128, 64, 4, 3)
    ups = (ProductTiles(128, 64, 8, 3), ProductTiles(64, 64, 4, 4))
    downs = (ProductTiles(128, 64, 8, 4), ProductTiles(256, 64, 8, 3), ProductTiles(128, 64, 4, 4))
    return (
        *(MoeTiles(rows, rest, up, down) for rows, rest in ((128, 0), (128, 64), (64, 32), (64, 64))),
        *(MoeTiles(128, 32, other, down) for other in ups),
        *(MoeTiles(128, 32, up, other) for other in downs),
    )
