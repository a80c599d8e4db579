"""The Mamba2 mixer: one projection, a convolution over x, B and C, the state space, a gated norm by groups."""

from dataclasses import dataclass

import torch

from daemon.batch import Batch
from daemon.layers.inputs import Inputs
from daemon.layers.linear import Linear
from daemon.layers.parameters import Scope
from daemon.layers.recurrent import RECURRENT_CAPS, columns, recurrent_state, sequences, short_conv
from daemon.layers.steps import Steps
from kernels.mamba2 import Mamba2Rows, Mamba2Weights
from kernels.recurrent_slots import RecurrentSlots
from tiers.layout import Plane
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Sizes and variants of a mixer."""

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_taps: int
    conv_bias: bool
    proj_bias: bool
    time_step_min: float
    norm_eps: float

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self.heads} heads")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """x, B, C."""
        return self.width, self.groups * self.state_dim, self.groups * self.state_dim

    @property
    def projection_parts(self) -> tuple[int, int, int]:
        """Rows of the input projection: gate, convolved, dt."""
        return self.width, sum(self.conv_parts), self.heads


class Mamba2Mixer:
    """Reads checkpoint names in_proj, conv1d, A_log, D, dt_bias, norm, out_proj of its scope."""

    caps = RECURRENT_CAPS
    planes: tuple[Plane, ...] = ()
    pair_flops = 0  # a row costs the same after any history

    def __init__(self, scope: Scope, layer: int, config: Mamba2Config) -> None:
        self.config = config
        heads, dtype = config.heads, scope.parameters.dtype
        self.in_proj = Linear(
            scope, (("in_proj", sum(config.projection_parts)),), config.hidden_size, bias=config.proj_bias
        )
        self.out_proj = Linear(scope, (("out_proj", config.hidden_size),), config.width, bias=config.proj_bias)
        self.norm = scope.tensor("norm.weight", config.width, dtype=torch.float32)
        self.per_head = Mamba2Weights(
            a=scope.tensor("A_log", heads, dtype=torch.float32),
            d=scope.tensor("D", heads, dtype=torch.float32),
            dt_bias=scope.tensor("dt_bias", heads, dtype=torch.float32),
            time_step_min=config.time_step_min,
        )
        scope.parameters.when_filled(self._finish_decay)
        self.conv = short_conv(scope, (("conv1d", sum(config.conv_parts)),), config.conv_taps, bias=config.conv_bias)
        state_shape = (heads, config.state_dim, config.head_dim)
        self.state = recurrent_state(f"layers.{layer}", self.conv, state_shape, dtype)
        self.slots = self.state.slots
        self._forms = scope.kernels.recurrent

    def _finish_decay(self) -> None:
        self.per_head.a.exp_().neg_()  # the checkpoint has A_log

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.config.hidden_size * (self.in_proj.out_size + self.config.width)

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[rows, hidden] to the same; reads and writes the mixer's slots for every sequence of the batch."""
        config = self.config
        gate, mixed, dt = columns(self.in_proj(hidden), config.projection_parts)
        yield
        out = yield from self._run(mixed, dt, inputs.batch, pools)
        gated = self._forms.group_norm(out.flatten(1), gate, self.norm, num_groups=config.groups, eps=config.norm_eps)
        return self.out_proj(gated)

    def _run(self, mixed: torch.Tensor, dt: torch.Tensor, batch: Batch, pools: DevicePools) -> Steps:
        """[rows, heads, width] of the rows as projected."""
        tails, states = self.state.of(pools)
        forms = self._forms
        if batch.is_decode:
            conv = forms.conv_step(mixed, tails, batch.slot_in, batch.slot_out, self.conv)
            slots = RecurrentSlots(tails, states, batch.slot_in, batch.slot_out)
            return forms.mamba2_step(self._rows(conv, dt), self.per_head, slots)
        outs: list[torch.Tensor] = []
        for own, slot_in, slot_out in sequences(batch):
            conv = forms.conv_chunk(mixed[own], tails, slot_in, slot_out, self.conv)
            yield
            slots = RecurrentSlots(tails, states, slot_in, slot_out)
            outs.append(forms.mamba2_chunk(self._rows(conv, dt[own]), self.per_head, slots))
            yield
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _rows(self, mixed: torch.Tensor, dt: torch.Tensor) -> Mamba2Rows:
        config = self.config
        x, b, c = columns(mixed, config.conv_parts)
        return Mamba2Rows(
            x=x.view(-1, config.heads, config.head_dim),
            dt=dt,
            b=b.view(-1, config.groups, config.state_dim),
            c=c.view(-1, config.groups, config.state_dim),
        )
