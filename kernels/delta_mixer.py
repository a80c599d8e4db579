"""A delta-rule mixer between its projections, GDN's or KDA's: what it is made of, the reference, and torch's forms.

The convolution over q, k and v, the gates, the recurrence of kernels/delta_rule.py over slots, and for a decode row the
gated norm after it. The Triton forms (kernels/triton_delta_decode.py, kernels/triton_delta_chunk.py) take the same
values; here is what a machine without a card runs. It rounds to the activations' dtype where the reference models'
own operations do (the convolution's sum, beta, what the recurrence gives); the Triton forms keep those in registers.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from kernels.causal_conv import ConvWeights, causal_conv_reference, causal_conv_step
from kernels.delta_rule import DeltaResult, DeltaRows, delta_reference, delta_step
from kernels.gated_delta import gated_delta_chunk
from kernels.gated_norm import rms_norm_sigmoid_gate, rms_norm_silu_gate
from kernels.kda import kda_chunk
from kernels.recurrent_slots import RecurrentSlots

COUNTED_ROWS = 4  # of a step, at most, whose programs count each other


class DecayKind(Enum):
    """How the projected decay f becomes a log decay, with its bias b and the head's rate r = exp(A_log)."""

    HEAD_SOFTPLUS = 0  # -r softplus(f + b), one a value head
    CHANNEL_SOFTPLUS = 1  # the same, one a key channel
    CHANNEL_BOUNDED = 2  # lower_bound sigmoid(r (f + b)), one a key channel


class OutputGate(Enum):
    """What the normed output is multiplied by."""

    SILU = 0
    SIGMOID = 1


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """A mixer's parameters between its projections, all fp32."""

    conv: ConvWeights  # without a bias, with SiLU
    a_log: torch.Tensor  # [Hv]
    dt_bias: torch.Tensor  # [Hv], or [Hv dk] for a decay a channel
    norm: torch.Tensor  # [dv]
    norm_eps: float
    decay: DecayKind
    lower_bound: float  # of CHANNEL_BOUNDED's log decay; others ignore it
    gate: OutputGate
    # [rows, Hv] int32 zeros, and zeros they are left: here the programs of a launch over so many rows count each other.
    arrivals: torch.Tensor

    @property
    def per_channel(self) -> bool:
        return self.decay is not DecayKind.HEAD_SOFTPLUS


def no_arrivals(heads: int, device: torch.device) -> torch.Tensor:
    """For a new mixer of so many value heads."""
    return torch.zeros((COUNTED_ROWS, heads), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class ProjectedRows:
    """A row of each of several sequences, as projected: columns of one matrix, with any stride between rows."""

    mixed: torch.Tensor  # [rows, channels]: q, k, v side by side, heads contiguous in each
    gate: torch.Tensor  # [rows, Hv dv]
    beta: torch.Tensor  # [rows, Hv], before the sigmoid
    decay: torch.Tensor  # [rows, Hv] or [rows, Hv dk]


def delta_log_decay(decay: torch.Tensor, mixer: DeltaMixer) -> torch.Tensor:
    """[rows, Hv, 1] or [rows, Hv, dk] of [rows, Hv] or [rows, Hv dk], in the dtype of `decay`."""
    raised = (decay + mixer.dt_bias.to(decay.dtype)).unflatten(1, (mixer.a_log.shape[0], -1))
    rate = mixer.a_log.to(decay.dtype).exp()[:, None]
    if mixer.decay is DecayKind.CHANNEL_BOUNDED:
        return mixer.lower_bound * torch.sigmoid(rate * raised)
    return -rate * torch.nn.functional.softplus(raised)


def delta_decode_reference(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """Row by row in float64; writes tails and states. Returns [rows, Hv dv] float64."""
    heads, dk, dv = slots.states.shape[1:]
    k_heads = (rows.mixed.shape[1] - heads * dv) // (2 * dk)
    outs: list[torch.Tensor] = []
    for r in range(rows.mixed.shape[0]):
        source, target = slots.slot_in[r], slots.slot_out[r]
        conv = causal_conv_reference(rows.mixed[r : r + 1].double(), slots.tails[source].double(), mixer.conv)
        q, k, v = conv.out.split((k_heads * dk, k_heads * dk, heads * dv), 1)
        row = DeltaRows(
            q=q.view(1, k_heads, dk),
            k=k.view(1, k_heads, dk),
            v=v.view(1, heads, dv),
            log_decay=delta_log_decay(rows.decay[r : r + 1].double(), mixer),
            beta=rows.beta[r : r + 1].double().sigmoid(),
        )
        result = delta_reference(row, slots.states[source].double())
        slots.tails[target] = conv.tail.to(slots.tails.dtype)
        slots.states[target] = result.state[0].float()
        normed = result.out[0] * torch.rsqrt(result.out[0].square().mean(-1, keepdim=True) + mixer.norm_eps)
        gate = rows.gate[r].double().view(heads, dv)
        shut = torch.sigmoid(gate) * (gate if mixer.gate is OutputGate.SILU else 1)
        outs.append((normed * mixer.norm.double() * shut).flatten())
    return torch.stack(outs)


def delta_chunk_reference(rows: ProjectedRows, mixer: DeltaMixer, state: torch.Tensor) -> DeltaResult:
    """The recurrence over rows as the convolution left them, in float64; `state` [Hv, dk, dv]."""
    q, k, v = split_heads(rows.mixed.double(), state.shape)
    log_decay = delta_log_decay(rows.decay.double(), mixer)
    return delta_reference(DeltaRows(q, k, v, log_decay, rows.beta.double().sigmoid()), state.double())


def split_heads(mixed: torch.Tensor, state_shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [rows, Hk, dk] and v [rows, Hv, dv] of [rows, channels], for a state [Hv, dk, dv]."""
    heads, dk, dv = state_shape
    key_width = (mixed.shape[1] - heads * dv) // 2
    q, k, v = mixed.split((key_width, key_width, heads * dv), 1)
    return q.unflatten(1, (-1, dk)), k.unflatten(1, (-1, dk)), v.unflatten(1, (heads, dv))


def delta_decode(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """One row of each of several sequences; reads and writes their slots. Returns [rows, Hv dv] as `mixed`'s dtype."""
    slots.check(rows.mixed.shape[0])
    conv = causal_conv_step(rows.mixed, slots.tails.index_select(0, slots.slot_in), mixer.conv)
    states = slots.states.index_select(0, slots.slot_in)
    result = delta_step(_recurrence_rows(conv.out, rows, mixer, slots), states)
    slots.tails.index_copy_(0, slots.slot_out, conv.tail)
    slots.states.index_copy_(0, slots.slot_out, result.state)
    return delta_norm(result.out, rows.gate, mixer)


def delta_chunk(rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> torch.Tensor:
    """Rows of one sequence as the convolution left them, from slot_in to slot_out, each [1] int64.

    Neither tails nor `gate` are touched. Returns [rows, Hv, dv] fp32, before the output norm.
    """
    slots.check(1)
    form = kda_chunk if mixer.per_channel else gated_delta_chunk
    result = form(_recurrence_rows(rows.mixed, rows, mixer, slots), slots.states.index_select(0, slots.slot_in)[0])
    slots.states.index_copy_(0, slots.slot_out, result.state[None])
    return result.out


def delta_norm(out: torch.Tensor, gate: torch.Tensor, mixer: DeltaMixer) -> torch.Tensor:
    """The gated norm of what `delta_chunk` gave, [rows, Hv, dv]: [rows, Hv dv] in the dtype of `gate`.

    What the recurrence gave is rounded to that dtype before the norm.
    """
    norm = rms_norm_silu_gate if mixer.gate is OutputGate.SILU else rms_norm_sigmoid_gate
    rounded, gates = out.to(gate.dtype), gate.unflatten(1, out.shape[1:])
    return norm(rounded, gates, mixer.norm, mixer.norm_eps).flatten(1).to(gate.dtype)


def _recurrence_rows(mixed: torch.Tensor, rows: ProjectedRows, mixer: DeltaMixer, slots: RecurrentSlots) -> DeltaRows:
    q, k, v = split_heads(mixed, slots.states.shape[1:])
    return DeltaRows(q, k, v, delta_log_decay(rows.decay.float(), mixer), rows.beta.sigmoid())
