"""What the engine tells of its tiers unasked, and what it writes down before it ends."""

import logging
from collections.abc import Callable, Sequence

import pytest

from daemon.cache_messages import TierName, Verify, VerifyProgress
from daemon.engine.leaving import write_down
from daemon.engine.scrub import RECORDS_A_JOB
from daemon.engine.watch import BULK_FRACTION, BULK_S, TierWatch
from daemon.messages import TierEvent, TierEventKind
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tiers.health import StoreHealth, StoreState


def prompt(salt: int, num_chunks: int = 3) -> list[int]:
    return [(salt * 31 + i * 7) % 50 + 1 for i in range(num_chunks * GRID + 1)]


class Watched:
    """A harness and what its watch has told."""

    def __init__(self, harness: Harness) -> None:
        self.told: list[TierEvent] = []
        self.harness = harness
        self.watch = TierWatch(harness.engine.cache, self.told.append, harness.now)

    def poll(self, seconds: float = 0.25) -> list[TierEvent]:
        """What is told at the next look."""
        self.harness.now += seconds
        del self.told[:]
        self.watch.poll(self.harness.now)
        return list(self.told)


def test_a_disk_that_fails_and_recovers_is_told_once_each() -> None:
    store = MemoryStore()
    watched = Watched(Harness(store=store))
    assert watched.poll() == []
    store.health = StoreHealth(StoreState.READ_ONLY, "no space is left", 3.0)  # type: ignore[misc]
    (event,) = watched.poll()
    assert (event.kind, event.tier, event.message) == (
        TierEventKind.DEGRADED,
        TierName.DISK,
        "read-only: no space is left",
    )
    assert watched.poll() == []
    store.health = StoreHealth(StoreState.OK, "", 0.0)  # type: ignore[misc]
    assert [event.kind for event in watched.poll()] == [TierEventKind.RECOVERED]
    assert watched.poll() == []


def test_writes_that_fail_are_told_with_their_number() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    watched = Watched(harness)
    store.fails = lambda what, head: OSError("broken") if what == "write" else None
    harness.submit("a", prompt(1))
    harness.run()
    dropped = harness.disk.stats.dropped_writes
    assert dropped > 0
    assert [(event.kind, event.count) for event in watched.poll()] == [(TierEventKind.DROPPED, dropped)]
    assert watched.poll() == []


def test_eviction_is_told_in_bulk_and_not_block_by_block() -> None:
    harness = Harness(num_blocks=64)
    watched = Watched(harness)
    stats = harness.device.stats
    least = int(64 * BULK_FRACTION)
    stats.evicted_blocks += least - 1
    assert watched.poll(BULK_S + 1) == [], "a few, over a long time"
    stats.evicted_blocks += least - 1
    assert watched.poll(BULK_S / 4) == []
    stats.evicted_blocks += 1
    (event,) = watched.poll(BULK_S / 4)
    assert (event.kind, event.tier, event.count) == (TierEventKind.EVICTED, TierName.DEVICE, least)
    assert watched.poll() == []


def left_over(harness: Harness) -> None:
    """Serves three prompts whose prefixes nobody has written down."""
    harness.mover.is_stalled = True
    for number in range(3):
        harness.submit(f"r{number}", prompt(number), max_tokens=2)
    while not harness.engine.is_idle:
        harness.step()


def on_disk(store: MemoryStore, prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each a fresh engine finds on disk."""
    fresh = Harness(store=store)
    for number, tokens in enumerate(prompts):
        fresh.submit(f"again{number}", tokens, max_tokens=1)
    fresh.run()
    return [fresh.usage[f"again{number}"].cached_disk for number in range(len(prompts))]


def letting_go(harness: Harness) -> Callable[[], None]:
    """Lets the mover work, as waiting for it does."""

    def wait() -> None:
        harness.now += 0.05
        harness.mover.is_stalled = False

    return wait


def test_what_the_disk_lacks_is_written_before_the_engine_ends(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    left_over(harness)
    assert store.num_records == 0
    with caplog.at_level(logging.INFO):
        write_down(harness.engine, letting_go(harness))
    (line,) = (record.message for record in caplog.records if "written down at the end" in record.message)
    assert line.startswith(f"written down at the end: {store.num_records} records, ")
    assert line.endswith("; 0 prefixes stay unwritten")
    harness.engine.close()
    assert on_disk(store, [prompt(number) for number in range(3)]) == [3 * GRID] * 3


def test_writing_down_ends_with_its_window_and_says_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(store=MemoryStore(), flush_window_s=0.05)
    left_over(harness)
    with caplog.at_level(logging.INFO):
        write_down(harness.engine, lambda: None)  # the disk never comes to an end
    assert any("0 records" in record.message and "3 prefixes stay" in record.message for record in caplog.records)
    harness.engine.close()


@pytest.mark.parametrize("settings", [{"flush_window_s": 0.0}, {}])
def test_without_a_window_or_with_nothing_to_write_it_ends_at_once(settings: dict[str, float]) -> None:
    store = MemoryStore()
    harness = Harness(store=store, **settings)  # type: ignore[arg-type]
    if settings:
        left_over(harness)
    write_down(harness.engine, lambda: pytest.fail("nobody waits"))
    assert store.num_records == 0
    harness.engine.close()


def test_a_disk_that_takes_nothing_is_not_waited_for() -> None:
    store = MemoryStore()
    harness = Harness(store=store)
    left_over(harness)
    store.takes_writes = False
    write_down(harness.engine, lambda: pytest.fail("nobody waits"))
    harness.engine.close()


def test_an_engine_leaves_while_its_disk_is_being_verified() -> None:
    harness = Harness(store=MemoryStore())
    for salt in range(3):
        harness.submit(f"r{salt}", prompt(salt))
        harness.run()
    assert harness.disk.num_records > RECORDS_A_JOB
    harness.engine.handle(Verify(1, TierName.DISK))
    harness.mover.run_next()  # the first records are read, and nobody has been told yet
    harness.engine.close()
    assert not any(isinstance(told, VerifyProgress) for told in harness.other)
