"""Bytes on their way between the device's pools and the host arena, and the views that disk records are read into.

Called on I/O threads; the ids are kept in place by their owners' resources. On an accelerator a copy has a stream of
its own: it begins after the fence, which the books' thread set when it planned the copy, and the call returns when the
bytes have arrived. So a fence orders every copy against compute, and no buffer is used again before its copy has ended.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from tiers.pools import DevicePools, HostArena


@dataclass(frozen=True, slots=True)
class Fence:
    """All work on the device up to a moment; None on a CPU, where work is done when its call returns."""

    event: "torch.cuda.Event | None"


class Transfer:
    """Copies between pools and arena. `arena` is None where there is no host tier."""

    def __init__(self, pools: DevicePools, arena: HostArena | None) -> None:
        self.pools = pools
        self.arena = arena
        self.is_direct = pools.blocks.device.type == "cpu"  # host code reads and writes the pools themselves
        self._local = threading.local()

    def fence(self) -> Fence:
        """Everything that was given to the device until now."""
        if self.is_direct:
            return Fence(None)
        event = torch.cuda.Event()
        event.record()
        return Fence(event)

    def block_to_host(self, block_id: int, chunk: int, fence: Fence) -> None:
        """A block's image into the arena."""
        self._copy(self._arena.chunks[chunk][: self.pools.layout.block_bytes], self.pools.blocks[block_id], fence)

    def block_to_device(self, chunk: int, block_id: int, fence: Fence) -> None:
        """And back."""
        self._copy(self.pools.blocks[block_id], self._arena.chunks[chunk][: self.pools.layout.block_bytes], fence)

    def slot_to_host(self, slot_id: int, chunks: Sequence[int], fence: Fence) -> None:
        """A slot's image into the arena, chunk by chunk."""
        for part, chunk in self._parts(self.pools.slots[slot_id], chunks):
            self._copy(self._arena.chunks[chunk][: part.shape[0]], part, fence)

    def slot_to_device(self, chunks: Sequence[int], slot_id: int, fence: Fence) -> None:
        """And back."""
        for part, chunk in self._parts(self.pools.slots[slot_id], chunks):
            self._copy(part, self._arena.chunks[chunk][: part.shape[0]], fence)

    def gather(self, chunks: Sequence[int], image: torch.Tensor) -> None:
        """An image that lies in several chunks, as one host buffer."""
        for part, chunk in self._parts(image, chunks):
            np.copyto(part.numpy(), self._arena.chunks[chunk][: part.shape[0]].numpy())

    def image(self, id_: int, *, is_state: bool) -> torch.Tensor:
        """A slot's or a block's image on the device, uint8."""
        return self.pools.slots[id_] if is_state else self.pools.blocks[id_]

    def chunk(self, chunk: int, num_bytes: int) -> torch.Tensor:
        """The beginning of an arena's chunk, uint8."""
        return self._arena.chunks[chunk][:num_bytes]

    def staging(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Host buffers of this thread's own, uint8, for images on their way to or from an accelerator."""
        total = sum(sizes)
        held: torch.Tensor | None = getattr(self._local, "buffer", None)
        if held is None or held.shape[0] < total:
            held = self._local.buffer = torch.empty(total, dtype=torch.uint8, pin_memory=not self.is_direct)
        ends = list(accumulate(sizes))
        return [held[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def copy(self, target: torch.Tensor, source: torch.Tensor, fence: Fence) -> None:
        """Bytes of one buffer into another, arrived when this returns."""
        self._copy(target, source, fence)

    @property
    def _arena(self) -> HostArena:
        assert self.arena is not None, "there is no host tier"
        return self.arena

    def _parts(self, image: torch.Tensor, chunks: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        size = self._arena.chunk_bytes
        assert len(chunks) * size >= image.shape[0] > (len(chunks) - 1) * size
        return [(image[i * size : (i + 1) * size], chunk) for i, chunk in enumerate(chunks)]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, fence: Fence) -> None:
        if fence.event is None:
            np.copyto(target.numpy(), source.numpy())  # torch would start compute threads of this thread's own
            return
        stream: torch.cuda.Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self.pools.blocks.device)
        stream.wait_event(fence.event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
