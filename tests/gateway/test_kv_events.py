"""The engine tells of the blocks that come and go: whoever starts with a snapshot has what the tree has, always."""

import random
from array import array

import pytest

from daemon.cache_messages import EvictPrefix, Selector, TierName
from daemon.engine import kv_events
from daemon.kv_messages import KvBatch, KvSnapshot, KvUnwatch, KvWatch
from tests.campaigns.budget import seeds
from tests.engine.harness import BLOCK, GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.gateway.mirror import Mirror
from tiers.events import BlockEvents
from tiers.tree import PrefixTree


def in_tree(harness: Harness, namespace: str) -> dict[tuple[TierName, int], tuple[int | None, tuple[int, ...]]]:
    """Every copy of a namespace, read from the tree."""

    def short(key: bytes) -> int:
        return int.from_bytes(key[:8], "little", signed=True)

    found: dict[tuple[TierName, int], tuple[int | None, tuple[int, ...]]] = {}
    for node in harness.device.tree.nodes():
        if node.namespace != namespace:
            continue
        assert node.parent is not None
        content = (short(node.parent.key) if node.parent.parent is not None else None, tuple(array("i", node.tokens)))
        for tier, has_block in (
            (TierName.DEVICE, node.block_id is not None),
            (TierName.HOST, node.host_block is not None),
            (TierName.DISK, node.disk_block is not None),
        ):
            if has_block:
                found[(tier, short(node.key))] = content
    return found


class Watching:
    """A harness whose messages about one namespace go to mirrors, each from its own snapshot on."""

    def __init__(self, harness: Harness, namespace: str) -> None:
        self.harness = harness
        self.namespace = namespace
        self.mirrors: dict[int, Mirror] = {}
        self.held: dict[int, list[KvBatch]] = {}  # until the snapshot is whole
        self.num_batches = 0

    def watch(self) -> None:
        query_id = len(self.mirrors) + 1
        self.mirrors[query_id] = Mirror()
        self.held[query_id] = []
        self.harness.engine.handle(KvWatch(query_id, self.namespace))

    def deliver(self) -> None:
        """What the engine has sent since the last time."""
        sent, self.harness.other[:] = list(self.harness.other), []
        for message in sent:
            match message:
                case KvSnapshot():
                    mirror = self.mirrors[message.query_id]
                    mirror.take(message)
                    if message.index == message.count - 1:
                        for batch in self.held.pop(message.query_id):
                            if batch.sequence > mirror.sequence:
                                mirror.take(batch)
                case KvBatch():
                    assert message.namespace == self.namespace, "told of a namespace that nobody watches"
                    self.num_batches += 1
                    for query_id, mirror in self.mirrors.items():
                        if query_id in self.held:
                            self.held[query_id].append(message)
                        else:
                            mirror.take(message)
                case _:
                    pass


@pytest.mark.parametrize("seed", seeds(fraction=3, full=200))
def test_a_snapshot_and_the_batches_after_it_are_what_the_tree_has(seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    store.quota_bytes = 12_000
    harness = Harness(num_blocks=40, num_slots=14, num_chunks=30, store=store, slow=rng)
    watching = Watching(harness, "a")
    most_of_others = 0
    prefixes = [[rng.randrange(3, 61) for _ in range(5 * GRID)] for _ in range(6)]
    for turn in range(60):
        if turn in (4, 30):
            watching.watch()
        prefix = rng.choice(prefixes)[: rng.randint(1, 5) * GRID]
        harness.submit(f"r{turn}", [*prefix, *range(3, 6)], 2, namespace=rng.choice("aab"), ignore_eos=True)
        for _ in range(rng.randint(1, 12)):
            harness.step()
            watching.deliver()
        most_of_others = max(most_of_others, len(in_tree(harness, "b")))
    harness.run()
    while harness.engine.has_work:
        harness.step()
    watching.deliver()
    for mirror in watching.mirrors.values():
        assert mirror.copies == in_tree(harness, "a")
    first = watching.mirrors[1]
    for tier in TierName:
        assert first.num_came[tier] > 10, f"hardly anything came to {tier}"
        assert first.num_left[tier] > 10, f"hardly anything was evicted from {tier}"
    assert watching.num_batches > 20
    assert most_of_others > 4, "nobody else had anything"


def test_nothing_is_written_down_while_nobody_watches() -> None:
    harness = Harness()
    harness.submit("a", list(range(3, 3 + 2 * GRID)), 2, namespace="a", ignore_eos=True)
    harness.run()
    assert harness.device.tree.watcher is None
    harness.engine.handle(KvWatch(1, "b"))
    harness.submit("b", list(range(3, 3 + 2 * GRID)), 2, namespace="a", ignore_eos=True)
    harness.run()
    harness.step()
    assert [type(message) for message in harness.other] == [KvSnapshot], "told of another namespace"
    harness.engine.handle(KvUnwatch("b"))
    assert harness.device.tree.watcher is None
    assert not harness.engine.has_work


def test_numbers_of_a_later_watch_lie_above_all_earlier_ones() -> None:
    harness = Harness()
    seen: list[int] = []
    for watch in range(3):
        harness.engine.handle(KvWatch(watch, "a"))
        harness.submit(f"r{watch}", list(range(3 + watch, 3 + watch + 2 * GRID)), 2, namespace="a", ignore_eos=True)
        harness.run()
        harness.step()
        numbers = [message.sequence for message in harness.other if isinstance(message, KvSnapshot | KvBatch)]
        assert len(numbers) > 1
        assert not seen or min(numbers) > max(seen)
        seen += numbers
        harness.other.clear()
        harness.engine.handle(KvUnwatch("a"))
    assert min(seen) >= 10**15, "an engine that starts later must number above this one"


def test_an_evicted_prefix_is_told_though_nothing_runs() -> None:
    harness = Harness()
    watching = Watching(harness, "a")
    watching.watch()
    prompt = list(range(3, 4 + 2 * GRID))
    harness.submit("a", prompt, 2, namespace="a", ignore_eos=True)
    harness.run()
    harness.step()
    watching.deliver()
    assert len(watching.mirrors[1].copies) == 2 * GRID // BLOCK
    harness.engine.handle(EvictPrefix(9, "a", Selector(prompt_ids=array("i", prompt).tobytes())))
    assert harness.engine.has_work, "nobody would send it"
    harness.step()
    watching.deliver()
    assert watching.mirrors[1].copies == {} == in_tree(harness, "a")


def test_a_large_snapshot_goes_out_in_parts_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_EVENTS", 2)
    harness = Harness()
    harness.submit("a", [3 + i % 50 for i in range(5 * GRID)], 1, namespace="a", ignore_eos=True)
    harness.run()
    harness.engine.handle(KvWatch(1, "a"))
    assert len(harness.other) == 1, "a question must not be answered with so much at once"
    sent: list[int] = []
    while harness.engine.has_work:
        harness.step()
        sent.append(len(harness.other))
    assert sent == [3, 5]
    mirror = Mirror()
    for part in harness.other:
        assert isinstance(part, KvSnapshot)
        assert len(part.events) <= 2
        mirror.take(part)
    assert mirror.copies == in_tree(harness, "a")
    assert len(mirror.copies) == 5 * GRID // BLOCK == 10


def test_no_batch_is_sent_before_the_first_part_of_its_snapshot() -> None:
    harness = Harness()
    harness.submit("a", [3 + i % 50 for i in range(2 * GRID)], 1, namespace="a", ignore_eos=True)
    harness.engine.handle(KvWatch(1, "a"))
    harness.run()  # blocks come while the snapshot is on its way
    told = [message for message in harness.other if isinstance(message, KvBatch | KvSnapshot)]
    assert isinstance(told[0], KvSnapshot)
    numbers = [message.sequence - told[0].sequence for message in told[1:]]
    assert numbers == list(range(1, len(told)))
    assert len(told) > 1


def test_whoever_stops_watching_leaves_the_others_their_events() -> None:
    tree = PrefixTree()
    events = BlockEvents(tree)
    events.watch("a")
    events.watch("b")
    nodes = {name: tree.add(tree.root(name.encode() * 32, name), b"tokn") for name in "ab"}
    for block_id, node in enumerate(nodes.values()):
        assert node is not None
        tree.attach(node, block_id)
    events.unwatch("a")
    (event,) = events.take("b")
    assert nodes["b"] is not None
    assert (event.tier, event.key, event.parent, event.tokens) == ("device", nodes["b"].key, None, b"tokn")
    assert not events.has_events
    assert events.copies("b") == [event]
    events.unwatch("b")
    assert tree.watcher is None
