"""A prefix that is to be forgotten after a time is forgotten, if not at once then when nothing holds it any more."""

from array import array
from collections.abc import Sequence

import pytest

from daemon.cache_messages import EvictPrefix, PinPrefix, Selector, SetQuota, TierName, UnpinPrefix, Warm, WarmDone
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of
from tiers.disk import HEADER_BYTES
from tiers.index import TimeToLive
from tiers.prefixes import EXPIRE_AGAIN_S

PROMPT = prompt_of(3 * GRID + 2, 5)
SELECTOR = Selector(prompt_ids=array("i", PROMPT).tobytes())


def warm(harness: Harness, prompt: list[int] = PROMPT, ttl_s: float | None = 60.0) -> None:
    """To be forgotten a minute later, or never."""
    ids = array("i", prompt).tobytes()
    harness.engine.handle(Warm(f"w{len(prompt)}", ids, "", TierName.DISK, pin=False, durable=True, ttl_s=ttl_s))
    run(harness)
    done = harness.other[-1]
    assert isinstance(done, WarmDone)
    assert (done.expires_time_s is None) is (ttl_s is None)


def run(harness: Harness) -> None:
    """To the end of everything, receipts included."""
    while harness.engine.has_work:
        harness.step()


def later(harness: Harness, seconds: float = 61.0) -> None:
    """What the engine does about it when so much time has passed."""
    harness.now += seconds
    harness.engine.keep_time()
    run(harness)


class Counting(MemoryStore):
    """Counts changes of times to live."""

    num_changes = 0

    def set_times_to_live(self, times: Sequence[TimeToLive]) -> None:
        super().set_times_to_live(times)
        self.num_changes += 1


@pytest.mark.parametrize("lengths", [(GRID, 3 * GRID), (3 * GRID, GRID)])
def test_prefixes_that_continue_each_other_can_end_at_the_same_time(lengths: tuple[int, int]) -> None:
    harness = Harness(store=(store := MemoryStore()))
    for length in lengths:
        warm(harness, PROMPT[:length])
    assert len(harness.engine.prefixes.times_to_live) == 2
    later(harness)
    assert harness.device.tree.num_nodes == store.num_records == 0
    harness.assert_idle_books()


def test_a_prefix_that_is_in_use_when_its_time_is_over_is_forgotten_after_that() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    harness.submit("uses it", PROMPT, 40, ignore_eos=True)
    while not harness.tokens[("uses it", 0)]:
        harness.step()
    assert harness.usage["uses it"].cached_device == 3 * GRID
    harness.now += 61.0
    harness.run()
    later(harness, EXPIRE_AGAIN_S)
    assert harness.device.tree.num_nodes == store.num_records == 0
    assert not harness.engine.prefixes.times_to_live
    harness.assert_idle_books()


def test_a_prefix_that_a_pinned_one_continues_is_forgotten_when_that_is_unpinned() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    harness.submit("longer", longer := PROMPT[: 3 * GRID] + prompt_of(GRID + 1, 6), 1, ignore_eos=True)
    harness.run()
    pinned = harness.engine.prefixes.by_prompt("", longer)
    assert pinned is not None
    harness.engine.prefixes.pin(pinned, None)
    later(harness)
    assert all(node.has_block for node in pinned.path())
    harness.engine.handle(UnpinPrefix(1, "", Selector(key=pinned.key.hex())))
    later(harness, EXPIRE_AGAIN_S)
    assert harness.device.tree.num_nodes == store.num_records == 0
    harness.assert_idle_books()


@pytest.mark.parametrize("is_over", [False, True], ids=["a time that goes on", "a time that ended meanwhile"])
def test_a_restart_forgets_no_time_to_live(is_over: bool) -> None:
    warm(Harness(store=(store := MemoryStore())))
    harness = Harness(store=store)
    if not is_over:
        later(harness, 59.0)
        assert harness.device.tree.num_nodes
        assert store.num_records
    later(harness)
    assert harness.device.tree.num_nodes == store.num_records == 0
    assert not store.expiring
    harness.assert_idle_books()


def test_a_time_to_live_is_kept_to_the_second_and_ends_nothing_too_early() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    ((node, until_s),) = harness.engine.prefixes.times_to_live.items()
    (kept,) = store.times_to_live()
    assert (kept.namespace, kept.key) == (node.namespace, node.key)
    assert kept.expires_at is not None
    assert until_s <= kept.expires_at < until_s + 1


def test_a_later_warm_without_a_time_to_live_ends_an_earlier_one() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    warm(harness, ttl_s=None)
    assert not store.expiring
    for each in (harness, Harness(store=store)):
        later(each)
        assert store.num_records
        assert each.device.tree.num_nodes
    harness.assert_idle_books()


def test_a_warm_without_a_time_to_live_and_without_an_earlier_one_writes_none() -> None:
    harness = Harness(store=(store := Counting()))
    warm(harness, ttl_s=None)
    assert store.num_changes == 0


def test_a_pin_takes_the_place_of_a_time_to_live_on_disk_too() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    harness.engine.handle(PinPrefix(1, "", SELECTOR))
    harness.run()
    assert store.pinned
    assert not store.expiring
    restarted = Harness(store=store)
    restarted.engine.handle(UnpinPrefix(2, "", SELECTOR))
    later(restarted)
    assert store.num_records
    restarted.assert_idle_books()


def test_a_time_to_live_of_a_pinned_prefix_holds_when_the_pin_is_gone_and_after_a_restart() -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness, ttl_s=None)
    harness.engine.handle(PinPrefix(1, "", SELECTOR))
    warm(harness)
    restarted = Harness(store=store)
    later(restarted)
    assert store.num_records
    restarted.engine.handle(UnpinPrefix(2, "", SELECTOR))
    later(restarted, EXPIRE_AGAIN_S)
    assert not store.num_records
    assert not store.expiring


@pytest.mark.parametrize("why", ["asked", "quota", "damage"])
def test_a_prefix_that_goes_before_its_time_leaves_no_time_to_live_on_disk(why: str) -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    assert store.expiring
    if why == "asked":
        harness.engine.handle(EvictPrefix(1, "", SELECTOR))
    elif why == "quota":
        harness.engine.handle(SetQuota(1, "", 1, None))
    else:
        forget_device(harness)
        (node,) = harness.engine.prefixes.times_to_live
        assert node.disk_block is not None
        assert harness.engine.cache.restorer.set_aside(node, node.disk_block, OSError("damaged"))
    later(harness, 0.0)
    assert not harness.engine.prefixes.times_to_live
    assert not store.expiring
    harness.assert_idle_books()


def test_a_prefix_that_is_evicted_for_room_leaves_no_time_to_live_on_disk() -> None:
    harness = Harness(store=(store := MemoryStore()), num_blocks=24)
    store.quota_bytes = 12 * harness.device.layout.block_bytes + 8 * (HEADER_BYTES + 64)
    for seed in range(8):
        warm(harness, prompt_of(3 * GRID, seed))
    later(harness, 0.0)
    times = harness.engine.prefixes.times_to_live
    assert 0 < len(times) < 8, "some were evicted"
    assert set(store.expiring) == {(node.namespace, node.key) for node in times}
    harness.assert_idle_books()


def test_the_disk_keeps_a_time_to_live_as_long_as_it_has_the_records() -> None:
    """Else a crash between the two would leave a prefix for ever that was to be forgotten."""
    harness = Harness(store=(store := MemoryStore()))
    warm(harness)
    store.takes_writes = False  # and deletes nothing
    later(harness)
    assert not harness.device.tree.num_nodes
    assert store.num_records
    assert store.expiring
    store.takes_writes = True
    restarted = Harness(store=store)
    later(restarted)
    assert not store.num_records
    assert not store.expiring
    restarted.assert_idle_books()


@pytest.mark.parametrize("ttl_s", [60.0, None])
def test_a_prefix_that_comes_back_has_the_time_to_live_that_it_was_given_last(ttl_s: float | None) -> None:
    harness = Harness(store=(store := MemoryStore()))
    warm(harness, ttl_s=30.0)
    store.takes_writes = False  # what the disk has of the first stay is still there
    harness.engine.handle(EvictPrefix(1, "", SELECTOR))
    ids = array("i", PROMPT).tobytes()
    harness.engine.handle(Warm("again", ids, "", TierName.DEVICE, pin=False, durable=False, ttl_s=ttl_s))
    run(harness)
    times = [] if ttl_s is None else [1e9 + harness.now + ttl_s]
    assert [time.expires_at for time in store.times_to_live()] == pytest.approx(times, abs=2.0, rel=0.0)
    store.takes_writes = True
    later(harness, 1.0)
    assert len(store.expiring) == len(harness.engine.prefixes.times_to_live) == len(times)


def test_prefixes_that_end_together_are_one_change_and_one_that_is_held_is_none() -> None:
    harness = Harness(store=(store := Counting()), num_blocks=128)
    for seed in range(4):
        warm(harness, prompt_of(2 * GRID, seed))
    prefixes, num_changes = harness.engine.prefixes, store.num_changes
    nodes = list(prefixes.times_to_live)
    for node in nodes:
        prefixes.pin(node, None)
        prefixes.keep_until(node, 1e9)
    run(harness)
    num_changes = store.num_changes
    for _ in range(5):
        later(harness, EXPIRE_AGAIN_S)
    assert store.num_changes == num_changes
    for node in nodes:
        prefixes.unpin(node)
    later(harness, EXPIRE_AGAIN_S)
    assert store.num_changes == num_changes + 1
    assert not store.expiring
    assert not store.num_records


def test_a_time_to_live_of_another_model_is_left_alone() -> None:
    """Its records are in the same directory: when that model comes back they have their end."""
    store = MemoryStore()
    store.set_times_to_live([TimeToLive("", b"k" * 32, 1)])
    harness = Harness(store=store)
    later(harness)
    assert len(store.expiring) == 1
