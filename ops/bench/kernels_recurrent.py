"""Rows of recurrent mixers: prefill and decode of GDN, KDA and Mamba2, and the convolution before them."""

# Peers and tensors' own methods have no full types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from dataclasses import dataclass
from typing import Any

import torch

from kernels.causal_conv import ConvWeights
from kernels.delta_mixer import (
    DecayKind,
    DeltaMixer,
    OutputGate,
    ProjectedRows,
    delta_decode_reference,
    delta_log_decay,
    no_arrivals,
    split_heads,
)
from kernels.delta_rule import DeltaRows, delta_step
from kernels.gated_delta import gated_delta_chunk
from kernels.kda import kda_chunk
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.mamba2 import mamba2_chunk as mamba2_chunk_in_torch
from kernels.recurrent_slots import RecurrentSlots
from kernels.triton_causal_conv import causal_conv_chunk, causal_conv_step
from kernels.triton_delta_chunk import PIECES, delta_chunk
from kernels.triton_delta_decode import DeltaDecodeTiles, delta_decode
from kernels.triton_mamba2 import ScanTiles, mamba2_chunk, mamba2_step
from ops.bench.kernels_timing import DEVICE, Row, Run, Way, relative_error, seeded

try:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]
except ImportError:
    chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = chunk_kda = None

DIM = 128  # of keys and of values
TAPS = 4
CHECKED_ROWS = 2048  # at the end of a chunk, compared with torch's form in float32


@dataclass(frozen=True, slots=True)
class Mixer:
    """Which delta-rule mixer."""

    decay: DecayKind
    k_heads: int
    heads: int

    @property
    def per_channel(self) -> bool:
        return self.decay is not DecayKind.HEAD_SOFTPLUS

    @property
    def channels(self) -> int:
        return (2 * self.k_heads + self.heads) * DIM

    @property
    def decay_width(self) -> int:
        return self.heads * (DIM if self.per_channel else 1)


GDN = Mixer(DecayKind.HEAD_SOFTPLUS, 16, 32)
KDA = Mixer(DecayKind.CHANNEL_BOUNDED, 64, 64)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """One set."""

    rows: ProjectedRows
    mixer: DeltaMixer
    slots: RecurrentSlots  # written beside what is read, so that every run computes the same

    def heads_first(self) -> dict[str, torch.Tensor]:
        """As fla takes them: [1, rows, heads, d], the log decay worked out."""
        q, k, v = split_heads(self.rows.mixed, self.slots.states.shape[1:])
        log_decay = delta_log_decay(self.rows.decay.float(), self.mixer)
        if not self.mixer.per_channel:
            log_decay = log_decay[..., 0]
            q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
        beta = self.rows.beta.float().sigmoid()
        return {name: x[None].contiguous() for name, x in zip("qkvgb", (q, k, v, log_decay, beta), strict=True)}

    def delta_rows(self, first: int = 0) -> DeltaRows:
        """As torch's forms take them, from row `first` on."""
        q, k, v = (x[first:] for x in split_heads(self.rows.mixed, self.slots.states.shape[1:]))
        log_decay = delta_log_decay(self.rows.decay[first:].float(), self.mixer)
        return DeltaRows(q, k, v, log_decay, self.rows.beta[first:].float().sigmoid())


def recurrent_rows() -> list[Row]:
    """The rows of this file, decode first."""
    return [
        _delta_decode_row("GDN decode B64", GDN, 64),
        _delta_decode_row("GDN decode B1", GDN, 1),
        _delta_decode_row("KDA decode B64", KDA, 64),
        _conv_step_row(64, 8192),
        _conv_chunk_row(4096, 8192),
        _mamba2_step_row(64),
    ]


def chunk_rows() -> list[Row]:
    """Prefill: one sequence's rows at once, and the chunk of 4,096 that the grid makes of them."""
    return [
        _delta_chunk_row("GDN prefill 32K", GDN, 32_768, 239.0),
        _delta_chunk_row("GDN prefill 4K", GDN, 4096, 239.0 / 8),
        _delta_chunk_row("KDA prefill 8K", KDA, 8192, None),
        _delta_chunk_row("KDA prefill 32K", KDA, 32_768, None),
        _mamba2_chunk_row(32_768, 281.0),
        _mamba2_chunk_row(4096, 281.0 / 8),
    ]


def _ids(begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin, end, dtype=torch.int64, device=DEVICE)


def _make_delta(mixer: Mixer, num_rows: int, num_slots: int, seed: int) -> DeltaInputs:
    seeded(seed)
    heads, channels = mixer.heads, mixer.channels

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    fp32 = torch.float32
    parameters = DeltaMixer(
        conv=ConvWeights(made(TAPS, channels, dtype=fp32), None, True),
        a_log=made(heads, dtype=fp32) - 2.0,
        dt_bias=made(mixer.decay_width, dtype=fp32),
        norm=made(DIM, dtype=fp32),
        norm_eps=1e-6,
        decay=mixer.decay,
        lower_bound=-5.0,
        gate=OutputGate.SIGMOID if mixer.per_channel else OutputGate.SILU,
        arrivals=no_arrivals(heads, torch.device(DEVICE)),
    )
    gate = made(num_rows, heads * DIM) if num_rows == num_slots else made(1, heads * DIM)  # a chunk does not read it
    rows = ProjectedRows(made(num_rows, channels), gate, made(num_rows, heads), made(num_rows, mixer.decay_width))
    tails = made(2 * num_slots, TAPS - 1, channels)
    states = made(2 * num_slots, heads, DIM, DIM, dtype=fp32)
    return DeltaInputs(
        rows, parameters, RecurrentSlots(tails, states, _ids(0, num_slots), _ids(num_slots, 2 * num_slots))
    )


def _as_delta(inputs: object) -> DeltaInputs:
    assert isinstance(inputs, DeltaInputs)
    return inputs


def _delta_decode_row(name: str, mixer: Mixer, num_rows: int) -> Row:
    state_bytes = num_rows * mixer.heads * DIM * DIM * 4
    row_bytes = num_rows * 2 * (mixer.channels * (TAPS - 1) + mixer.channels + mixer.heads * DIM + mixer.decay_width)

    def ours(tiles: DeltaDecodeTiles | None) -> Way:
        def make(inputs: object) -> Run:
            x = _as_delta(inputs)
            return lambda: delta_decode(x.rows, x.mixer, x.slots, tiles=tiles)

        return Way("ours" if tiles is None else f"v{tiles.values} w{tiles.num_warps}", make)

    def by_torch(inputs: object) -> Run:
        x = _as_delta(inputs)
        rows, states = x.delta_rows(), x.slots.states[:num_rows]

        def run() -> torch.Tensor:
            result = delta_step(rows, states)
            x.slots.states[num_rows:] = result.state
            return result.out

        return run

    def by_fla(inputs: object) -> Run:
        x = _as_delta(inputs)
        parts = {name: part.transpose(0, 1) for name, part in x.heads_first().items()}
        function: Any = fused_recurrent_gated_delta_rule
        return lambda: function(
            *(parts[name] for name in "qkv"),
            g=parts["g"],
            beta=parts["b"],
            initial_state=x.slots.states[:num_rows],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    def error(out: object, inputs: object) -> float:
        x = _as_delta(inputs)
        assert isinstance(out, torch.Tensor)
        few = slice(0, min(4, num_rows))
        rows = ProjectedRows(*(part[few] for part in (x.rows.mixed, x.rows.gate, x.rows.beta, x.rows.decay)))
        slots = RecurrentSlots(
            x.slots.tails.clone(), x.slots.states.clone(), x.slots.slot_in[few], x.slots.slot_out[few]
        )
        return relative_error(out[few], delta_decode_reference(rows, x.mixer, slots))

    peers = [Way("torch, recurrence alone", by_torch, is_peer=True, exact=False)]
    if fused_recurrent_gated_delta_rule is not None and not mixer.per_channel:
        peers.append(Way("fla, recurrence alone", by_fla, is_peer=True, exact=False))
    cuts = [(values, num_warps) for values in (16, 32, 64, 128) for num_warps in (4, 8)]
    return Row(
        name,
        lambda seed: _make_delta(mixer, num_rows, num_rows, seed),
        2 * state_bytes,
        [ours(None), *peers],
        [ours(DeltaDecodeTiles(*cut)) for cut in cuts],
        read_bytes=state_bytes + row_bytes,
        written_bytes=state_bytes + num_rows * 2 * mixer.channels * (TAPS - 1),
        error=error,
    )


def _delta_chunk_row(name: str, mixer: Mixer, num_rows: int, paper_floor_us: float | None) -> Row:
    # Products of a row and a head: two with the keys (C wide), the state's three, and two within the inner chunk.
    flops = 2.0 * num_rows * mixer.heads * (2 * 64 * DIM + 3 * DIM * DIM + 2 * 64 * DIM)

    def ours(pieces: int, title: str) -> Way:
        def make(inputs: object) -> Run:
            x = _as_delta(inputs)
            return lambda: delta_chunk(x.rows, x.mixer, x.slots, pieces=pieces)

        return Way(title, make)

    def in_torch(x: DeltaInputs) -> torch.Tensor:
        form = kda_chunk if mixer.per_channel else gated_delta_chunk
        return form(x.delta_rows(), x.slots.states[0]).out

    def by_fla(inputs: object) -> Run:
        x = _as_delta(inputs)
        parts = x.heads_first()
        function: Any = chunk_kda if mixer.per_channel else chunk_gated_delta_rule
        return lambda: function(
            *(parts[name] for name in "qkv"),
            g=parts["g"],
            beta=parts["b"],
            initial_state=x.slots.states[:1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )[0]

    def by_torch(inputs: object) -> Run:
        x = _as_delta(inputs)
        return lambda: in_torch(x)

    def error(out: object, inputs: object) -> float:
        assert isinstance(out, torch.Tensor)
        ours_last = out.view(num_rows, mixer.heads, DIM)[-CHECKED_ROWS:]
        return relative_error(ours_last, in_torch(_as_delta(inputs))[-CHECKED_ROWS:])

    peers = [Way("torch", by_torch, is_peer=True, capture=False, exact=False)]
    if chunk_kda is not None:
        peers.append(Way("fla", by_fla, is_peer=True))
    return Row(
        name,
        lambda seed: _make_delta(mixer, num_rows, 1, seed),
        2.0 * num_rows * (mixer.channels + mixer.decay_width),
        [ours(PIECES, "ours"), *peers],
        [ours(pieces, f"p{pieces}") for pieces in (1, 2, 3, 8)],
        read_bytes=2.0 * num_rows * (mixer.channels + mixer.decay_width),
        written_bytes=2.0 * num_rows * mixer.heads * DIM,
        flops=flops,
        error=error,
        paper_floor_us=paper_floor_us,
    )


@dataclass(frozen=True, slots=True)
class Mamba2Inputs:
    """One set."""

    rows: Mamba2Rows
    weights: Mamba2Weights
    slots: RecurrentSlots


def _make_mamba2(num_rows: int, num_slots: int, seed: int) -> Mamba2Inputs:
    seeded(seed)
    heads, groups, n, p = 128, 8, 128, 64
    mixed = torch.randn((num_rows, heads * p + 2 * groups * n), device=DEVICE).bfloat16()
    x, b, c = mixed.split((heads * p, groups * n, groups * n), 1)
    dt = torch.randn((num_rows, heads), device=DEVICE).bfloat16()
    rows = Mamba2Rows(x.unflatten(1, (heads, p)), dt, b.unflatten(1, (groups, n)), c.unflatten(1, (groups, n)))
    a, d, bias = (torch.randn(heads, device=DEVICE) for _ in range(3))
    states = torch.randn((2 * num_slots, heads, n, p), device=DEVICE)
    tails = torch.zeros((2 * num_slots, TAPS - 1, 8), dtype=torch.bfloat16, device=DEVICE)
    slots = RecurrentSlots(tails, states, _ids(0, num_slots), _ids(num_slots, 2 * num_slots))
    return Mamba2Inputs(rows, Mamba2Weights(-a.exp(), d, bias, 0.001), slots)


def _as_mamba2(inputs: object) -> Mamba2Inputs:
    assert isinstance(inputs, Mamba2Inputs)
    return inputs


def _mamba2_chunk_row(num_rows: int, paper_floor_us: float) -> Row:
    def ours(tiles: ScanTiles | None, title: str) -> Way:
        def make(inputs: object) -> Run:
            x = _as_mamba2(inputs)
            return lambda: mamba2_chunk(x.rows, x.weights, x.slots, tiles=tiles)

        return Way(title, make)

    def in_torch(x: Mamba2Inputs) -> torch.Tensor:
        return mamba2_chunk_in_torch(x.rows, x.weights, x.slots.states[0]).out

    def by_torch(inputs: object) -> Run:
        x = _as_mamba2(inputs)
        return lambda: in_torch(x)

    def error(out: object, inputs: object) -> float:
        assert isinstance(out, torch.Tensor)
        return relative_error(out[-CHECKED_ROWS:], in_torch(_as_mamba2(inputs))[-CHECKED_ROWS:])

    return Row(
        f"Mamba2 prefill {num_rows // 1024}K",
        lambda seed: _make_mamba2(num_rows, 1, seed),
        2.0 * num_rows * (8192 + 2048 + 128),
        [ours(None, "ours"), Way("torch", by_torch, is_peer=True, capture=False, exact=False)],
        [ours(ScanTiles(warps, stages), f"w{warps} s{stages}") for warps, stages in ((4, 3), (4, 5))],
        read_bytes=2.0 * num_rows * (8192 + 2048 + 128),
        written_bytes=2.0 * num_rows * 8192,
        error=error,
        paper_floor_us=paper_floor_us,
    )


def _mamba2_step_row(num_rows: int) -> Row:
    state_bytes = num_rows * 128 * 128 * 64 * 4

    def ours(inputs: object) -> Run:
        x = _as_mamba2(inputs)
        return lambda: mamba2_step(x.rows, x.weights, x.slots)

    return Row(
        f"Mamba2 step B{num_rows}",
        lambda seed: _make_mamba2(num_rows, num_rows, seed),
        2.0 * state_bytes,
        [Way("ours", ours)],
        [],
        read_bytes=state_bytes,
        written_bytes=state_bytes,
    )


def _conv_step_row(num_rows: int, channels: int) -> Row:
    def ours(inputs: object) -> Run:
        x = _as_delta(inputs)
        return lambda: causal_conv_step(x.rows.mixed, x.slots.tails, x.slots.slot_in, x.slots.slot_out, x.mixer.conv)

    row_bytes = 2.0 * num_rows * channels
    return Row(
        f"convolution update B{num_rows}",
        lambda seed: _make_delta(GDN, num_rows, num_rows, seed),
        (TAPS + TAPS - 1) * row_bytes,
        [Way("ours", ours)],
        [],
        read_bytes=TAPS * row_bytes,
        written_bytes=TAPS * row_bytes,
    )


def _conv_chunk_row(num_rows: int, channels: int) -> Row:
    def ours(inputs: object) -> Run:
        x = _as_delta(inputs)
        return lambda: causal_conv_chunk(x.rows.mixed, x.slots.tails, x.slots.slot_in, x.slots.slot_out, x.mixer.conv)

    row_bytes = 2.0 * num_rows * channels
    return Row(
        f"convolution of {num_rows} rows",
        lambda seed: _make_delta(GDN, num_rows, 1, seed),
        row_bytes,
        [Way("ours", ours)],
        [],
        read_bytes=row_bytes,
        written_bytes=row_bytes,
    )
