"""Warming gives way to answers: in the queue, among chunks and on the device; and it stays within its quota."""

import random
from array import array
from collections.abc import Sequence

import pytest

from daemon.cache_messages import PinPrefix, Refused, Selector, SetQuota, TierName, Warm, WarmDone
from daemon.errors import ErrorReason
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import Oracle
from tests.engine.memory_store import MemoryStore
from tiers.index import Pin, TimeToLive

ORACLE = Oracle(INVENTED, BLOCK)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 61) for _ in range(length)]


def warm(harness: Harness, name: str, prompt: list[int], *, namespace: str = "", pin: bool = False) -> None:
    ids = array("i", prompt).tobytes()
    harness.engine.handle(Warm(name, ids, namespace, TierName.DEVICE, pin=pin, durable=False))


def warmed(harness: Harness) -> set[str]:
    return {message.request_id for message in harness.other if isinstance(message, WarmDone)}


def run(harness: Harness) -> None:
    """To the end, receipts included."""
    for _ in range(20_000):
        if not harness.engine.has_work:
            return
        harness.step()
    raise AssertionError("no end: no progress")


def steps_until_token(harness: Harness, name: str, limit: int = 2000) -> int:
    for count in range(limit):
        if harness.tokens[(name, 0)]:
            return count
        harness.step()
    raise AssertionError("no token")


def test_an_answer_does_not_wait_for_prompts_that_are_warmed() -> None:
    prompt = prompt_of(GRID + 2, 99)
    alone = Harness(num_blocks=128)
    alone.submit("answer", prompt, 4, ignore_eos=True)
    undisturbed = steps_until_token(alone, "answer")

    harness = Harness(num_blocks=128)
    for seed in range(4):
        warm(harness, f"w{seed}", prompt_of(6 * GRID + 1, seed))
    harness.step(3)
    harness.submit("answer", prompt, 4, ignore_eos=True)
    slices_of_a_chunk = undisturbed  # of one: the chunk in flight is not thrown away
    assert steps_until_token(harness, "answer") <= undisturbed + slices_of_a_chunk
    assert not warmed(harness), "all four were to come before, in the order of arrival"
    run(harness)
    assert warmed(harness) == {"w0", "w1", "w2", "w3"}
    assert harness.tokens[("answer", 0)] == ORACLE.answer(prompt, 4, stop_at_eos=False)
    harness.assert_idle_books()


def test_warming_leaves_the_device_to_an_answer_that_needs_its_room_and_ends_all_the_same() -> None:
    harness = Harness(num_blocks=20)
    warm(harness, "w", prompt_of(7 * GRID + 1, 1))
    harness.step(3)
    (sequence,) = harness.engine.scheduler.running
    assert sequence.request.warm is not None
    prompt = prompt_of(5 * GRID + 1, 2)
    harness.submit("answer", prompt, 4, ignore_eos=True)
    harness.step()
    assert sequence.request.preemptions == 1
    assert sequence in harness.engine.scheduler.waiting
    run(harness)
    assert harness.tokens[("answer", 0)] == ORACLE.answer(prompt, 4, stop_at_eos=False)
    assert warmed(harness) == {"w"}
    harness.assert_idle_books()


def test_an_answer_is_not_refused_because_warming_fills_the_queue() -> None:
    harness = Harness(max_queue=2, max_sequences=1)
    for seed in range(4):
        warm(harness, f"w{seed}", prompt_of(2 * GRID + 1, seed))
    assert {name: one.reason for name, one in harness.rejected.items()} == dict.fromkeys(
        ("w2", "w3"), ErrorReason.QUEUE_FULL
    )
    harness.submit("answer", prompt_of(GRID, 9), 2, ignore_eos=True)
    run(harness)
    assert len(harness.tokens[("answer", 0)]) == 2
    assert warmed(harness) == {"w0", "w1"}
    harness.assert_idle_books()


def test_a_pin_that_no_tier_would_hold_is_refused() -> None:
    harness, prompt = Harness(), prompt_of(2 * GRID + 1, 1)
    warm(harness, "w", prompt, pin=True)
    assert harness.rejected["w"].reason is ErrorReason.TIER_UNAVAILABLE
    warm(harness, "unpinned", prompt)
    run(harness)
    harness.engine.handle(PinPrefix(1, "", Selector(prompt_ids=array("i", prompt).tobytes())))
    (refused,) = (told for told in harness.other if isinstance(told, Refused))
    assert refused.reason is ErrorReason.TIER_UNAVAILABLE
    assert not harness.engine.prefixes.pins
    harness.assert_idle_books()


class Unpinning(MemoryStore):
    """Keeps records, and nothing that is said of them."""

    def set_pin(self, pin: Pin) -> None:
        raise OSError("no space left")

    def set_times_to_live(self, times: Sequence[TimeToLive]) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("pin", [True, False], ids=["pin", "time to live"])
@pytest.mark.parametrize("kind", [MemoryStore, Unpinning], ids=["keeps", "fails"])
def test_a_durable_receipt_comes_when_the_disk_has_pin_and_time_too_and_not_without(
    kind: type[MemoryStore], pin: bool
) -> None:
    harness = Harness(store=(store := kind()))
    prefixes = harness.engine.prefixes
    ids = array("i", prompt_of(2 * GRID + 1, 1)).tobytes()
    harness.engine.handle(Warm("w", ids, "", TierName.DISK, pin=pin, durable=True, ttl_s=60.0))
    while not (prefixes.pins or prefixes.times_to_live):
        harness.step()
    harness.mover.is_stalled = True
    harness.step(3)
    kept = store.pinned if pin else store.expiring
    assert not warmed(harness) or kept
    harness.mover.is_stalled = False
    run(harness)
    if kind is Unpinning:
        assert not warmed(harness)
        assert harness.rejected["w"].reason is ErrorReason.TIER_UNAVAILABLE
        assert not prefixes.pins, "which nobody would know of"
    else:
        assert warmed(harness) == {"w"}
        assert kept
    harness.assert_idle_books()


def test_a_pin_that_the_disk_does_not_take_leaves_an_earlier_time_to_live() -> None:
    harness, prompt = Harness(store=Unpinning()), prompt_of(2 * GRID + 1, 1)
    ids = array("i", prompt).tobytes()
    harness.engine.handle(Warm("earlier", ids, "", TierName.DISK, pin=False, durable=False, ttl_s=60.0))
    run(harness)
    times = dict(harness.engine.prefixes.times_to_live)
    assert times
    harness.engine.handle(Warm("w", ids, "", TierName.DISK, pin=True, durable=True))
    run(harness)
    assert harness.rejected["w"].reason is ErrorReason.TIER_UNAVAILABLE
    assert harness.engine.prefixes.times_to_live == times
    harness.assert_idle_books()


def test_a_warm_pins_no_more_than_its_namespace_may() -> None:
    harness = Harness(store=MemoryStore(), num_blocks=128)
    harness.engine.handle(SetQuota(1, "team", None, 1))
    warm(harness, "w", prompt_of(2 * GRID + 1, 1), namespace="team/part", pin=True)
    warm(harness, "elsewhere", prompt_of(2 * GRID + 1, 1), namespace="teams", pin=True)
    run(harness)
    assert harness.rejected["w"].reason is ErrorReason.QUOTA_EXCEEDED
    assert warmed(harness) == {"elsewhere"}
    assert [node.namespace for node in harness.engine.prefixes.pins] == ["teams"]


def test_a_quota_holds_for_all_parts_of_a_namespace_together() -> None:
    harness = Harness(store=MemoryStore(), num_blocks=128)
    for seed in range(4):
        for namespace in ("team", "team/a", "team/b", "teams"):
            harness.submit(
                f"{namespace}{seed}".replace("/", "-"), prompt_of(2 * GRID + 1, seed), 1, namespace=namespace
            )
    harness.run()
    charged = harness.device.tree.charged
    before, part = charged["teams"], charged["team/a"]
    assert charged["team"] == 3 * part > 0
    harness.engine.handle(SetQuota(1, "team", charged["team"] // 3, None))
    harness.run()
    assert 0 < charged["team"] <= part
    assert charged["teams"] == before
    harness.assert_idle_books()
