"""The Kimi delta attention mixer: a convolution over q, k and v, the delta rule with a decay a channel, a gated norm.

Decay and output gate each come through a narrow matrix first. All that reads the hidden state is one product.
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
class KdaConfig:
    """Sizes and variants of a mixer; q, k and v have the same heads."""

    hidden_size: int
    heads: int
    head_dim: int
    conv_taps: int
    decay_rank: int
    gate_rank: int
    a_log_shape: tuple[int, ...]  # in the checkpoint: some have dimensions of size 1 beside the heads'
    norm_eps: float
    lower_bound: float | None  # of the log decay; None: a softplus without a bound
    is_conv_wide: bool  # the convolution is float32 whatever the activations are

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def projection_parts(self) -> tuple[int, int, int, int]:
        """Rows of the input projection: convolved, b, decay, gate."""
        return 3 * self.width, self.heads, self.decay_rank, self.gate_rank


class KimiDeltaAttention:
    """Reads checkpoint names {q,k,v}_proj, {q,k,v}_conv1d, b_proj, f_a_proj, f_b_proj, g_a_proj, g_b_proj, A_log,
    dt_bias, o_norm, o_proj of its scope.
    """

    caps = RECURRENT_CAPS
    planes: tuple[Plane, ...] = ()
    pair_flops = 0  # a row costs the same after any history

    def __init__(self, scope: Scope, layer: int, config: KdaConfig) -> None:
        self.config = config
        heads, width, dtype = config.heads, config.width, scope.parameters.dtype
        self.in_proj = Linear(
            scope,
            (
                ("q_proj", width),
                ("k_proj", width),
                ("v_proj", width),
                ("b_proj", heads),
                ("f_a_proj", config.decay_rank),
                ("g_a_proj", config.gate_rank),
            ),
            config.hidden_size,
        )
        self.decay_proj = Linear(scope, (("f_b_proj", width),), config.decay_rank)
        self.gate_proj = Linear(scope, (("g_b_proj", width),), config.gate_rank)
        self.out_proj = Linear(scope, (("o_proj", config.hidden_size),), width)
        a_log = scope.parameters.allocate((heads,), torch.float32)
        scope.fill("A_log", a_log, config.a_log_shape)
        dt_bias = scope.tensor("dt_bias", width, dtype=torch.float32)
        norm = scope.tensor("o_norm.weight", config.head_dim, dtype=torch.float32)
        conv_parts = (("q_conv1d", width), ("k_conv1d", width), ("v_conv1d", width))
        conv = short_conv(scope, conv_parts, config.conv_taps, bias=False, is_wide=config.is_conv_wide)
        state = recurrent_state(f"layers.{layer}", conv, (heads, config.head_dim, config.head_dim), dtype)
        self.slots = state.slots
        bound = config.lower_bound
        decay = DecayKind.CHANNEL_SOFTPLUS if bound is None else DecayKind.CHANNEL_BOUNDED
        arrivals = no_arrivals(heads, scope.parameters.device)
        mixer = DeltaMixer(
            conv, a_log, dt_bias, norm, config.norm_eps, decay, bound or 0.0, OutputGate.SIGMOID, arrivals
        )
        self.recurrence = DeltaRecurrence(state, mixer, scope.kernels.recurrent)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        products = (self.in_proj, self.decay_proj, self.gate_proj, self.out_proj)
        return sum(product.in_size * product.out_size for product in products)

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[rows, hidden] to the same; reads and writes the mixer's slots for every sequence of the batch."""
        mixed, b, decay, gate = columns(self.in_proj(hidden), self.config.projection_parts)
        yield
        rows = ProjectedRows(mixed, gate=self.gate_proj(gate), beta=b, decay=self.decay_proj(decay))
        return self.out_proj((yield from self.recurrence.run(rows, inputs.batch, pools)))
