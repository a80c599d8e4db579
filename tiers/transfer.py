"""How bytes move between the device's pools, the host arena and the disk's buffers, seen from the books.

Everything here is by id, and host memory is a view of bytes: the books know no tensors. Calls with a fence are made on
I/O threads; whoever plans a copy takes the fence, and its owner's resources keep the ids in place until it has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Fence(Protocol):
    """A moment in the device's work. A copy behind it begins when everything before that moment is done."""


@dataclass(frozen=True, slots=True)
class Image:
    """A block's or a slot's bytes on the device."""

    id_: int
    is_state: bool


class Transfer(Protocol):
    """Copies that have arrived when their call returns, but for those to the device, which `arrived` waits for."""

    def fence(self) -> Fence:
        """Everything that was given to the device until now."""
        ...

    def to_host(self, image: Image, chunks: Sequence[int], fence: Fence) -> None:
        """From the device into chunks of the arena, in order."""
        ...

    def to_device(self, moves: Sequence[tuple[Sequence[int], Image]], fence: Fence) -> None:
        """And back, of many images at once; they have arrived when `arrived` has returned."""
        ...

    def arrived(self) -> None:
        """Returns when all that the calling thread has sent to the device is there."""
        ...

    def landings(self, images: Sequence[Image]) -> list[memoryview]:
        """Host buffers, one for each image, to be filled and then landed; on a CPU the images themselves.

        They belong to the calling thread until its next call.
        """
        ...

    def land(self, image: Image, landing: memoryview, fence: Fence) -> None:
        """A filled buffer becomes the image's bytes, when `arrived` has returned."""
        ...

    def view(self, image: Image, fence: Fence) -> memoryview:
        """An image's bytes to be read by the host; a copy where the device's memory is not the host's."""
        ...

    def view_chunks(self, chunks: Sequence[int], num_bytes: int) -> memoryview:
        """The same of an image in the arena; a copy where it lies in several chunks."""
        ...
