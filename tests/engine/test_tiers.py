"""Prefixes that come back from host and disk, after a restart and after preemption: same bytes, nothing lost.

Every step checks the books of all tiers, fills what is free with NaN and compares what is shared (harness.py).
"""

import random
from array import array

import pytest
import torch

from daemon.cache_messages import (
    Evicted,
    EvictPrefix,
    PinPrefix,
    Selector,
    SetQuota,
    TierName,
    UnpinPrefix,
    Warm,
    WarmDone,
)
from daemon.errors import ErrorReason
from daemon.messages import Abort
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import Oracle
from tests.engine.memory_store import MemoryStore
from tiers.disk import HEADER_BYTES
from tiers.meters import EvictionReason
from tiers.records import RecordHead, RecordKind

ORACLE = Oracle(INVENTED, BLOCK)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 61) for _ in range(length)]


def state_of(harness: Harness, request_id: str) -> tuple[bytes, bytes]:
    """Planes of the prompt and the slot, while the request still runs."""
    (sequence,) = harness.engine.requests[request_id]
    layout, pools = harness.device.layout, harness.pools
    prompt_len = sequence.request.prompt_len
    table = torch.tensor(sequence.block_table[: -(-prompt_len // BLOCK)])
    planes = [
        pools.planes[plane.name][table].flatten(0, 1)[: prompt_len // plane.tokens_per_row].numpy().tobytes()
        for plane in layout.planes
    ]
    return b"".join(planes), pools.slots[sequence.slot].numpy().tobytes()


def serve(harness: Harness, name: str, prompt: list[int], max_tokens: int = 4) -> tuple[bytes, bytes]:
    """Serves one prompt to the end; its state when the first token came."""
    harness.submit(name, prompt, max_tokens, ignore_eos=True)
    while not harness.tokens[(name, 0)]:
        harness.step()
    state = state_of(harness, name)
    harness.run()
    assert harness.tokens[(name, 0)] == ORACLE.answer(prompt, max_tokens, stop_at_eos=False)
    return state


def forget_device(harness: Harness) -> None:
    """The device keeps nothing; what the lower tiers have stays."""
    harness.device.drop_cache()
    harness.engine.check()
    assert harness.device.tree.num_on_device == 0


def cached(harness: Harness, name: str) -> tuple[int, int, int]:
    usage = harness.usage[name]
    return usage.cached_device, usage.cached_host, usage.cached_disk


LENGTHS = [
    length
    for k in (1, 2, 3)
    for length in (k * GRID - 1, k * GRID, k * GRID + 1, k * GRID + BLOCK - 1, k * GRID + BLOCK, k * GRID + BLOCK + 1)
]


@pytest.mark.parametrize("tier", ["host", "disk", "restart", "host and disk"])
def test_a_prefix_from_a_lower_tier_has_the_bytes_of_a_cold_run(tier: str) -> None:
    num_chunks = 200 if "host" in tier else 0
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        cold = serve(Harness(), "cold", prompt)
        store = None if tier == "host" else MemoryStore()
        harness = Harness(num_chunks=num_chunks, store=store)
        serve(harness, "other", prompt_of(37, 99))  # so that block ids differ
        serve(harness, "first", prompt)
        if tier == "restart":
            harness = Harness(num_chunks=num_chunks, store=store)
            serve(harness, "other", prompt_of(45, 98))
        forget_device(harness)
        hit = serve(harness, "hit", prompt)
        expected = (length - 1) // GRID * GRID
        assert sum(cached(harness, "hit")) == expected
        assert cached(harness, "hit")[1 if "host" in tier else 2] == expected, cached(harness, "hit")
        assert hit == cold
        assert serve(harness, "again", prompt) == cold
        assert cached(harness, "again") == (expected, 0, 0)
        harness.assert_idle_books()


def test_a_prompt_longer_than_the_host_comes_back_as_far_as_it_fits_and_pushes_nothing_out_before() -> None:
    harness = Harness(num_chunks=10)
    (longest,) = harness.engine.cache.longest_lens
    short, prompt = prompt_of(GRID + 1, 1), prompt_of(longest + 2 * GRID + 1, 2)
    assert GRID < longest < len(prompt)
    cold = serve(Harness(), "cold", prompt)
    for name in ("short", "long"):
        serve(harness, name, short if name == "short" else prompt)
    forget_device(harness)
    serve(harness, "short again", short)
    assert cached(harness, "short again") == (0, GRID, 0)
    forget_device(harness)
    assert serve(harness, "long again", prompt) == cold
    assert cached(harness, "long again") == (0, 0, 0)
    forget_device(harness)
    assert serve(harness, "third time", prompt) == cold
    assert cached(harness, "third time") == (0, longest, 0)
    harness.assert_idle_books()


def test_a_state_that_left_the_device_alone_comes_back_alone() -> None:
    harness = Harness(num_chunks=50)
    prompt = prompt_of(3 * GRID)
    cold = serve(harness, "cold", prompt)
    node = harness.device.lookup(prompt, "").nodes[-1]
    harness.device.drop_checkpoint(node, EvictionReason.ASKED)
    assert harness.device.lookup(prompt, "").resume_len == 0
    assert serve(harness, "hit", prompt) == cold
    assert harness.usage["hit"].cached_device == 2 * GRID
    harness.assert_idle_books()


def test_equal_prompts_wait_for_one_restore() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    prompt = prompt_of(4 * GRID + 1)
    serve(harness, "first", prompt)
    forget_device(harness)
    harness.mover.is_stalled = True
    for i in range(4):
        harness.submit(f"r{i}", prompt, 3, ignore_eos=True)
    harness.step(3)
    assert [sequence.state.value for sequence in harness.engine.scheduler.restoring] == ["restoring"] * 4
    assert len(harness.engine.cache.restorer.in_flight) == 1
    harness.mover.is_stalled = False
    harness.run()
    assert store.num_reads == 4 * GRID // BLOCK + 1
    assert all(cached(harness, f"r{i}") == (0, 0, 4 * GRID) for i in range(4))
    harness.assert_idle_books()


def test_others_go_on_while_a_prefix_is_on_its_way() -> None:
    harness = Harness(store=MemoryStore())
    prompt = prompt_of(4 * GRID + 1)
    serve(harness, "first", prompt)
    forget_device(harness)
    harness.mover.is_stalled = True
    harness.submit("slow", prompt, 3, ignore_eos=True)
    harness.submit("quick", prompt_of(5, 7), 3, ignore_eos=True)
    for _ in range(50):
        harness.step()
    assert ("quick", 0) in harness.finished
    assert not harness.tokens[("slow", 0)]
    harness.mover.is_stalled = False
    harness.run()
    assert cached(harness, "slow") == (0, 0, 4 * GRID)


def test_a_prefix_that_comes_too_late_is_computed_and_its_blocks_stay_until_the_fence() -> None:
    harness = Harness(store=MemoryStore(), restore_timeout_s=0.1)
    prompt = prompt_of(4 * GRID + 1)
    cold = serve(harness, "first", prompt)
    forget_device(harness)
    harness.mover.is_stalled = True
    harness.submit("late", prompt, 3, ignore_eos=True)
    harness.step()
    (restore,) = harness.engine.cache.restorer.in_flight.values()
    held = set(restore.resources.ids("block"))
    while not harness.tokens[("late", 0)]:
        harness.step()
    assert state_of(harness, "late") == cold
    assert cached(harness, "late") == (0, 0, 0)
    assert not held & set(harness.engine.requests["late"][0].block_table), "a buffer was used again before its fence"
    assert held == set(restore.resources.ids("block"))
    harness.mover.is_stalled = False
    harness.run()
    harness.assert_idle_books()


def test_a_request_cancelled_while_its_prefix_comes_leaves_it_to_be_cached() -> None:
    harness = Harness(store=MemoryStore())
    prompt = prompt_of(4 * GRID + 1)
    serve(harness, "first", prompt)
    forget_device(harness)
    harness.mover.is_stalled = True
    harness.submit("gone", prompt, 3)
    harness.step()
    harness.engine.handle(Abort("gone"))
    harness.step()
    assert not harness.engine.requests
    harness.mover.is_stalled = False
    harness.run()
    assert harness.device.lookup(prompt, "").resume_len == 4 * GRID
    harness.assert_idle_books()


@pytest.mark.parametrize("kind", list(RecordKind))
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_record_that_fails_is_a_miss_and_never_tried_again(kind: RecordKind, nth: int) -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    prompt = prompt_of(4 * GRID + 1)
    cold = serve(harness, "first", prompt)
    forget_device(harness)
    seen = 0

    def fails(what: str, head: RecordHead) -> Exception | None:
        nonlocal seen
        if what == "read" and head.kind is kind:
            seen += 1
            return OSError("checksum") if seen == nth + 1 else None
        return None

    store.fails = fails
    hit = serve(harness, "hit", prompt)
    failed = seen > nth
    assert hit == cold
    assert (sum(cached(harness, "hit")) == 0) is failed
    assert harness.disk.stats.verify_failures == failed
    store.fails = lambda what, head: None
    harness.assert_idle_books()
    forget_device(harness)
    assert serve(harness, "again", prompt) == cold
    assert cached(harness, "again") == (0, 0, 4 * GRID), "what was computed again was written again"


def test_every_write_that_fails_costs_a_copy_and_no_request() -> None:
    for nth in range(12):
        store = MemoryStore()
        harness = Harness(store=store)
        seen = 0

        def fails(what: str, head: RecordHead, nth: int = nth) -> Exception | None:
            nonlocal seen
            seen += what == "write"
            return OSError("no space left") if what == "write" and seen == nth + 1 else None

        store.fails = fails
        prompt = prompt_of(4 * GRID + 1)
        cold = serve(harness, "first", prompt)
        forget_device(harness)
        assert serve(harness, "hit", prompt) == cold
        harness.assert_idle_books()


def test_a_full_host_tier_and_a_full_disk_keep_the_newest() -> None:
    block_bytes = INVENTED.layout(BLOCK).block_bytes
    store = MemoryStore()
    harness = Harness(num_chunks=12, store=store)
    store.quota_bytes = 12 * block_bytes + 5 * (HEADER_BYTES + 64)
    for seed in range(8):
        serve(harness, f"r{seed}", prompt_of(2 * GRID + 1, seed))
        assert store.usage_bytes <= store.quota_bytes
    forget_device(harness)
    serve(harness, "newest", prompt_of(2 * GRID + 1, 7))
    assert sum(cached(harness, "newest")) == 2 * GRID
    serve(harness, "oldest", prompt_of(2 * GRID + 1, 0))
    assert sum(cached(harness, "oldest")) == 0
    assert harness.disk.stats.evicted_records
    harness.assert_idle_books()


@pytest.mark.parametrize("seed", range(6))
def test_a_preempted_sequence_comes_back_with_every_byte_and_computes_nothing_twice(seed: int) -> None:
    harness = Harness(num_blocks=16, num_chunks=64)
    prompts = [prompt_of(random.Random(seed * 10 + i).randrange(5, 20), seed * 10 + i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        harness.submit(f"r{i}", prompt, 24, ignore_eos=True)
    before: dict[str, tuple[int, bytes, bytes]] = {}
    steps = 0
    while not harness.is_at_rest:
        running = {s.id: s for s in harness.engine.scheduler.running if s.computed_len and not s.siblings}
        images = {name: image_of(harness, s) for name, s in running.items()}
        harness.step()
        steps += 1
        for sequence in harness.engine.scheduler.waiting:
            if sequence.swapped is not None and sequence.id not in before:
                before[sequence.id] = images.get(sequence.id) or before.get(sequence.id, (0, b"", b""))
        for sequence in harness.engine.scheduler.running:
            if sequence.id in before:
                computed_len, planes, slot = before.pop(sequence.id)
                assert sequence.computed_len >= computed_len, "something was computed twice"
                if sequence.computed_len == computed_len:
                    assert image_of(harness, sequence) == (computed_len, planes, slot)
    for i, prompt in enumerate(prompts):
        assert harness.tokens[(f"r{i}", 0)] == ORACLE.answer(prompt, 24, stop_at_eos=False)
    harness.assert_idle_books()


def image_of(harness: Harness, sequence) -> tuple[int, bytes, bytes]:
    """A sequence's written rows and its slot."""
    pools, length = harness.pools, sequence.computed_len
    table = torch.tensor(sequence.block_table[: -(-length // BLOCK)])
    planes = [
        pools.planes[plane.name][table].flatten(0, 1)[: length // plane.tokens_per_row].numpy().tobytes()
        for plane in harness.device.layout.planes
    ]
    return length, b"".join(planes), pools.slots[sequence.slot].numpy().tobytes()


def test_pins_and_quotas_survive_a_restart_and_pinned_records_outlive_everything_else() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    block_bytes = harness.device.layout.block_bytes
    prompt = prompt_of(2 * GRID + 1, 1)
    serve(harness, "kept", prompt)
    chosen = Selector(prompt_ids=array("i", prompt).tobytes())
    harness.engine.handle(PinPrefix(1, "", chosen))
    harness.engine.handle(SetQuota(2, "", 1 << 30, 1 << 20))
    harness.run()
    harness = Harness(store=store)
    (pinned,) = harness.engine.prefixes.pins
    assert pinned.depth * BLOCK == 2 * GRID
    assert harness.engine.questions.quotas.limits[""].pinned_bytes == 1 << 20
    store.quota_bytes = 14 * block_bytes + 5 * (HEADER_BYTES + 64)
    for seed in range(2, 8):
        serve(harness, f"other{seed}", prompt_of(2 * GRID + 1, seed))
    forget_device(harness)
    serve(harness, "again", prompt)
    assert cached(harness, "again") == (0, 0, 2 * GRID)
    harness.engine.handle(EvictPrefix(3, "", chosen))
    assert harness.other[-1].reason is ErrorReason.PREFIX_PINNED  # type: ignore[union-attr]
    harness.engine.handle(UnpinPrefix(4, "", chosen))
    harness.engine.handle(EvictPrefix(5, "", chosen))
    assert isinstance(harness.other[-1], Evicted)
    harness.run()
    serve(harness, "gone", prompt)
    assert cached(harness, "gone") == (0, 0, 0)
    assert not store.pinned
    harness.assert_idle_books()


def test_a_pinned_copy_on_the_host_may_go_while_the_disk_has_its_record_and_not_without() -> None:
    harness = Harness(num_chunks=64, store=MemoryStore())
    prompt = prompt_of(2 * GRID + 1, 1)
    harness.submit("kept", prompt, 4, ignore_eos=True)
    while not harness.tokens[("kept", 0)]:
        harness.step()
    harness.engine.handle(PinPrefix(1, "", Selector(prompt_ids=array("i", prompt).tobytes())))
    harness.run()  # which writes it down, and checks the books after every step
    (pinned,) = harness.engine.prefixes.pins
    host, disk = harness.engine.cache.host, harness.engine.cache.disk
    assert host is not None
    assert disk is not None
    assert pinned.host_block is not None
    assert pinned.disk_block is not None
    assert pinned in host.order
    disk.drop_block(pinned, EvictionReason.DAMAGED)
    assert pinned not in host.order
    host.check()


def test_a_warm_prefix_is_where_it_was_asked_for_and_says_so() -> None:
    harness = Harness(num_chunks=64, store=MemoryStore())
    prompt = prompt_of(3 * GRID + 2, 5)
    ids = array("i", prompt).tobytes()
    harness.engine.handle(Warm("w", ids, "", TierName.DISK, pin=True, durable=True, ttl_s=60.0))
    while harness.engine.has_work:
        harness.step()
    done = next(message for message in harness.other if isinstance(message, WarmDone))
    assert (done.tokens, done.cached_tokens, done.durable, done.pinned) == (3 * GRID, 0, True, True)
    assert done.bytes.disk
    assert done.bytes.host
    harness.assert_idle_books()
    forget_device(harness)
    serve(harness, "hit", prompt)
    assert sum(cached(harness, "hit")) == 3 * GRID
    harness.now += 61.0
    harness.engine.keep_time()
    assert not harness.engine.prefixes.pins, "the pin has lapsed"


def test_a_quota_that_is_exceeded_evicts_the_namespace_alone() -> None:
    harness = Harness(store=MemoryStore(), num_blocks=128)
    for seed in range(4):
        harness.submit(f"a{seed}", prompt_of(2 * GRID + 1, seed), 1, namespace="a")
        harness.submit(f"b{seed}", prompt_of(2 * GRID + 1, seed), 1, namespace="b")
    harness.run()
    before = harness.device.tree.charged["b"]
    limit = harness.device.tree.charged["a"] // 2
    harness.engine.handle(SetQuota(1, "a", limit, None))
    harness.run()
    assert 0 < harness.device.tree.charged["a"] <= limit
    assert harness.device.tree.charged["b"] == before
    harness.assert_idle_books()


def test_what_a_failed_batch_was_to_delete_is_deleted_later() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    store.quota_bytes = 12 * harness.device.layout.block_bytes + 5 * (HEADER_BYTES + 64)
    serve(harness, "first", prompt_of(2 * GRID + 1, 1))
    serve(harness, "second", prompt_of(2 * GRID + 1, 2))
    store.fails = lambda what, head: OSError("no") if what == "write" else None
    for seed in range(3, 6):
        serve(harness, f"failing{seed}", prompt_of(2 * GRID + 1, seed))
    store.fails = lambda what, head: None
    serve(harness, "last", prompt_of(2 * GRID + 1, 9))
    harness.assert_idle_books()
