"""Planes on an accelerator for a forward whose history is partly below it: one layer at a time, in buffers of its own.

Kernels read planes in the accelerator's memory. So a layer's blocks, wherever they are, are copied into a buffer in the
order of the table, and the forward runs over a table that counts from 0: bytes follow from tokens, not from ids. Two
buffers take turns. While one layer computes, the next one's blocks come over the link, on a stream of their own. The
rows that a layer has written go back to the pool when the next layer begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch

from tiers.layout import Part
from tiers.residency import StreamStats, Tier
from tiers.streamed import Sources, forecast, layer_of, runs_of

GROWTH = 1.25  # of a buffer that is too small, beyond what is wanted
ALIGNMENT_BYTES = 256  # of a plane in a buffer

MoveRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Rows of one byte matrix, by their ids, to rows of another; either may lie in pinned memory."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """One layer's planes, side by side: by name, as bytes [blocks of the table, bytes of a part]."""

    memory: torch.Tensor
    layer: int = -1  # none
    rows: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    arrived: Any = None  # the event behind the copies into it


class Stager:
    """The buffers and the stream, made once. One forward at a time uses them.

    The buffers take twice the largest layer's planes of the longest context that has been streamed.
    """

    def __init__(self, sources: Sources, move_rows: MoveRows) -> None:
        self.sources = sources
        self.move_rows = move_rows
        device = sources.pools.blocks.device
        self.stream = torch.cuda.Stream(device)
        self.buffers = [_Buffer(torch.empty(0, dtype=torch.uint8, device=device)) for _ in range(2)]
        self.landing = torch.empty(0, dtype=torch.uint8)  # pinned; of what comes from the spill
        self.layers = tuple(tuple(parts) for _, parts in groupby(sources.parts, key=layer_of))
        self._latest: StagedPools | None = None

    def begin(self, forward: "StagedPools", num_blocks: int) -> None:
        """A forward over a table so long is the one that uses the buffers from now on.

        The one before it may have been dropped half-way: what its copies read is kept until they have ended.

        Raises:
            torch.OutOfMemoryError: the device has no room for the buffers.
        """
        self.stream.synchronize()
        self._latest = forward
        self._make_room(num_blocks)

    def _make_room(self, num_blocks: int) -> None:
        """What earlier forwards left in the buffers is forgotten."""
        wanted = max(sum(_room(num_blocks, part) for part in parts) for parts in self.layers)
        for number, buffer in enumerate(self.buffers):
            memory = buffer.memory
            if memory.shape[0] < wanted:
                torch.cuda.synchronize(memory.device)
                self.buffers[number] = buffer = _Buffer(memory[:0])  # the old one goes before the new one comes
                memory = torch.empty(int(GROWTH * wanted), dtype=torch.uint8, device=memory.device)
            self.buffers[number] = _Buffer(memory)


class StagedPools:
    """Stands for the pools in one forward: `planes`, `slot_tensors` and `layout` are what layers use of them.

    Args:
        table: block ids of all tiers, as far as the forward reads and writes.
        first_written: the first place in it that the forward writes; all from there on are on the device.
    """

    def __init__(self, stager: Stager, table: Sequence[int], first_written: int) -> None:
        sources = stager.sources
        self.layout = sources.pools.layout
        self.blocks = sources.pools.blocks
        self.slot_tensors = sources.pools.slot_tensors
        self.stats = StreamStats()
        self.planes = self  # asked by name
        self._stager = stager
        self._layer_of = {part.name: n for n, parts in enumerate(stager.layers) for part in parts}
        self._num_blocks = len(table)
        self._current = -1  # the layer that computes
        self._copies: list[tuple[Any, Any]] = []  # events before and behind those of each layer
        stager.begin(self, len(table))
        space, ids = sources.space, np.array(table, dtype=np.int64)
        tiers = np.searchsorted((space.first_host, space.first_spill), ids, side="right")
        self._device = self._places(ids, tiers == Tier.DEVICE, 0)
        self._host = self._places(ids, tiers == Tier.HOST, space.first_host)
        self._spill = [
            (run.first, (ids[run.first : run.last] - space.first_spill).tolist())
            for run in runs_of(space, ids)
            if run.tier is Tier.SPILL
        ]
        self._written = self._places(ids, np.arange(len(table)) >= first_written, 0)
        if self._spill:
            assert sources.spill is not None
            sources.spill.announce(forecast(sources, list(table), is_chunk=False))
        self._stage(0, stager.buffers[0], self._now())

    def __getitem__(self, name: str) -> torch.Tensor:
        """A plane over the table, [len(table), rows, *row_shape]; its layer becomes the one that computes."""
        layer = self._layer_of[name]
        if layer != self._current:
            self._turn_to(layer)
        plane = self._stager.sources.pools.planes[name]
        return self._held(layer).rows[name].view(plane.dtype).view(self._num_blocks, *plane.shape[1:])

    def finish(self) -> None:
        """The forward has been given to the device: what its last layer wrote goes back, and the copies are timed."""
        self._write_back()
        self._stager.stream.synchronize()
        self.stats.elapsed_s = sum(begun.elapsed_time(arrived) for begun, arrived in self._copies) / 1e3

    def _turn_to(self, layer: int) -> None:
        self._write_back()
        free = self._now()
        if not self._is_here(layer):  # nobody foresaw it
            self._stage(layer, self._stager.buffers[0], free)
        torch.cuda.current_stream().wait_event(self._held(layer).arrived)
        self._current = layer
        if layer + 1 < len(self._stager.layers) and not self._is_here(layer + 1):
            self._stage(layer + 1, next(b for b in self._stager.buffers if b.layer != layer), free)

    def _is_here(self, layer: int) -> bool:
        return any(buffer.layer == layer for buffer in self._stager.buffers)

    def _held(self, layer: int) -> _Buffer:
        return next(buffer for buffer in self._stager.buffers if buffer.layer == layer)

    def _stage(self, layer: int, buffer: _Buffer, free: Any) -> None:
        """Copies a layer's planes into a buffer, once the device has done all that `free` stands behind."""
        stream, offset = self._stager.stream, 0
        stream.wait_event(free)
        buffer.layer, buffer.rows = layer, {}
        with torch.cuda.stream(stream):
            begun = self._now()
            for part in self._stager.layers[layer]:
                rows = buffer.memory[offset : offset + self._num_blocks * part.num_bytes].view(-1, part.num_bytes)
                self._bring(part, rows)
                buffer.rows[part.name] = rows
                offset += _room(self._num_blocks, part)
            buffer.arrived = self._now()
        self._copies.append((begun, buffer.arrived))

    def _bring(self, part: Part, rows: torch.Tensor) -> None:
        """A plane's part of every block, to rows of bytes."""
        sources, move_rows = self._stager.sources, self._stager.move_rows
        move_rows(_bytes(sources.pools.planes[part.name]), self._device[1], rows, self._device[0])
        if len(self._host[0]):
            move_rows(_bytes(sources.arena_planes[part.name]), self._host[1], rows, self._host[0])
            self.stats.host_bytes += len(self._host[0]) * part.num_bytes
        for first, blocks in self._spill:
            assert sources.spill is not None
            landing = self._landing(len(blocks) * part.num_bytes)
            sources.spill.fill(landing.numpy().data, part, blocks)
            rows[first : first + len(blocks)].view(-1).copy_(landing, non_blocking=True)
            self.stats.disk_bytes += 0 if sources.spill.spill.is_kept(part) else landing.nbytes

    def _landing(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory, once the copy that read it before has ended."""
        self._stager.stream.synchronize()
        if self._stager.landing.shape[0] < num_bytes:
            is_pinned = self.blocks.is_cuda
            self._stager.landing = torch.empty(int(GROWTH * num_bytes), dtype=torch.uint8, pin_memory=is_pinned)
        return self._stager.landing[:num_bytes]

    def _write_back(self) -> None:
        """What the current layer wrote, to the pool."""
        if self._current < 0:
            return
        places, ids = self._written
        for name, rows in self._held(self._current).rows.items():
            self._stager.move_rows(rows, places, _bytes(self._stager.sources.pools.planes[name]), ids)
        self._current = -1

    def _places(self, ids: Any, wanted: Any, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the table, and the ids there within their tier."""
        places: list[int] = np.flatnonzero(wanted).tolist()
        inside: list[int] = (ids[places] - first).tolist()
        device = self.blocks.device
        return torch.tensor(places, dtype=torch.int64, device=device), torch.tensor(
            inside, dtype=torch.int64, device=device
        )

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _room(num_blocks: int, part: Part) -> int:
    return -(-num_blocks * part.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes of a part], a view."""
    return plane.flatten(1).view(torch.uint8)
