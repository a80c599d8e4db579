"""What a stop is worth to a tier: the FLOPs that a hit there would save, for the bytes that its eviction frees.

tiers/eviction.py says what a stop is and what is done with its worth. A tier is a `View` here: which blocks and states
of the tree it has, and so what hangs below a node in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tiers.eviction import Worth
from tiers.flops import ComputeCost
from tiers.layout import StateLayout
from tiers.tree import Node


@dataclass(frozen=True, slots=True)
class View:
    """How one tier sees a node."""

    has_state: Callable[[Node], bool]
    num_children: Callable[[Node], int]  # whose blocks it has


DEVICE = View(lambda node: node.checkpoint is not None, lambda node: node.device_children)
HOST = View(lambda node: node.host_state is not None, lambda node: node.host_children)
DISK = View(lambda node: node.disk_state is not None, lambda node: node.disk_children)


class Appraiser:
    """Knows the model's costs and sizes."""

    def __init__(self, layout: StateLayout, grid: int, cost: ComputeCost) -> None:
        self.layout = layout
        self.grid = grid
        self.cost = cost

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a grid chunk: the most that go at a time."""
        return self.grid // self.layout.block_size

    def longest_len(self, num_bytes: int) -> int:
        """Tokens of the longest prefix that so many bytes can hold with its state, on the grid; as raw images."""
        state_bytes = -(-self.layout.slot_bytes // self.layout.block_bytes) * self.layout.block_bytes  # in whole chunks
        return max(num_bytes - state_bytes, 0) // (self.chunk_blocks * self.layout.block_bytes) * self.grid

    def stop(self, node: Node, view: View) -> Worth:
        """A leaf of the tier with the blocks that only it needs, or a checkpoint that something hangs below."""
        size, is_leaf = self.layout.block_size, view.num_children(node) == 0
        has_state = view.has_state(node)
        num_blocks, above = int(is_leaf), node.parent
        num_walked = 0
        while above is not None and above.parent is not None and not view.has_state(above):
            if not self.layout.slots and num_walked + 1 >= self.chunk_blocks:
                break
            is_leaf = is_leaf and view.num_children(above) == 1
            num_blocks += is_leaf
            num_walked += 1
            above = above.parent
        start = above.depth * size if above is not None else 0
        can_resume = has_state or not self.layout.slots
        return Worth(
            last_use_s=node.used_s,
            gap_s=node.gap_s,
            flops=self.cost.flops(start, node.depth * size) if can_resume else 0,
            num_bytes=num_blocks * self.layout.block_bytes + has_state * self.layout.slot_bytes,
        )

    def state(self, node: Node) -> Worth:
        """A checkpoint on the device alone, which frees a slot."""
        whole = self.stop(node, DEVICE)
        return Worth(whole.last_use_s, whole.gap_s, whole.flops, self.layout.slot_bytes)
