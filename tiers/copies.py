"""Where a node's bytes lie below the device."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HostCopy:
    """An image in the host arena, in chunks that need not be neighbours."""

    chunks: tuple[int, ...]
    users: int = 0  # transfers and swapped-out sequences that need it where it is

    @property
    def is_busy(self) -> bool:
        return self.users > 0
