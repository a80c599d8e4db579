"""The gated delta net mixer: one projection, a convolution over q, k and v, the gated delta rule, a gated norm.

Checkpoints name and interleave the projection's parts in different ways; a family brings them as one product whose
columns are [q | k | v | z | b | a], heads contiguous in each.
"""

from dataclasses import dataclass

import torch

from daemon.layers.inputs import Inputs
from daemon.layers.linear import Linear
from daemon.layers.parameters import Scope
from daemon.layers.recurrent import RECURRENT_CAPS, DeltaRecurrence, columns, recurrent_state, short_conv
from daemon.layers.steps import Steps
from kernels.delta_mixer import DecayKind, DeltaMixer, OutputGate, ProjectedRows, no_arrivals
from tiers.layout import Plane
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class GatedDeltaSizes:
    """Heads and widths of a mixer."""

    k_heads: int
    v_heads: int
    dk: int
    dv: int
    conv_taps: int

    def __post_init__(self) -> None:
        if self.v_heads % self.k_heads:
            raise ValueError(f"{self.k_heads} key heads do not divide {self.v_heads} value heads")

    @property
    def key_width(self) -> int:
        return self.k_heads * self.dk

    @property
    def value_width(self) -> int:
        return self.v_heads * self.dv

    @property
    def conv_channels(self) -> int:
        """q, k and v side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def projection_parts(self) -> tuple[int, int, int, int]:
        """Rows of the input projection: convolved, z, b, a."""
        return self.conv_channels, self.value_width, self.v_heads, self.v_heads


class GatedDeltaNet:
    """Reads checkpoint names conv1d, A_log, dt_bias, norm, out_proj of its scope; `in_proj` is as said above."""

    caps = RECURRENT_CAPS
    planes: tuple[Plane, ...] = ()
    pair_flops = 0  # a row costs the same after any history

    def __init__(self, scope: Scope, layer: int, sizes: GatedDeltaSizes, in_proj: Linear, *, norm_eps: float) -> None:
        assert in_proj.out_size == sum(sizes.projection_parts)
        self.sizes = sizes
        self.in_proj = in_proj
        a_log = scope.tensor("A_log", sizes.v_heads, dtype=torch.float32)
        dt_bias = scope.tensor("dt_bias", sizes.v_heads, dtype=torch.float32)
        norm = scope.tensor("norm.weight", sizes.dv, dtype=torch.float32)
        self.out_proj = Linear(scope, (("out_proj", in_proj.in_size),), sizes.value_width)
        conv = short_conv(scope, (("conv1d", sizes.conv_channels),), sizes.conv_taps, bias=False)
        state = recurrent_state(f"layers.{layer}", conv, (sizes.v_heads, sizes.dk, sizes.dv), scope.parameters.dtype)
        self.slots = state.slots
        decay, arrivals = DecayKind.HEAD_SOFTPLUS, no_arrivals(sizes.v_heads, scope.parameters.device)
        mixer = DeltaMixer(conv, a_log, dt_bias, norm, norm_eps, decay, 0.0, OutputGate.SILU, arrivals)
        self.recurrence = DeltaRecurrence(state, mixer, scope.kernels.recurrent)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.in_proj.in_size * (self.in_proj.out_size + self.sizes.value_width)

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[rows, hidden] to the same; reads and writes the mixer's slots for every sequence of the batch."""
        mixed, z, b, a = columns(self.in_proj(hidden), self.sizes.projection_parts)
        yield
        rows = ProjectedRows(mixed, gate=z, beta=b, decay=a)
        return self.out_proj((yield from self.recurrence.run(rows, inputs.batch, pools)))
