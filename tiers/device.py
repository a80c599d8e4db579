"""The device tier's books: who has which block and slot, and which prefixes can be reused.

Ids only; the bytes are in tiers/pools.py, and whoever asks for an id copies them. A block is free, cached (in the tree,
nothing holds it) or held; a slot is free, a checkpoint of the tree, or held. free + cached + held = pool, for both.

A block that the tree knows is owned by the tree and by every sequence that runs through it. Such blocks are canonical:
their whole grid chunk was computed by one full-length forward, so whoever holds them may read them and none may write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiers.eviction import LRU, EvictionOrder, Weights
from tiers.flops import ComputeCost
from tiers.id_pool import IdPool
from tiers.keys import TOKEN_BYTES, Provenance, block_key, root_key, token_bytes
from tiers.layout import StateLayout
from tiers.match import Deeper, Match, MatchEnd
from tiers.meters import EvictionReason, TierMeters
from tiers.resources import Resources
from tiers.tree import Node, PrefixTree
from tiers.worth import DEVICE, Appraiser

NO_COST = ComputeCost(matmul_params=0, pair_flops=0)  # all stops are worth the same


@dataclass(slots=True)
class DeviceStats:
    """Counters since start-up."""

    hit_tokens: int = 0
    miss_tokens: int = 0
    evicted_blocks: int = 0
    lost_blocks: int = 0  # of those, the ones that no other tier has
    evicted_checkpoints: int = 0


class DeviceTier:
    """Books of one device. Block 0 and slot 0 are reserved: padding points at them, nobody holds them.

    `forget` takes the nodes that went with their last block, to give back what they have in other tiers.
    """

    def __init__(
        self,
        layout: StateLayout,
        *,
        grid: int,
        num_blocks: int,
        num_slots: int,
        fingerprint: bytes,
        appraiser: Appraiser | None = None,
        weights: Weights = LRU,
    ) -> None:
        layout.check_grid(grid)
        self.layout = layout
        self.weights = weights
        self.grid = grid
        self.fingerprint = fingerprint
        self.blocks = IdPool(num_blocks)
        self.slots = IdPool(num_slots)
        self.tree = PrefixTree()
        self.appraiser = appraiser or Appraiser(layout, grid, NO_COST)
        # What may go, if anything must: leaves for their blocks, checkpoints for their slots.
        self.leaves = EvictionOrder[Node](self.weights)
        self.states = EvictionOrder[Node](self.weights)
        self.stats = DeviceStats()
        self.meters = TierMeters()
        self.forget: Callable[[list[Node]], None] = _has_no_other_tier
        self.reserved_blocks = self.blocks.take(1)
        self.reserved_slots = self.slots.take(1)
        assert self.reserved_blocks == [0]
        assert self.reserved_slots == [0]

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences, cache and pins share."""
        return self.blocks.size - len(self.reserved_blocks)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be taken now, evicting what nothing holds."""
        return self.blocks.num_free + self.tree.num_cached

    @property
    def num_available_slots(self) -> int:
        return self.slots.num_free + self.tree.num_checkpoints - self.tree.num_held_checkpoints

    def root(self, namespace: str) -> Node:
        """The node above a namespace's first blocks."""
        return self.tree.root(self._root_key(namespace), namespace)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover positions [0, num_tokens)."""
        return -(-num_tokens // self.layout.block_size)

    def lookup(
        self, token_ids: Sequence[int], namespace: str, after: Node | None = None, *, known: Node | None = None
    ) -> Match:
        """How much of a prompt is here, beyond `after`, whose path it is known to run through.

        Holds nothing and refreshes nothing. With slots a prefix is only as long as its deepest checkpoint at a grid
        position. `nodes` are those beyond `after`, `resume_len` and `known_len` count from the prompt's start. `known`
        is the last node of another match of this prompt: as long as the tree has it nothing above it is compared again.
        """
        size = self.layout.block_size
        start = after.depth * size if after is not None else 0
        last = (len(token_ids) - 1) // self.grid * self.grid  # the largest grid position below the end
        if known is not None and known.parent is not None and after is None:
            path = known.path() + self.walk(token_ids, namespace, known)
        else:
            path = self.walk(token_ids, namespace, after)
        known_len = (start + len(path) * size) // self.grid * self.grid
        num_here = next((i for i, node in enumerate(path) if node.block_id is None), len(path))

        def deepest(num_blocks: int, *, on_device: bool) -> int:
            position = min((start + num_blocks * size) // self.grid * self.grid, last)
            while self.layout.slots and position > start:
                node = path[(position - start) // size - 1]
                if node.checkpoint is not None or (not on_device and node.has_lower_state):
                    break
                position -= self.grid
            return max(position, start)

        resume_len, anywhere_len = deepest(num_here, on_device=True), deepest(len(path), on_device=False)
        num_resumed = (resume_len - start) // size
        deeper = None
        if anywhere_len > resume_len:
            deeper = Deeper(tuple(path[num_resumed : (anywhere_len - start) // size]), anywhere_len)
        end = self.end_of(resume_len, known_len, len(token_ids)) if deeper is None else MatchEnd.BELOW
        return Match(tuple(path[:num_resumed]), resume_len, known_len, end, deeper)

    def grid_keys(self, token_ids: Sequence[int], namespace: str, path: Sequence[Node]) -> tuple[bytes, ...]:
        """Block keys at a prompt's grid positions, known or not. `path` is the prompt's up to one of them."""
        per_chunk = self.appraiser.chunk_blocks
        keys = [node.key for node in path[per_chunk - 1 :: per_chunk]]
        key = path[-1].key if path else self._root_key(namespace)
        start, end = len(path) * self.layout.block_size, len(token_ids) // self.grid * self.grid
        assert start % self.grid == 0
        for count, tokens in enumerate(self._block_tokens(token_ids, start, end), 1):
            key = block_key(key, tokens)
            if count % per_chunk == 0:
                keys.append(key)
        return tuple(keys)

    def next_key(self, token_ids: Sequence[int], namespace: str, path: Sequence[Node]) -> bytes:
        """The key that a prompt's next block after a known path has or would have."""
        size, start = self.layout.block_size, len(path) * self.layout.block_size
        above = path[-1].key if path else self._root_key(namespace)
        return block_key(above, token_bytes(token_ids[start : start + size]))

    def end_of(self, resume_len: int, known_len: int, prompt_len: int) -> MatchEnd:
        """Why a prompt does not resume further than it does."""
        last = (prompt_len - 1) // self.grid * self.grid
        if last == 0:
            return MatchEnd.SHORT
        if resume_len >= last:
            return MatchEnd.WHOLE
        return MatchEnd.NO_CHECKPOINT if resume_len < min(known_len, last) else MatchEnd.UNKNOWN

    def walk(self, token_ids: Sequence[int], namespace: str, after: Node | None = None) -> list[Node]:
        """The known path of a prompt beyond `after`, wherever its bytes are, up to the prompt's last grid position."""
        start = after.depth * self.layout.block_size if after is not None else 0
        root = after or self.tree.root(self._root_key(namespace), namespace)
        return self.tree.walk(root, self._block_tokens(token_ids, start, len(token_ids) // self.grid * self.grid))

    def hold_prefix(self, resources: Resources, match: Match) -> list[int]:
        """Makes a sequence a holder of the matched blocks, and of the state after them until it has copied that.

        Returns: the blocks' ids in order.
        """
        for node in match.nodes:
            self._hold_node(resources, node)
        if match.nodes:
            self.tree.use(match.nodes[-1])
            if match.checkpoint is not None:
                self.hold_state(resources, match.nodes[-1])
        return [_block_of(node) for node in match.nodes]

    def take_blocks(self, resources: Resources, count: int) -> list[int]:
        """`count` private blocks, evicting the oldest cached ones as needed. The caller has checked availability."""
        while self.blocks.num_free < count:
            self._evict_block()
        ids = self.blocks.take(count)
        for id_ in ids:
            resources.hold("block", id_, lambda id_=id_: self.blocks.release(id_))
        return ids

    def take_slot(self, resources: Resources) -> int:
        """A slot with unknown contents. The caller has checked availability."""
        if self.slots.num_free == 0:
            self._evict_checkpoint()
        (id_,) = self.slots.take(1)
        resources.hold("slot", id_, lambda: self.slots.release(id_))
        return id_

    def adopt(self, resources: Resources, block_id: int, node: Node) -> int:
        """Returns a private block and holds a tree's block in its place; the new block's id."""
        resources.drop("block", block_id)
        self._hold_node(resources, node)
        return _block_of(node)

    def share_block(self, resources: Resources, block_id: int, node: Node | None) -> None:
        """One more holder of a block that another sequence holds: a fork's. `node` where the tree knows the block."""
        if node is not None:
            assert node.block_id == block_id
            self._hold_node(resources, node)
        else:
            self.blocks.share(block_id)
            resources.hold("block", block_id, lambda: self.blocks.release(block_id))

    def publish(
        self, resources: Resources, *, parent: Node | None, namespace: str, tokens: bytes, block_id: int
    ) -> Node | None:
        """Gives a canonical block to the tree, under `parent` (None: the namespace's root).

        Where the tree has the block already, its copy wins: the sequence then holds that one, and `block_id` is
        returned to the pool. None where the place in the tree belongs to other tokens with the same key; the block
        then stays private.
        """
        above = parent or self.tree.root(self._root_key(namespace), namespace)
        node = self.tree.child(above, tokens)
        if node is not None and node.block_id is not None:
            self.adopt(resources, block_id, node)
            return node
        node = node or self.tree.add(above, tokens)
        if node is not None:
            self.attach(resources, node, block_id)
        return node

    def attach(self, resources: Resources, node: Node, block_id: int) -> None:
        """A private block becomes the tree's, which has none on the device; its owner goes on holding it."""
        self.blocks.share(block_id)  # the tree's own
        self.tree.attach(node, block_id)
        node.device_since_s = self.tree.time_s
        self.tree.charge(node, self.layout.block_bytes)
        self.tree.hold(node)
        if node.parent is not None:
            self.leaves.discard(node.parent)
        resources.swap("block", block_id, block_id, lambda: self._release_node(node))

    def take_checkpoint(self, node: Node) -> int | None:
        """A slot for the state after `node`, to be filled now; None where it has one or no slot can be spared."""
        if node.checkpoint is not None:
            return None
        if self.slots.num_free == 0:
            if self.num_available_slots == 0:
                return None
            self._evict_checkpoint()
        (slot_id,) = self.slots.take(1)
        self._set_checkpoint(node, slot_id)
        return slot_id

    def give_checkpoint(self, resources: Resources, node: Node, slot_id: int) -> None:
        """A slot that `resources` holds becomes the node's checkpoint."""
        self.slots.share(slot_id)
        resources.drop("slot", slot_id)
        self._set_checkpoint(node, slot_id)

    def hold_path(self, resources: Resources, node: Node) -> None:
        """Keeps a node and all above it on the device."""
        for above in node.path():
            self._hold_node(resources, above)

    def hold_state(self, resources: Resources, node: Node) -> None:
        """Keeps a node's checkpoint in its slot; the path to it is held by the same owner."""
        self.tree.hold_state(node)
        self.states.discard(node)
        resources.hold("checkpoint", node.key, lambda: self._release_state(node))

    def state_was_read(self, resources: Resources, node: Node) -> None:
        """Whoever held the node's checkpoint has copied it."""
        resources.drop("checkpoint", node.key)

    def drop_cache(self) -> int:
        """Empties the device of every prefix that nothing holds; returns how many blocks that freed."""
        before = self.blocks.num_free
        while self.tree.num_cached:
            self._evict_block()
        return self.blocks.num_free - before

    def check(self) -> None:
        """Raises AssertionError where free + cached + held is not the pool."""
        self.blocks.check()
        self.slots.check()
        self.tree.check()
        for node in self.tree.nodes():
            if node.block_id is not None:
                refs = self.blocks.refs(node.block_id)
                assert refs == 1 + node.holders, (
                    f"block {node.block_id}: {refs} owners, {node.holders} holders, the tree"
                )
            assert node.checkpoint is None or self.slots.refs(node.checkpoint) == 1
            assert (node in self.leaves) is node.is_evictable, "an evictable node would never be evicted"
            assert (node in self.states) is (node.checkpoint is not None and node.state_holders == 0)
        assert self.blocks.num_held >= self.tree.num_cached + len(self.reserved_blocks)

    def astray(self, owners: Sequence[Resources]) -> list[str]:
        """What is held but by none of `owners`, by name: empty when every block and slot is accounted for."""
        findings: list[str] = []
        expected = {("block", id_): 1 for id_ in self.reserved_blocks} | {
            ("slot", id_): 1 for id_ in self.reserved_slots
        }
        for node in self.tree.nodes():
            if node.block_id is not None:
                expected[("block", node.block_id)] = 1
            if node.checkpoint is not None:
                expected[("slot", node.checkpoint)] = 1
        for resources in owners:
            for kind in ("block", "slot"):
                for id_ in resources.ids(kind):
                    assert isinstance(id_, int)
                    expected[(kind, id_)] = expected.get((kind, id_), 0) + 1
        for kind, pool in (("block", self.blocks), ("slot", self.slots)):
            for id_ in range(pool.size):
                if pool.refs(id_) != expected.get((kind, id_), 0):
                    findings.append(f"{kind} {id_}: {pool.refs(id_)} owners, {expected.get((kind, id_), 0)} known")
        return findings

    def _root_key(self, namespace: str) -> bytes:
        return root_key(self.fingerprint, Provenance.EXACT, namespace)

    def _block_tokens(self, token_ids: Sequence[int], start: int, end: int) -> Iterator[bytes]:
        size = self.layout.block_size * TOKEN_BYTES
        for first in range(start, end, self.grid):  # no more is turned into bytes than a look-up may need
            packed = token_bytes(token_ids[first : min(first + self.grid, end)])
            for at in range(0, len(packed), size):
                yield packed[at : at + size]

    def _hold_node(self, resources: Resources, node: Node) -> None:
        self.tree.hold(node)
        self.leaves.discard(node)
        self.blocks.share(_block_of(node))
        resources.hold("block", _block_of(node), lambda: self._release_node(node))

    def _release_node(self, node: Node) -> None:
        self.tree.unhold(node)
        self.blocks.release(_block_of(node))
        self._settle_leaf(node)

    def _release_state(self, node: Node) -> None:
        self.tree.unhold_state(node)
        self._settle_state(node)

    def settle(self, node: Node) -> None:
        """Its worth has changed."""
        self._settle_leaf(node)
        self._settle_state(node)

    def _settle_leaf(self, node: Node) -> None:
        """Offers a node, or takes it back, as it is now."""
        if node.is_evictable:
            self.leaves.offer(node, self.appraiser.stop(node, DEVICE))
        else:
            self.leaves.discard(node)

    def _settle_state(self, node: Node) -> None:
        if node.checkpoint is not None and node.state_holders == 0:
            self.states.offer(node, self.appraiser.state(node))
        else:
            self.states.discard(node)

    def drop_block(self, node: Node, reason: EvictionReason) -> None:
        """Takes an evictable node's block, and its checkpoint, off the device. It may be nowhere then."""
        if node.checkpoint is not None:
            self.drop_checkpoint(node, reason)
        self.leaves.discard(node)
        above = node.parent
        self.tree.charge(node, -self.layout.block_bytes)
        self.blocks.release(self.tree.detach(node))
        self.stats.evicted_blocks += 1
        self.meters.block_left(reason, node.device_since_s, self.tree.time_s)
        assert above is not None
        self._settle_leaf(above)

    def drop_checkpoint(self, node: Node, reason: EvictionReason) -> None:
        """Takes a node's checkpoint off the device."""
        self.tree.charge(node, -self.layout.slot_bytes)
        self.slots.release(self.tree.clear_checkpoint(node))
        self.states.discard(node)
        self.stats.evicted_checkpoints += 1
        self.meters.checkpoint_left(reason)

    def _set_checkpoint(self, node: Node, slot_id: int) -> None:
        self.tree.set_checkpoint(node, slot_id)
        self.tree.charge(node, self.layout.slot_bytes)
        self._settle_state(node)

    def _evict_block(self) -> None:
        """The least worthwhile leaf, and of the blocks that only it needed those of one grid chunk."""
        node = self.leaves.pop(self.tree.time_s)
        assert node is not None, "more blocks wanted than can be had"
        for _ in range(self.appraiser.chunk_blocks):
            above = node.parent
            self.drop_block(node, EvictionReason.ROOM)
            if not node.has_block:
                self.stats.lost_blocks += 1
                self.forget(self.tree.prune(node))
            if above is None or not above.is_evictable or above.checkpoint is not None:
                break
            node = above

    def _evict_checkpoint(self) -> None:
        node = self.states.pop(self.tree.time_s)
        assert node is not None, "more slots wanted than can be had"
        self.drop_checkpoint(node, EvictionReason.ROOM)


def _has_no_other_tier(nodes: list[Node]) -> None:
    assert not any(node.has_block or node.has_state for node in nodes), "nobody looks after other tiers"


def _block_of(node: Node) -> int:
    assert node.block_id is not None, "a root has no block"
    return node.block_id
