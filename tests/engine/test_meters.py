"""What the engine counts: every figure that a scrape tells is moved by the thing that it is named after."""

import random
from dataclasses import dataclass

from daemon.cache_messages import EvictPrefix, Selector, SetQuota
from daemon.engine.meter_report import report
from daemon.meter_messages import Meters, TierMeterRow
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tiers.records import RecordHead

SHARES = {"device": 0, "host": 1, "disk": 2}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 61) for _ in range(length)]


def serve(harness: Harness, name: str, prompt: list[int]) -> None:
    harness.submit(name, prompt, 2, ignore_eos=True)
    harness.run()
    assert (name, 0) in harness.finished, harness.rejected


def array_of(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


def tier(harness: Harness, name: str) -> TierMeterRow:
    return next(row for row in report(harness.engine).tiers if row.tier == name)


@dataclass(frozen=True)
class Evicted:
    """Counts of a tier by kind and reason."""

    blocks: dict[str, int]
    checkpoints: dict[str, int]


def evicted(harness: Harness, name: str) -> Evicted:
    rows = tier(harness, name).evictions
    of = {kind: {row.reason: row.count for row in rows if row.kind == kind} for kind in ("block", "checkpoint")}
    return Evicted(of["block"], of["checkpoint"])


def test_every_prompt_token_is_computed_or_found_in_one_tier() -> None:
    store = MemoryStore()
    harness = Harness(num_chunks=200, store=store)
    prompt = prompt_of(3 * GRID + 1)
    serve(harness, "cold", prompt)
    serve(harness, "warm", prompt)
    harness.device.drop_cache()
    serve(harness, "from host", prompt)
    again = Harness(store=store)
    serve(again, "from disk", prompt)
    meters, after = report(harness.engine), report(again.engine)
    assert {row.tier: row.hit_tokens for row in meters.tiers} == {"device": 3 * GRID, "host": 3 * GRID, "disk": 0}
    assert meters.computed_tokens == len(prompt) + 1 + 1
    assert {row.tier: row.hit_tokens for row in after.tiers} == {"device": 0, "disk": 3 * GRID}
    assert _total(meters) == 3 * len(prompt)
    assert _total(after) == len(prompt)


def _total(meters: Meters) -> int:
    return meters.computed_tokens + sum(row.hit_tokens for row in meters.tiers)


def test_a_load_is_a_read_and_a_stall_of_its_tier_and_a_batch_is_a_write() -> None:
    harness = Harness(num_chunks=200, store=MemoryStore())
    prompt = prompt_of(2 * GRID + 1)
    serve(harness, "cold", prompt)
    assert sum(tier(harness, "disk").write.counts) >= 1
    assert sum(tier(harness, "host").stall.counts) == 0
    harness.device.drop_cache()
    serve(harness, "hit", prompt)
    host, disk = tier(harness, "host"), tier(harness, "disk")
    assert sum(host.read.counts) == sum(host.stall.counts) == 1
    assert sum(disk.read.counts) == sum(disk.stall.counts) == 0
    (load,) = harness.usage["hit"].loads
    assert (load.tier, load.tokens) == ("host", 2 * GRID)
    assert 0 <= load.begin_s < load.end_s <= harness.usage["hit"].queue_s
    assert report(harness.engine).lookup.total > 0


def test_a_load_that_is_not_waited_for_is_late() -> None:
    store = MemoryStore()
    prompt = prompt_of(2 * GRID + 1)
    serve(Harness(store=store), "cold", prompt)
    harness = Harness(store=store, restore_timeout_s=0.05)
    harness.mover.is_stalled = True
    harness.submit("slow", prompt, 2, ignore_eos=True)
    harness.step(20)
    disk = tier(harness, "disk")
    assert (disk.late_loads, sum(disk.stall.counts)) == (1, 1)
    harness.mover.is_stalled = False
    harness.run()
    assert harness.usage["slow"].loads[0].tokens == 0, "nothing of it was waited for"


def test_evictions_say_why() -> None:
    harness = Harness(num_blocks=24, num_chunks=40, store=MemoryStore())
    for seed in range(6):
        serve(harness, f"r{seed}", prompt_of(4 * GRID + 1, seed))
    assert evicted(harness, "device").blocks.keys() == {"room"}
    assert evicted(harness, "host").blocks["room"] > 0
    assert evicted(harness, "disk") == Evicted({}, {})
    selector = Selector(prompt_ids=array_of(prompt_of(4 * GRID + 1, 5)))
    harness.engine.handle(EvictPrefix(1, "", selector))
    assert evicted(harness, "disk").blocks["asked"] > 0
    assert evicted(harness, "disk").checkpoints["asked"] > 0
    harness.engine.handle(SetQuota(2, "", 0, None))
    assert evicted(harness, "disk").blocks["quota"] > 0
    assert sum(tier(harness, "disk").lifetime.counts) == sum(evicted(harness, "disk").blocks.values())


def test_a_damaged_record_and_what_hangs_below_it_are_told_apart() -> None:
    store = MemoryStore()
    prompt = prompt_of(3 * GRID + 1)
    serve(Harness(store=store), "cold", prompt)
    harness = Harness(store=store)

    def fails(what: str, head: RecordHead) -> Exception | None:
        return OSError("torn") if what == "read" and head.depth == 1 else None

    store.fails = fails
    serve(harness, "hit", prompt)
    blocks = evicted(harness, "disk").blocks
    assert blocks["damaged"] == 1
    assert blocks["orphaned"] > 0
    assert sum(tier(harness, "disk").lifetime.counts) == 0, "they were there before the start: their age is unknown"


def test_a_reuse_gap_is_counted_where_the_prompt_was_found_or_as_gone() -> None:
    harness = Harness(num_chunks=200)
    prompt = prompt_of(2 * GRID + 1)
    serve(harness, "cold", prompt)
    harness.now += 100
    serve(harness, "device", prompt)
    harness.now += 1000
    harness.device.drop_cache()
    serve(harness, "host", prompt)
    harness.engine.handle(EvictPrefix(1, "", Selector(prompt_ids=array_of(prompt))))
    serve(harness, "gone", prompt)
    assert 100 <= tier(harness, "device").reuse_gap.total < 110
    assert 1000 <= tier(harness, "host").reuse_gap.total < 1010
    assert sum(report(harness.engine).lost_gap.counts) == 1


def test_preemptions_are_moved_with_a_host_tier_and_replayed_without() -> None:
    for num_chunks, expected in ((200, (True, False)), (0, (False, True))):
        harness = Harness(num_blocks=12, num_chunks=num_chunks, growth_window=4)
        for name in ("a", "b"):
            harness.submit(name, prompt_of(GRID + 1, ord(name)), 24, ignore_eos=True)
        harness.run()
        meters = report(harness.engine)
        assert (meters.moved_preemptions > 0, meters.replayed_preemptions > 0) == expected
        assert _total(meters) == 2 * (GRID + 1), "a replay is no new prompt"
        assert sum(meters.decode_rows.counts) > 0


def test_a_prompt_token_counts_once_also_where_a_preempted_prompt_adopts_what_it_had_found_before() -> None:
    harness = Harness(num_blocks=128)
    prompt = prompt_of(8 * GRID + 3)
    serve(harness, "cold", prompt[: 4 * GRID + 1])
    for name in ("a", "b"):
        harness.submit(name, prompt, 2, ignore_eos=True)
    harness.step()
    for sequence in list(harness.engine.scheduler.running):
        harness.engine.scheduler.preempt(sequence)
    harness.device.drop_cache()
    harness.run()
    assert [harness.usage[name].cached_device for name in ("cold", "a", "b")] == [0, 4 * GRID, 8 * GRID]
    total = sum(usage.prompt_tokens for usage in harness.usage.values())
    assert report(harness.engine).computed_tokens == total - 12 * GRID == harness.device.stats.miss_tokens


def test_what_a_prompt_computed_before_it_was_preempted_does_not_count_as_found_after() -> None:
    harness = Harness(num_blocks=128)
    prompt = prompt_of(4 * GRID + 3)
    harness.submit("r", prompt, 2, ignore_eos=True)
    while not harness.device.tree.num_checkpoints:
        harness.step()
    (sequence,) = harness.engine.scheduler.running
    harness.engine.scheduler.preempt(sequence)
    harness.run()
    assert harness.usage["r"].cached_device == 0
    assert report(harness.engine).computed_tokens == len(prompt) == harness.device.stats.miss_tokens
