"""The copies of tiers/transfer.py, with tensors.

On an accelerator each calling thread has a stream of its own: a copy begins after the fence, and the call, or `arrived`
after many of them, returns when the bytes are there. So a fence orders every copy against compute, and no buffer is
used again before its copy ended.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from tiers.pools import DevicePools, HostArena
from tiers.transfer import Fence, Image

MOST_BYTES = 16 << 20  # of one copy: what a step sends to the device meanwhile waits for it
MOVES_AT_A_TIME = 64  # the link is busy with these while the next are worked out


@dataclass(frozen=True, slots=True)
class DeviceFence:
    """An event on the stream of compute; None on a CPU, where work is done when its call returns."""

    event: "torch.cuda.Event | None"


class _Run(NamedTuple):
    """Bytes of a pool that come from as many bytes of the arena."""

    is_state: bool  # of the slots, else of the blocks
    target: int  # where they begin
    source: int
    num_bytes: int


def _merge(runs: list[_Run]) -> list[_Run]:
    """The same copies in fewer: neighbours on both sides become one, up to MOST_BYTES."""
    merged: list[_Run] = []
    for run in sorted(runs):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.is_state == run.is_state
            and last.target + last.num_bytes == run.target
            and last.source + last.num_bytes == run.source
            and last.num_bytes + run.num_bytes <= MOST_BYTES
        ):
            merged[-1] = _Run(last.is_state, last.target, last.source, last.num_bytes + run.num_bytes)
        else:
            merged.append(run)
    return merged


class DeviceTransfer:
    """Copies between pools and arena. `arena` is None where there is no host tier."""

    def __init__(self, pools: DevicePools, arena: HostArena | None) -> None:
        self.pools = pools
        self.arena = arena
        self.is_direct = pools.blocks.device.type == "cpu"  # host code reads and writes the pools themselves
        self._local = threading.local()

    def fence(self) -> Fence:
        """Everything that was given to the device until now."""
        if self.is_direct:
            return DeviceFence(None)
        event = torch.cuda.Event()
        event.record()
        return DeviceFence(event)

    def to_host(self, image: Image, chunks: Sequence[int], fence: Fence) -> None:
        """From the device into chunks of the arena, in order."""
        pairs = self._parts(self._tensor(image), chunks)
        self._copy([chunk for _, chunk in pairs], [part for part, _ in pairs], fence)
        self.arrived()

    def to_device(self, moves: Sequence[tuple[Sequence[int], Image]], fence: Fence) -> None:
        """And back. `arrived` tells when."""
        for begin in range(0, len(moves), MOVES_AT_A_TIME):
            self._some_to_device(moves[begin : begin + MOVES_AT_A_TIME], fence)

    def _some_to_device(self, moves: Sequence[tuple[Sequence[int], Image]], fence: Fence) -> None:
        size, runs = self._arena.chunk_bytes, list[_Run]()
        for chunks, image in moves:
            num_bytes = self.pools.layout.slot_bytes if image.is_state else self.pools.layout.block_bytes
            first = image.id_ * num_bytes
            runs += [
                _Run(image.is_state, first + at, chunk * size, min(size, num_bytes - at))
                for at, chunk in zip(range(0, num_bytes, size), chunks, strict=True)
            ]
        pools = self.pools.blocks.view(-1), self.pools.slots.view(-1)
        arena = self._arena.chunks.view(-1)
        merged = _merge(runs)
        targets = [pools[run.is_state][run.target : run.target + run.num_bytes] for run in merged]
        self._copy(targets, [arena[run.source : run.source + run.num_bytes] for run in merged], fence)

    def arrived(self) -> None:
        """Returns when all that this thread has given to the device is there."""
        stream: torch.cuda.Stream | None = getattr(self._local, "stream", None)
        if stream is not None:
            stream.synchronize()

    def landings(self, images: Sequence[Image]) -> list[memoryview]:
        """Host buffers to be filled: the images themselves on a CPU, else this thread's staging buffer."""
        if self.is_direct:
            return [self._tensor(image).numpy().data for image in images]
        sizes = [self._tensor(image).nbytes for image in images]
        staging = self._staging(sum(sizes)).numpy()
        return [staging[end - size : end].data for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def land(self, image: Image, landing: memoryview, fence: Fence) -> None:
        """A filled buffer becomes the image's bytes."""
        if not self.is_direct:
            self._copy([self._tensor(image)], [torch.frombuffer(landing, dtype=torch.uint8)], fence)

    def view(self, image: Image, fence: Fence) -> memoryview:
        """An image's bytes to be read by the host."""
        tensor = self._tensor(image)
        if not self.is_direct:
            copied = torch.empty(tensor.shape, dtype=torch.uint8)
            self._copy([copied], [tensor], fence)
            self.arrived()
            tensor = copied
        return tensor.numpy().data

    def view_chunks(self, chunks: Sequence[int], num_bytes: int) -> memoryview:
        """An image in the arena, to be read by the host."""
        if len(chunks) == 1:
            return self._arena.chunks[chunks[0]][:num_bytes].numpy().data
        gathered = torch.empty(num_bytes, dtype=torch.uint8)
        for part, chunk in self._parts(gathered, chunks):
            np.copyto(part.numpy(), chunk.numpy())
        return gathered.numpy().data

    @property
    def _arena(self) -> HostArena:
        assert self.arena is not None, "there is no host tier"
        return self.arena

    def _tensor(self, image: Image) -> torch.Tensor:
        return self.pools.slots[image.id_] if image.is_state else self.pools.blocks[image.id_]

    def _parts(self, image: torch.Tensor, chunks: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of an image beside the pieces of the arena that hold them."""
        size = self._arena.chunk_bytes
        assert len(chunks) * size >= image.shape[0] > (len(chunks) - 1) * size
        pieces = [image[i * size : (i + 1) * size] for i in range(len(chunks))]
        return [
            (piece, self._arena.chunks[chunk][: piece.shape[0]]) for piece, chunk in zip(pieces, chunks, strict=True)
        ]

    def _staging(self, num_bytes: int) -> torch.Tensor:
        held: torch.Tensor | None = getattr(self._local, "staging", None)
        if held is None or held.shape[0] < num_bytes:
            held = self._local.staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return held[:num_bytes]

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], fence: Fence) -> None:
        assert isinstance(fence, DeviceFence)
        if not targets:
            return  # torch takes no empty list
        if fence.event is None:
            for target, source in zip(targets, sources, strict=True):
                np.copyto(target.numpy(), source.numpy())  # torch would start compute threads of this thread's own
            return
        stream: torch.cuda.Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self.pools.blocks.device)
        stream.wait_event(fence.event)
        with torch.cuda.stream(stream):
            # One call for all: it leaves the interpreter to other threads, where a call each waits for it each time.
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
