"""How a mixer with a convolution and a recurrence meets a batch: the one place that reads and writes their slots.

A decode batch goes through the one-row forms, all sequences at once. Anything else runs sequence by sequence through
the chunk forms, so that no row of one can meet another's state, and a chunk's shapes are its own. State is read at
slot_in and written at slot_out after the rows; slots that a batch does not name are never touched.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from daemon.batch import Batch
from daemon.layers.caps import LayerCaps
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.causal_conv import ConvWeights, causal_conv_chunk, causal_conv_step
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


class Recurred(Protocol):
    """Outputs of some rows and the state after them."""

    @property
    def out(self) -> torch.Tensor: ...
    @property
    def state(self) -> torch.Tensor: ...


class Recurrence(Protocol):
    """The recurrence of one forward, holding whatever it takes from each row besides the convolution's output."""

    def step(self, mixed: torch.Tensor, states: torch.Tensor) -> Recurred:
        """All rows, each a sequence of its own: mixed [rows, channels], states [rows, *shape]."""
        ...

    def chunk(self, mixed: torch.Tensor, rows: slice, state: torch.Tensor) -> Recurred:
        """Rows `rows` of the batch, of one sequence: mixed [their number, channels], state [*shape]."""
        ...


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The two slot tensors of a mixer, by name."""

    conv: SlotTensor  # [K - 1, channels] in the activations' dtype
    recurrent: SlotTensor  # fp32

    @property
    def slots(self) -> tuple[SlotTensor, SlotTensor]:
        return self.conv, self.recurrent


def recurrent_state(
    layer: str, conv: ConvWeights, state_shape: tuple[int, int, int], dtype: torch.dtype
) -> RecurrentState:
    """Slot tensors of the mixer of layer `layer`, whose activations are of `dtype`."""
    num_taps, channels = conv.taps.shape
    return RecurrentState(
        SlotTensor(f"{layer}.conv", str(dtype).removeprefix("torch."), (num_taps - 1, channels)),
        SlotTensor(f"{layer}.recurrent", "float32", state_shape),
    )


def short_conv(scope: Scope, parts: tuple[tuple[str, int], ...], num_taps: int, *, bias: bool) -> ConvWeights:
    """A convolution with SiLU; checkpoint tensors `name.weight` [size, 1, K] lie side by side as channels, in fp32."""
    channels = sum(size for _, size in parts)
    weights = ConvWeights(
        taps=scope.parameters.allocate((num_taps, channels), torch.float32),
        bias=scope.rows(((f"{name}.bias", size) for name, size in parts), dtype=torch.float32) if bias else None,
        silu=True,
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


@dataclass(frozen=True, slots=True)
class ConvRecurrence:
    """A convolution followed by a recurrence, over the rows of a batch."""

    state: RecurrentState
    conv: ConvWeights

    def run(self, mixed: torch.Tensor, recurrence: Recurrence, batch: Batch, pools: DevicePools) -> Steps:
        """`mixed` [rows, channels] as projected; returns what the recurrence puts out, [rows, heads, width] fp32."""
        tails = pools.slot_tensors[self.state.conv.name]
        states = pools.slot_tensors[self.state.recurrent.name]
        if batch.is_decode:
            conv = causal_conv_step(mixed, tails.index_select(0, batch.slot_in), self.conv)
            result = recurrence.step(conv.out, states.index_select(0, batch.slot_in))
            tails.index_copy_(0, batch.slot_out, conv.tail)
            states.index_copy_(0, batch.slot_out, result.state)
            return result.out
        outs: list[torch.Tensor] = []
        for s in range(batch.num_seqs):
            rows = slice(batch.cu_rows[s], batch.cu_rows[s + 1])
            slot_in, slot_out = batch.slot_in[s : s + 1], batch.slot_out[s : s + 1]
            conv = causal_conv_chunk(mixed[rows], tails.index_select(0, slot_in)[0], self.conv)
            yield
            result = recurrence.chunk(conv.out, rows, states.index_select(0, slot_in)[0])
            tails.index_copy_(0, slot_out, conv.tail[None])
            states.index_copy_(0, slot_out, result.state[None])
            outs.append(result.out)
            yield
        return torch.cat(outs) if len(outs) > 1 else outs[0]
