"""Ids, resources, keys and the device tier's books."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tiers.device import DeviceTier
from tiers.id_pool import IdPool
from tiers.keys import Provenance, block_key, root_key, state_fingerprint, token_bytes
from tiers.layout import Plane, SlotTensor, StateLayout
from tiers.ledger import device_ledger
from tiers.match import MatchEnd
from tiers.resources import ReleaseError, Resources
from tiers.tree import Node, PrefixTree

BLOCK, GRID = 4, 8
PLANES = (Plane("k", "float32", (2,)),)
RECURRENT = StateLayout(PLANES, (SlotTensor("s", "float32", (3,)),), BLOCK)
ATTENTION_ONLY = StateLayout(PLANES, (), BLOCK)


def tier(layout: StateLayout = ATTENTION_ONLY, num_blocks: int = 12, num_slots: int = 6) -> DeviceTier:
    return DeviceTier(layout, grid=GRID, num_blocks=num_blocks, num_slots=num_slots, fingerprint=b"x" * 32)


def compute(device: DeviceTier, owner: Resources, tokens: list[int], *, checkpoints: tuple[int, ...] = ()) -> None:
    """What a sequence does to the books when it computes a prompt of whole grid chunks."""
    parent = None
    for position, block_id in enumerate(device.take_blocks(owner, device.blocks_for(len(tokens)))):
        part = token_bytes(tokens[position * BLOCK : (position + 1) * BLOCK])
        parent = device.publish(owner, parent=parent, namespace="", tokens=part, block_id=block_id)
        assert parent is not None
        if parent.depth * BLOCK in checkpoints:
            assert device.take_checkpoint(parent) is not None


def test_ids_are_handed_out_once_and_counted() -> None:
    pool = IdPool(3)
    one, two = pool.take(2)
    pool.share(one)
    pool.release(one)
    assert (pool.num_free, pool.num_held, pool.refs(one)) == (1, 2, 1)
    pool.release(one)
    pool.release(two)
    pool.check()
    assert pool.num_free == 3


@pytest.mark.parametrize(
    "action", [lambda pool: pool.release(0), lambda pool: pool.share(0), lambda pool: pool.take(3)]
)
def test_an_id_is_never_returned_twice_nor_shared_when_free(action) -> None:
    with pytest.raises(AssertionError):
        action(IdPool(2))


def test_release_goes_on_after_a_failure_and_returns_each_thing_once() -> None:
    returned: list[int] = []

    def fail() -> None:
        raise OSError("gone")

    resources = Resources("r/0")
    resources.hold("block", 1, lambda: returned.append(1))
    resources.hold("pin", "p", fail)
    resources.hold("block", 2, lambda: returned.append(2))
    resources.drop("block", 2)
    with pytest.raises(ReleaseError, match="pin 'p': gone"):
        resources.release()
    resources.release()
    assert returned == [2, 1]
    assert resources.is_empty


def test_nothing_is_registered_twice() -> None:
    resources = Resources("r/0")
    resources.hold("block", 1, lambda: None)
    with pytest.raises(AssertionError):
        resources.hold("block", 1, lambda: None)


def test_every_part_of_a_fingerprint_and_every_field_of_a_root_changes_the_key() -> None:
    fingerprints = [
        state_fingerprint(parts)
        for parts in ({"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a": b"1", "b": b""}, {"a": b"1b"}, {"a1": b""})
    ]
    roots = [
        root_key(fingerprint, provenance, namespace)
        for fingerprint in fingerprints
        for provenance in Provenance
        for namespace in ("", "one", "two")
    ]
    assert len(set(roots)) == len(fingerprints) * 2 * 3


@given(st.lists(st.lists(st.integers(0, 3), min_size=BLOCK, max_size=BLOCK), min_size=1, max_size=4))
def test_a_key_names_the_whole_path(blocks: list[list[int]]) -> None:
    keys: dict[bytes, tuple[tuple[int, ...], ...]] = {b"r" * 32: ()}
    key = b"r" * 32
    path: tuple[tuple[int, ...], ...] = ()
    for block in blocks:
        key, path = block_key(key, token_bytes(block)), (*path, tuple(block))
        assert keys.setdefault(key, path) == path


def test_tokens_are_compared_when_keys_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.tree.block_key", lambda parent, tokens: b"same" * 8)
    device, owner, other = tier(), Resources("a"), Resources("b")
    compute_one = token_bytes([1, 2, 3, 4])
    (block_id,) = device.take_blocks(owner, 1)
    node = device.publish(owner, parent=None, namespace="", tokens=compute_one, block_id=block_id)
    (foreign,) = device.take_blocks(other, 1)
    assert node is not None
    assert device.publish(other, parent=None, namespace="", tokens=token_bytes([9, 9, 9, 9]), block_id=foreign) is None
    assert device.lookup([9] * 9, "").nodes == ()
    assert other.ids("block") == [foreign], "the block stays private"
    device.check()


def test_lookups_say_why_they_stop() -> None:
    device, owner = tier(RECURRENT), Resources("a")
    tokens = list(range(16))
    compute(device, owner, tokens, checkpoints=(8,))
    assert device.lookup(tokens[:8], "").end is MatchEnd.SHORT
    assert device.lookup(tokens[:9], "").end is MatchEnd.WHOLE
    assert device.lookup(tokens, "").resume_len == 8, "N = kG resumes at (k-1)G"
    no_state = device.lookup([*tokens, 16], "")
    assert (no_state.end, no_state.resume_len, no_state.known_len) == (MatchEnd.NO_CHECKPOINT, 8, 16)
    assert device.lookup(tokens[:8] + [99] * 9, "").end is MatchEnd.UNKNOWN
    assert device.lookup(tokens, "other").resume_len == 0


def test_attention_without_state_is_a_miss() -> None:
    device, owner = tier(RECURRENT), Resources("a")
    compute(device, owner, list(range(16)))
    match = device.lookup(list(range(17)), "")
    assert (match.resume_len, match.nodes, match.end) == (0, (), MatchEnd.NO_CHECKPOINT)


def test_when_a_canonical_block_is_computed_again_the_trees_copy_wins() -> None:
    device, one, two = tier(), Resources("a"), Resources("b")
    compute(device, one, list(range(8)))
    free = device.blocks.num_free
    compute(device, two, list(range(8)))
    assert two.ids("block") == one.ids("block")
    assert device.blocks.num_free == free
    entries = {(entry.kind, entry.owner): entry.count for entry in device_ledger(device, [one, two])}
    assert entries[("blocks", "shared")] == 2


def test_the_least_recently_used_leaf_goes_first_and_held_ones_stay() -> None:
    device, held = tier(num_blocks=9), Resources("held")
    for start in (100, 200, 300):
        owner = Resources(str(start))
        compute(device, owner, list(range(start, start + 8)))
        owner.release()
    assert device.tree.num_cached == 6
    device.hold_prefix(held, device.lookup([*range(100, 108), 0], ""))
    taker = Resources("taker")
    device.take_blocks(taker, 5)
    assert device.lookup([*range(100, 108), 0], "").resume_len == 8
    assert device.lookup([*range(200, 208), 0], "").resume_len == 0
    assert device.stats.evicted_blocks == 4, "whole chunks go, three blocks were wanted"
    device.check()


def test_a_checkpoint_about_to_be_copied_never_makes_room_for_its_own_reader() -> None:
    device, owner = tier(RECURRENT, num_slots=3), Resources("a")
    compute(device, owner, list(range(8)), checkpoints=(8,))
    match = device.lookup([*range(8), 0], "")
    reader = Resources("b")
    device.hold_prefix(reader, match)
    device.take_slot(reader)
    assert device.num_available_slots == 0
    with pytest.raises(AssertionError):
        device.take_slot(Resources("c"))
    assert match.checkpoint is not None
    device.state_was_read(reader, match.nodes[-1])
    device.take_slot(Resources("c"))
    assert match.checkpoint is None


class Tree(RuleBasedStateMachine):
    """A prefix tree against a dictionary of paths."""

    paths = Bundle("paths")

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.known: dict[tuple[int, ...], object] = {}
        self.held: dict[tuple[int, ...], int] = {}
        self.next_block = 0

    def _walk(self, path: tuple[int, ...]):
        return self.tree.walk(self.tree.root(b"r" * 32, ""), iter([bytes([step]) for step in path]))

    @rule(target=paths, path=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple))
    def insert(self, path: tuple[int, ...]):
        parent, made = self.tree.root(b"r" * 32, ""), []
        for depth in range(1, len(path) + 1):
            tokens = bytes([path[depth - 1]])
            node = self.tree.child(parent, tokens)
            if node is None:
                node = self.tree.add(parent, tokens)
                assert node is not None
                self.tree.attach(node, self.next_block)
                self.next_block += 1
            self.tree.hold(node)
            self.known[path[:depth]] = node
            self.held[path[:depth]] = self.held.get(path[:depth], 0) + 1
            made.append(node)
            parent = node
        return path

    @rule(path=consumes(paths))
    def release(self, path: tuple[int, ...]) -> None:
        for depth in range(1, len(path) + 1):
            self.tree.unhold(self.known[path[:depth]])  # type: ignore[arg-type]
            self.held[path[:depth]] -= 1

    @precondition(lambda self: any(count == 0 for count in self.held.values()))
    @rule()
    def evict(self) -> None:
        free = [path for path, count in self.held.items() if count == 0]
        leaves = [path for path in free if not any(p[:-1] == path for p in self.known)]
        expected = min(leaves, key=lambda path: self.known[path].used_s)  # type: ignore[attr-defined]
        node = self.known[expected]
        assert isinstance(node, Node)
        assert node.is_evictable
        self.tree.detach(node)
        assert self.tree.prune(node) == [node]
        del self.known[expected], self.held[expected]

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert self.tree.num_nodes == len(self.known)
        assert self.tree.num_cached == sum(count == 0 for count in self.held.values())
        for path, node in self.known.items():
            assert self._walk(path)[-1] is node


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
