"""The cancel storm with all tiers on: the real store on real files through a slow disk, its threads and the mover's.

Requests, warming jobs and pins come and go in every state. Then nothing is held anywhere: free + cached = pool for
blocks, slots and host chunks, the quota's figure is what du says and what the tree's records and the index take, no pin
is left, and with the engine closed no file handle and no thread.
"""

import os
import random
import time
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.cache_messages import TierName, Warm
from daemon.messages import Abort
from tests.campaigns.budget import seeds
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import VOCAB, Oracle
from tests.engine.memory_store import MemoryStore
from tests.engine.test_storms import state_of
from tests.engine.test_tiers import forget_device, prompt_of, serve
from tests.sim.files import SimFiles, fail_with
from tests.tiers.stores import chain, du
from tiers.errors import StoreFull
from tiers.health import StoreHealth, StoreState
from tiers.mover import ThreadMover
from tiers.records import Flaw, Identity, RecordFlaw
from tiers.store import DiskStore, StoreLimits

NUM_REQUESTS = 240
STATES = ("queued", "restoring", "prefilling", "decoding", "forked", "preempted", "warming")
IDENTITY = Identity(b"f" * 32, b"p" * 32, INVENTED.layout(BLOCK))
QUOTA_BYTES = 2 << 20  # records are evicted all the time
LIMITS = StoreLimits(write_deadline_s=5, read_stall_s=0.02, num_read_threads=2, segment_bytes=128 << 10)
SLOWEST_S = 0.05  # longer than a read may stall: some come too late
ORACLE = Oracle(INVENTED, BLOCK)


class SlowStorm:
    """An engine over a slow directory, and what is done to it."""

    def __init__(self, directory: Path, seed: int, *, fails: bool) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        files = SimFiles(directory)
        slowness, mishaps = random.Random(seed + 1), random.Random(seed + 2)

        def on_op(name: str, number: int) -> None:
            if name in ("pread", "pwrite", "sync") and slowness.random() < 0.3:
                time.sleep(slowness.random() ** 4 * SLOWEST_S)
            if fails and name in ("pread", "pwrite") and mishaps.random() < 0.03:
                raise fail_with(5)

        self.store = DiskStore.open(directory, IDENTITY, quota_bytes=QUOTA_BYTES, files=files, limits=LIMITS)
        files.on_op = on_op
        more: dict[str, Any] = {"store": self.store}
        self.harness = Harness(
            num_blocks=44, max_sequences=8, num_chunks=40, restore_timeout_s=0.2, max_queue=200, **more
        )
        self.cancelled: Counter[str] = Counter()
        self.prompts: dict[str, tuple[list[int], int]] = {}

    def run(self) -> None:
        """Half of the requests are cancelled, each in a state picked for it."""
        harness, rng = self.harness, self.rng
        engine, prefixes = harness.engine, harness.engine.prefixes
        wanted = {f"r{i}": STATES[i // 2 % len(STATES)] for i in range(NUM_REQUESTS)}
        waiting = list(wanted)
        while waiting or not (engine.is_idle and engine.cache.is_settled and not engine.warming.writing):
            if rng.random() < 0.03:
                harness.device.drop_cache()
            if waiting and rng.random() < 0.4:
                self._submit(waiting.pop(0), wanted)
            harness.step()
            if engine.only_waits:
                time.sleep(0.0005)
            nodes = list(harness.device.tree.nodes()) if rng.random() < 0.05 else []
            below = [node for node in nodes if all(above.has_lower_block for above in node.path())]
            if below:
                prefixes.pin(rng.choice(below), None)
            for node in [node for node in prefixes.pins if rng.random() < 0.05]:
                prefixes.unpin(node)
            self._cancel(wanted)
        for node in list(prefixes.pins):
            prefixes.unpin(node)
        harness.run()

    def assert_nothing_is_held(self) -> None:
        """Of anything, by anyone."""
        engine, device, cache, store = self.harness.engine, self.harness.device, self.harness.engine.cache, self.store
        engine.check()
        assert not engine.requests
        assert not engine.warming.writing
        assert not cache.owners()
        assert cache.writedown.dirty_bytes == 0
        assert engine.scheduler.swapped() == []
        assert device.blocks.num_free + device.tree.num_cached + 1 == device.blocks.size
        assert device.slots.num_free + device.tree.num_checkpoints + 2 == device.slots.size
        assert device.tree.num_held_checkpoints == 0
        assert cache.host is not None
        assert cache.host.chunks.num_free + cache.host.num_cached_chunks == cache.host.chunks.size
        assert device.tree.num_pinned == cache.host.num_pinned_chunks == 0
        assert cache.disk is not None
        assert cache.disk.pinned_bytes == 0
        store.check()
        assert store.usage_bytes == du(self.directory) <= QUOTA_BYTES
        assert {entry.ref for entry in store.entries()} >= {place.ref for place in cache.disk.places()}

    def _submit(self, name: str, wanted: dict[str, str]) -> None:
        rng, prompt = self.rng, random_prompt(self.rng, 6 * GRID)
        if wanted[name] == "warming":
            prompt = prompt[: len(prompt) // GRID * GRID]
            if prompt:
                ids = array("i", prompt).tobytes()
                tier = rng.choice(list(TierName))
                self.harness.engine.handle(Warm(name, ids, "", tier, pin=False, durable=tier is TierName.DISK))
            return
        n = rng.choice([2, 4]) if wanted[name] == "forked" else rng.choice([1, 1, 2])
        max_tokens = rng.randint(4, 24)
        self.prompts[name] = prompt, max_tokens
        self.harness.submit(name, prompt, max_tokens, n=n, temperature=1.0, ignore_eos=True)

    def _cancel(self, wanted: dict[str, str]) -> None:
        engine = self.harness.engine
        states = {request_id: state_of(choices) for request_id, choices in engine.requests.items()}
        for request_id in {*states, *engine.warming.writing}:
            is_warm = wanted[request_id] == "warming"
            state = "warming" if is_warm else states[request_id]
            if state == wanted[request_id] and int(request_id[1:]) % 2 and self.rng.random() < 0.5:
                engine.handle(Abort(request_id))
                self.cancelled[state] += 1
                engine.check()


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts of some families, so that prefixes are shared and not all fit."""
    family = rng.randrange(20)
    return [3 + (i * (5 + family % 7) + family) % (VOCAB - 3) for i in range(rng.randint(1, longest))]


def handles() -> tuple[int, int]:
    """Open file descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("fails", [False, True], ids=["slow", "slow and failing"])
@pytest.mark.parametrize("seed", seeds(fraction=2, full=40))
def test_a_storm_over_a_slow_disk_returns_every_count(
    seed: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.harness.ManualMover", lambda slow: ThreadMover(2))
    monkeypatch.setattr("tiers.health.FIRST_PROBATION_S", 0.01)
    before = handles()
    storm = SlowStorm(tmp_path / "disk", seed, fails=fails)
    storm.run()
    storm.assert_nothing_is_held()
    disk, host = storm.harness.engine.cache.disk, storm.harness.engine.cache.host
    assert disk is not None
    assert host is not None
    assert disk.stats.hit_tokens, "nothing came from disk"
    assert host.stats.hit_tokens, "nothing came from the host tier"
    assert disk.stats.evicted_records + disk.stats.dropped_writes, "the quota was never reached"
    assert sum(storm.cancelled.values()) >= 10
    assert len(storm.cancelled) >= 4, storm.cancelled
    for name, (prompt, max_tokens) in list(storm.prompts.items())[::5]:
        answer = storm.harness.tokens[(name, 0)]
        expected = ORACLE.answer(prompt, max_tokens, temperature=1.0, stop_at_eos=False)
        assert answer == expected[: len(answer)], name
    storm.harness.engine.close()
    deadline = time.monotonic() + 30.0  # a read that nobody waits for any more may still end: closing waits for none
    while any(now > then for now, then in zip(handles(), before, strict=True)):
        # Fewer is no leak: what other tests of this process began may have ended meanwhile.
        assert time.monotonic() < deadline, "a file handle or a thread is left"
        time.sleep(SLOWEST_S)


def test_a_pin_whose_records_are_damaged_leaves_nothing_pinned() -> None:
    """The pinned prefix leaves the tree with its last record; what is above it must not stay pinned for ever."""
    store = MemoryStore()
    harness = Harness(store=store)
    prompt = prompt_of(4 * GRID + 1)
    serve(harness, "first", prompt)
    node = harness.device.lookup(prompt, "").nodes[-1]
    prefixes = harness.engine.prefixes
    prefixes.pin(node, None)
    forget_device(harness)
    above = node.path()[:-1]
    store.fails = lambda what, head: OSError("damaged") if what == "read" and head.key == node.key else None
    harness.submit("hit", prompt, 1, ignore_eos=True)
    while node.parent is not None:
        harness.step()
    assert all(each.parent is not None for each in above), "nothing is left above it"
    harness.run()
    assert (harness.device.tree.num_pinned, len(store.pinned)) == (0, 1)
    prefixes.unpin(node)
    harness.run()
    assert not store.pinned, "at the next start it would be pinned again"
    harness.assert_idle_books()


def test_records_outlive_a_disk_that_does_not_read_for_a_while() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    prompt = prompt_of(4 * GRID + 1)
    serve(harness, "beginning", prompt[: 2 * GRID + 1])
    serve(harness, "all of it", prompt)
    forget_device(harness)
    num_records = store.num_records
    store.fails = lambda what, head: RecordFlaw(Flaw.REFUSED, "the disk failed lately") if what == "read" else None
    store.health = StoreHealth(StoreState.DEGRADED, "late", 5.0)  # type: ignore[misc]
    serve(harness, "computed", prompt[: 2 * GRID + 1])  # what goes on from there would be lost with it
    assert harness.usage["computed"].cached_disk == 0
    forget_device(harness)
    assert store.num_records == num_records
    store.fails, store.health = (lambda what, head: None), StoreHealth(StoreState.OK, "", 0.0)  # type: ignore[misc]
    serve(harness, "loaded", prompt)
    assert harness.usage["loaded"].cached_disk == 4 * GRID
    harness.assert_idle_books()


def test_records_that_this_engine_cannot_use_make_room_for_its_own(tmp_path: Path) -> None:
    """As after an upgrade of what computes: the directory is full of what nobody reads any more."""
    older, patient = Identity(IDENTITY.fingerprint, b"o" * 32, IDENTITY.layout), replace(LIMITS, read_stall_s=20)
    store = DiskStore.open(tmp_path / "disk", older, quota_bytes=QUOTA_BYTES, limits=patient)
    with suppress(StoreFull):
        for seed in range(1000):
            store.write([item.pair for item in chain(16, seed=seed, identity=older)])
    store.close()
    store = DiskStore.open(tmp_path / "disk", IDENTITY, quota_bytes=QUOTA_BYTES, limits=patient)
    before = store.unreadable_bytes
    harness = Harness(store=store)  # type: ignore[arg-type]
    prompt = prompt_of(4 * GRID + 1)
    serve(harness, "first", prompt)
    forget_device(harness)
    serve(harness, "again", prompt)
    assert harness.usage["again"].cached_disk == 4 * GRID
    assert 0 <= store.unreadable_bytes < before
    assert du(tmp_path / "disk") <= QUOTA_BYTES
    harness.engine.check()
    harness.engine.close()


def test_writes_on_their_way_together_find_room_together(tmp_path: Path) -> None:
    """Each saw the bytes that were free before the others."""
    store = DiskStore.open(
        tmp_path / "disk", IDENTITY, quota_bytes=QUOTA_BYTES, limits=replace(LIMITS, read_stall_s=20)
    )
    harness = Harness(store=store)  # type: ignore[arg-type]
    disk = harness.engine.cache.disk
    assert disk is not None
    seeds_of_prompts = iter(range(10_000))
    while not disk.stats.evicted_records:
        serve(harness, f"filling {next(seeds_of_prompts)}", prompt_of(4 * GRID + 1, next(seeds_of_prompts)))
    harness.mover.is_stalled = True
    names = [f"together {i}" for i in range(8)]
    for name in names:
        harness.submit(name, prompt_of(2 * GRID + 1, next(seeds_of_prompts)), 1, ignore_eos=True)
        while (name, 0) not in harness.finished:
            harness.step()
    assert len(harness.mover.waiting) > 1
    harness.mover.is_stalled = False
    harness.run()
    assert disk.stats.dropped_writes == 0
    assert du(tmp_path / "disk") <= QUOTA_BYTES
    harness.engine.check()
    harness.engine.close()
