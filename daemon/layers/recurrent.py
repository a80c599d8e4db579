"""How a mixer with a convolution and a recurrence meets a batch: the one place that reads and writes their slots.

A decode batch goes through the one-row forms, all sequences at once. Anything else runs sequence by sequence through
the chunk forms, so that no row of one can meet another's state, and a chunk's shapes are its own. State is read at
slot_in and written at slot_out after the rows; slots that a batch does not name are never touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from daemon.batch import Batch
from daemon.layers.caps import LayerCaps
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.causal_conv import ConvWeights
from kernels.delta_mixer import DeltaMixer, ProjectedRows
from kernels.dispatch import RecurrentForms
from kernels.recurrent_slots import RecurrentSlots
from tiers.layout import SlotTensor
from tiers.pools import DevicePools

RECURRENT_CAPS = LayerCaps(
    batched_decode=True,
    verify_rows=True,
    graph_capture=True,
    no_host_stage=True,
    streaming=True,
    reads_history=True,
)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The two slot tensors of a mixer, by name."""

    conv: SlotTensor  # [K - 1, channels] in the activations' dtype
    recurrent: SlotTensor  # fp32

    @property
    def slots(self) -> tuple[SlotTensor, SlotTensor]:
        return self.conv, self.recurrent

    def of(self, pools: DevicePools) -> tuple[torch.Tensor, torch.Tensor]:
        """The tails and the states of all slots."""
        return pools.slot_tensors[self.conv.name], pools.slot_tensors[self.recurrent.name]


def recurrent_state(
    layer: str, conv: ConvWeights, state_shape: tuple[int, int, int], dtype: torch.dtype
) -> RecurrentState:
    """Slot tensors of the mixer of layer `layer`, whose activations are of `dtype`."""
    num_taps, channels = conv.taps.shape
    return RecurrentState(
        SlotTensor(f"{layer}.conv", str(dtype).removeprefix("torch."), (num_taps - 1, channels)),
        SlotTensor(f"{layer}.recurrent", "float32", state_shape),
    )


def short_conv(
    scope: Scope, parts: tuple[tuple[str, int], ...], num_taps: int, *, bias: bool, is_wide: bool = False
) -> ConvWeights:
    """A convolution with SiLU; checkpoint tensors `name.weight` [size, 1, K] lie side by side as channels, in fp32.

    Where checkpoints keep the taps wide, sums reach the SiLU in float32 too.
    """
    channels = sum(size for _, size in parts)
    weights = ConvWeights(
        taps=scope.parameters.allocate((num_taps, channels), torch.float32),
        bias=scope.rows(((f"{name}.bias", size) for name, size in parts), dtype=torch.float32) if bias else None,
        silu=True,
        sum_dtype=torch.float32 if is_wide else None,
    )
    begin = 0
    for name, size in parts:
        scope.fill(f"{name}.weight", weights.taps.t()[begin : begin + size], (size, 1, num_taps))
        begin += size
    return weights


def columns(x: torch.Tensor, widths: tuple[int, ...]) -> list[torch.Tensor]:
    """The parts of [rows, sum of widths] that lie side by side."""
    assert x.shape[1] == sum(widths)
    ends = list(accumulate(widths))
    return [x[:, end - width : end] for end, width in zip(ends, widths, strict=True)]


def sequences(batch: Batch) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Each sequence's rows, its slot_in and its slot_out, both [1]."""
    for s, (first, last) in enumerate(pairwise(batch.cu_rows)):
        yield slice(first, last), batch.slot_in[s : s + 1], batch.slot_out[s : s + 1]


@dataclass(frozen=True, slots=True)
class DeltaRecurrence:
    """A delta-rule mixer between its projections, over the rows of a batch."""

    state: RecurrentState
    mixer: DeltaMixer
    forms: RecurrentForms

    def run(self, rows: ProjectedRows, batch: Batch, pools: DevicePools) -> Steps:
        """The rows as projected; returns what the output projection reads, [rows, heads x width]."""
        tails, states = self.state.of(pools)
        if batch.is_decode:
            return self.forms.delta_step(rows, self.mixer, RecurrentSlots(tails, states, batch.slot_in, batch.slot_out))
        outs: list[torch.Tensor] = []
        for own, slot_in, slot_out in sequences(batch):
            mixed = self.forms.conv_chunk(rows.mixed[own], tails, slot_in, slot_out, self.mixer.conv)
            yield
            chunk = ProjectedRows(mixed, rows.gate[own], rows.beta[own], rows.decay[own])
            outs.append(self.forms.delta_chunk(chunk, self.mixer, RecurrentSlots(tails, states, slot_in, slot_out)))
            yield
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return self.forms.delta_norm(out, rows.gate, self.mixer)
