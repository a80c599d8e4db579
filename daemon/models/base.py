"""What the engine knows of a model: a few facts, the state it declares, and one forward.

A family is a module of this package that builds a `Model`; nothing outside the package names a family.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from daemon.batch import Batch
from daemon.layers.caps import LayerCaps
from daemon.layers.steps import Steps
from tiers.layout import StateLayout
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model is, fixed when it is built."""

    family: str  # model_type of its configuration
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int  # tied ones counted once
    weight_bytes: int
    dtype: torch.dtype  # of activations
    device: torch.device


@dataclass(frozen=True, slots=True)
class Compute:
    """What a token costs: `2 * matmul_params + pair_flops * history_len` FLOPs, the embedding look-up not counted."""

    matmul_params: int  # weights that multiply each token (of experts: only the chosen ones)
    pair_flops: int  # of one query token with one history token, all layers together


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Where and how a model computes; chosen by the engine before it loads."""

    dtype: torch.dtype
    device: torch.device
    tile: int  # tokens; attention walks keys in tiles at absolute multiples of it
    folder: Path | None = None  # where tables that stay on disk are read; None where weights are made up


class Model(Protocol):
    """A loaded model. It holds weights only; whatever belongs to a sequence lives in the pools."""

    facts: ModelFacts
    caps: LayerCaps
    compute: Compute

    def layout(self, block_size: int) -> StateLayout:
        """The planes and slot tensors of one sequence.

        Raises:
            ValueError: a plane's rows do not divide the block size.
        """
        ...

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Computes all rows, writing their state; returns logits [len(batch.logit_rows), vocab_size] in float32.

        Every block and slot named by the batch must lie inside the pools. Bytes of a result do not depend on block
        ids, nor on what unheld or unwritten rows contain.
        """
        ...


@runtime_checkable
class HostStaged(Protocol):
    """What a model has besides, where `caps.no_host_stage` is False: parts that stay on disk until rows need them."""

    def prefetch(self, earlier_ids: list[int], token_ids: list[int]) -> None:
        """Begins to read what a later chunk of these tokens will need, after others of the same sequence."""
        ...

    def tables_digest(self) -> bytes:
        """Tells those parts from others, for the state fingerprint."""
        ...


def finish(steps: Steps) -> torch.Tensor:
    """Runs a computation to its end without pausing."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
