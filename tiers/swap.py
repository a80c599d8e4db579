"""Moving a live sequence's state to the host tier and back, every byte of planes and slot, so that nothing is computed
twice when it has to make room for an older one.

Copies are made before the call returns: the device's blocks are free at once. What the tree knows goes to the host as
the tree's own copy, which others may hit there; the rest belongs to the sequence. Both are held until it is back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiers.device import DeviceTier
from tiers.host import HostTier
from tiers.resources import Resources
from tiers.transfer import Image, Transfer
from tiers.tree import Node


@dataclass(slots=True, eq=False)
class Swapped:
    """A sequence's state in the host tier: the blocks that cover [0, computed_len), in order, and the slot."""

    resources: Resources
    nodes: tuple[Node, ...]  # of the first blocks
    block_chunks: tuple[tuple[int, ...], ...]
    slot_chunks: tuple[int, ...]
    computed_len: int


@dataclass(frozen=True, slots=True)
class Returned:
    """What a sequence holds after it has come back."""

    block_table: list[int]
    slot: int


class Swapper:
    """Stateless but for the books it works on."""

    def __init__(self, device: DeviceTier, host: HostTier, transfer: Transfer) -> None:
        self.device = device
        self.host = host
        self.transfer = transfer

    def out(
        self, owner: str, block_ids: Sequence[int], nodes: Sequence[Node], slot: int, computed_len: int
    ) -> Swapped | None:
        """Copies a sequence's blocks and slot; None where the host has no room, with nothing held."""
        resources = Resources(f"swap:{owner}")
        fence = self.transfer.fence()
        block_chunks: list[tuple[int, ...]] = []
        for position, block_id in enumerate(block_ids):
            node = nodes[position] if position < len(nodes) else None
            if node is not None and node.host_block is not None:
                self.host.hold(resources, node.host_block)
                block_chunks.append(node.host_block.chunks)
                continue
            chunks = self.host.take_for(resources, 1)
            if chunks is None:
                resources.release()
                return None
            self.transfer.to_host(Image(block_id, is_state=False), chunks, fence)
            if node is not None:
                self.host.give(resources, node, chunks, is_state=False)
                assert node.host_block is not None
                self.host.hold(resources, node.host_block)
            block_chunks.append(chunks)
        slot_chunks: tuple[int, ...] = ()
        if self.device.layout.slots:
            taken = self.host.take_for(resources, self.host.chunks_for(self.device.layout.slot_bytes))
            if taken is None:
                resources.release()
                return None
            slot_chunks = taken
            self.transfer.to_host(Image(slot, is_state=True), slot_chunks, fence)
        kept = tuple(nodes[: len(block_ids)])
        return Swapped(resources, kept, tuple(block_chunks), slot_chunks, computed_len)

    def needs(self, swapped: Swapped) -> tuple[int, int]:
        """Device blocks that coming back takes, and cached ones that it will hold."""
        resident = [node for node in swapped.nodes if node.block_id is not None]
        return len(swapped.block_chunks) - len(resident), sum(node.is_cached for node in resident)

    def back(self, swapped: Swapped, resources: Resources) -> Returned:
        """Everything is on the device again, held by `resources`; the caller has checked that there is room."""
        device = self.device
        resident = [node for node in swapped.nodes if node.block_id is not None]
        if resident:
            device.hold_path(resources, resident[-1])
        fresh = iter(device.take_blocks(resources, len(swapped.block_chunks) - len(resident)))
        slot = device.take_slot(resources)
        fence = self.transfer.fence()
        table: list[int] = []
        moves: list[tuple[tuple[int, ...], Image]] = []
        for position, chunks in enumerate(swapped.block_chunks):
            node = swapped.nodes[position] if position < len(swapped.nodes) else None
            if node is not None and node.block_id is not None:
                table.append(node.block_id)
                continue
            block_id = next(fresh)
            moves.append((chunks, Image(block_id, is_state=False)))
            if node is not None:
                assert node.parent is not None, "a held copy keeps its node"
                device.attach(resources, node, block_id)
            table.append(block_id)
        if swapped.slot_chunks:
            moves.append((swapped.slot_chunks, Image(slot, is_state=True)))
        self.transfer.to_device(moves, fence)
        self.transfer.arrived()
        swapped.resources.release()
        return Returned(table, slot)
