"""Sparse latent attention: an indexer picks keys, latent attention reads only those. Layers may share one selection."""

from collections.abc import Generator
from dataclasses import dataclass

import torch

from daemon.layers.indexer import DsaIndexConfig, DsaIndexer
from daemon.layers.inputs import Inputs
from daemon.layers.mla import PAGED_CAPS, LatentConfig, LatentProjections
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.indexer import Selection
from tiers.layout import Plane, SlotTensor
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class SparseResult:
    """The layer's output, and the selection that it used, for a layer that has no indexer of its own."""

    out: torch.Tensor  # [rows, hidden_size]
    selections: list[Selection]  # one a piece of the batch


class SparseLatentAttention:
    """Without an indexer it uses the selection of the layer before."""

    caps = PAGED_CAPS

    def __init__(self, scope: Scope, layer: int, config: LatentConfig, index: DsaIndexConfig | None) -> None:
        self.config = config
        self.projections = LatentProjections(scope, layer, config)
        self.indexer = None if index is None else DsaIndexer(scope / "indexer", layer, index)
        self.planes: tuple[Plane, ...] = (self.projections.plane,)
        self.slots: tuple[SlotTensor, ...] = ()
        self.active_params = self.projections.active_params
        self.pair_flops = self.projections.pair_flops
        self._forms = scope.kernels.attention
        if self.indexer is not None:
            self.planes = (*self.planes, self.indexer.state.plane)
            self.slots = self.indexer.state.slots
            self.active_params += self.indexer.active_params
            self.pair_flops += self.indexer.pair_flops

    def forward(
        self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools, selections: list[Selection] | None
    ) -> Generator[None, None, SparseResult]:
        """Writes the rows' latents and index keys, and attends to what is selected of the paged history."""
        config = self.config
        queries = self.projections.project(hidden, inputs, pools)
        yield
        if self.indexer is not None:
            selections = yield from self.indexer.select(hidden, queries.low_rank, inputs, pools)
        assert selections is not None, "a layer without an indexer follows one that selects"
        plane = pools.planes[self.projections.plane.name]
        attended: list[torch.Tensor] = []
        latent_dim, scale = config.latent_dim, config.scale
        for (rows, span), selection in zip(inputs.pieces, selections, strict=True):
            yield
            absorbed = queries.absorbed[rows]
            attended.append(
                self._forms.sparse_latent(absorbed, plane, span, selection, latent_dim=latent_dim, scale=scale)
            )
        yield
        return SparseResult(self.projections.finish(attended), selections)


class SelectingLatentAttention:
    """The same as a mixer like any other: it always has an indexer, and keeps its selection to itself."""

    caps = PAGED_CAPS

    def __init__(self, scope: Scope, layer: int, config: LatentConfig, index: DsaIndexConfig) -> None:
        self.attention = SparseLatentAttention(scope, layer, config, index)
        self.planes = self.attention.planes
        self.slots = self.attention.slots
        self.active_params = self.attention.active_params
        self.pair_flops = self.attention.pair_flops

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[rows, hidden_size] to the same."""
        result = yield from self.attention.forward(hidden, inputs, pools, None)
        return result.out
