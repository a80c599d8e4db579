"""How a frame of layers runs a mixer: at once, or a row at a time where the state after every row is wanted."""

from typing import Protocol

import torch

from daemon.layers.caps import LayerCaps
from daemon.layers.inputs import Inputs
from daemon.layers.steps import Steps
from tiers.layout import Plane, SlotTensor
from tiers.pools import DevicePools


class Mixer(Protocol):
    """The part of a layer that looks at other rows."""

    caps: LayerCaps
    planes: tuple[Plane, ...]
    slots: tuple[SlotTensor, ...]

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        ...

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one history token."""
        ...

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[num_rows, hidden_size] to the same, writing the rows' state."""
        ...


def mix(mixer: Mixer, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
    """[num_rows, ...] through a mixer.

    In a verification batch a mixer with slots takes the rows as the decode steps that they stand for, so that each
    row's state lands in a slot of its own, with the bytes that decoding would give it. A mixer without slots has
    nothing to keep or drop but rows of its planes, and takes all at once.
    """
    if not inputs.steps or not mixer.slots:
        return (yield from mixer.forward(hidden, inputs, pools))
    mixed = torch.empty_like(hidden)
    for step in inputs.steps:
        mixed[step.rows] = yield from mixer.forward(hidden[step.rows], step.inputs, pools)
    return mixed
