"""Planes over the blocks of all tiers: what a forward is given whose tables name blocks that are not on the device.

A block id names a block in any tier (tiers/residency.py): from 0 the device's, then the host arena's chunks, then the
blocks of the spill. A streamed plane answers what layers ask of a plane, wherever a block is, with the bytes that the
pool's plane would give had the block been in the pool. So no layer and no kernel knows of tiers, and tiles, splits and
their order are those of a forward whose history is all resident. Rows are written to blocks of the device alone.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from tiers.layout import Part
from tiers.pools import DevicePools
from tiers.residency import BlockSpace, StreamStats, Tier
from tiers.spill_reader import SpillReader

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the blocks of each tier are read."""

    space: BlockSpace
    pools: DevicePools
    arena_planes: dict[str, torch.Tensor]  # [num_chunks, rows, *row_shape] by name; empty where there is no host tier
    spill: SpillReader | None
    parts: tuple[Part, ...]  # of a block


class StreamedPools:
    """Stands for the pools in one forward: `planes`, `slot_tensors` and `layout` are what layers use of them."""

    def __init__(self, sources: Sources, table: list[int], *, is_chunk: bool) -> None:
        pools = sources.pools
        self.layout = pools.layout
        self.blocks = pools.blocks
        self.slot_tensors = pools.slot_tensors
        self.stats = StreamStats()
        self.planes = {
            part.name: StreamedPlane(
                sources, part, self.stats, pools.planes[part.name], sources.arena_planes.get(part.name)
            )
            for part in sources.parts
        }
        if sources.spill is not None:
            sources.spill.announce(forecast(sources, table, is_chunk=is_chunk))


@dataclass(slots=True, eq=False)
class StreamedPlane:
    """One plane, [blocks of all tiers, rows, *row_shape]."""

    sources: Sources
    part: Part
    stats: StreamStats
    _plane: torch.Tensor  # the pool's
    _arena: torch.Tensor | None  # the host arena's

    @property
    def shape(self) -> torch.Size:
        """As the pool's plane has it: whoever asks wants the rows of a block and the shape of a row."""
        return self._plane.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._plane.dtype

    @property
    def device(self) -> torch.device:
        return self._plane.device

    @property
    def ndim(self) -> int:
        return self._plane.ndim

    def index_put_(self, place: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        """Writes rows to (block, offset) on the device."""
        self._plane.index_put_(place, rows)

    def __setitem__(self, place: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        self._plane[place] = rows

    def __getitem__(self, place: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Single rows at (block, offset), two tensors of one shape: [*that shape, *row_shape]."""
        blocks, offsets = place
        wanted = cast(torch.Tensor, torch.unique(blocks))  # type: ignore[reportUnknownMemberType]  # torch's own stub
        return self._gather(wanted, is_picked=True)[torch.searchsorted(wanted, blocks), offsets]

    def index_select(self, dim: int, ids: torch.Tensor) -> torch.Tensor:
        """Whole blocks: [len(ids), rows, *row_shape], contiguous.

        Raises:
            SpillError: a block below cannot be read, or does not check.
        """
        assert dim == 0
        return self._gather(ids, is_picked=False)

    def _gather(self, ids: torch.Tensor, *, is_picked: bool) -> torch.Tensor:
        host_ids: Ids = ids.numpy(force=True)
        runs = runs_of(self.sources.space, host_ids)
        if len(runs) == 1 and runs[0].tier is Tier.DEVICE:
            return self._plane.index_select(0, ids)
        began = time.perf_counter()
        out = torch.empty((len(host_ids), *self._plane.shape[1:]), dtype=self.dtype, device=self.device)
        for run in runs:
            place = slice(run.first, run.last)
            if run.tier is Tier.DEVICE:
                torch.index_select(self._plane, 0, ids[place], out=out[place])
            elif run.tier is Tier.HOST:
                self._from_host(out[place], ids[place] - self.sources.space.first_host)
            else:
                blocks: list[int] = (host_ids[place] - self.sources.space.first_spill).tolist()
                self._from_spill(out[place], blocks, is_picked=is_picked)
        self.stats.elapsed_s += time.perf_counter() - began
        return out

    def _from_host(self, out: torch.Tensor, chunks: torch.Tensor) -> None:
        assert self._arena is not None
        self.stats.host_bytes += out.nbytes
        torch.index_select(self._arena, 0, chunks, out=out)

    def _from_spill(self, out: torch.Tensor, blocks: list[int], *, is_picked: bool) -> None:
        assert self.sources.spill is not None
        view = out.flatten().view(torch.uint8).numpy().data
        if is_picked:
            num_missed = self.sources.spill.pick(view, self.part, blocks)
            self.stats.picked += len(blocks)
            self.stats.picked_hits += len(blocks) - num_missed
            self.stats.disk_bytes += num_missed * self.part.num_bytes
        else:
            self.sources.spill.fill(view, self.part, blocks)
            self.stats.disk_bytes += 0 if self.sources.spill.spill.is_kept(self.part) else out.nbytes


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a gather that are in one tier."""

    first: int
    last: int
    tier: Tier


def forecast(sources: Sources, table: list[int], *, is_chunk: bool) -> Iterator[tuple[Part, int]]:
    """What a forward over this table will read of the spill, layer by layer: a chunk by tiles, a row all keys first."""
    first = sources.space.first_spill
    assert sources.spill is not None
    extents = list(dict.fromkeys((id_ - first) // sources.spill.spill.chunk_blocks for id_ in table if id_ >= first))
    for _, group in groupby(sources.parts, key=layer_of):
        parts = [part for part in group if not sources.spill.spill.is_kept(part)]
        if is_chunk:
            yield from ((part, extent) for extent in extents for part in parts)
        else:
            yield from ((part, extent) for part in parts for extent in extents)


def layer_of(part: Part) -> str:
    """Planes of one layer have names that differ in their last word."""
    return part.name.rpartition(".")[0]


def runs_of(space: BlockSpace, ids: Ids) -> list[Run]:
    """Where in a list of ids neighbours are in one tier."""
    tiers = np.searchsorted((space.first_host, space.first_spill), ids, side="right")
    ends = [0, *(np.flatnonzero(np.diff(tiers)) + 1).tolist(), len(ids)]
    return [Run(first, last, Tier(int(tiers[first]))) for first, last in pairwise(ends)]
