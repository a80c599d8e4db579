"""The order of eviction: what goes first, under any weights, and what a decision costs."""

import random
import time
from collections import OrderedDict
from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.eviction import LRU, Decision, EvictionOrder, Weights, Worth
from tiers.heap import Entry, Heap

BASE = Worth(last_use_s=0.0, gap_s=10.0, flops=10**12, num_bytes=10**6)


def order_of(worths: dict[str, Worth], weights: Weights, now_s: float = 1000.0) -> list[str]:
    order = EvictionOrder[str](weights)
    for item, worth in worths.items():
        order.offer(item, worth)
    order.check()
    return [item for _ in worths if (item := order.pop(now_s)) is not None]


@given(st.lists(st.tuples(st.sampled_from(["push", "move", "remove"]), st.integers(0, 30), st.integers(0, 9))))
def test_a_heap_yields_its_items_by_key_whatever_was_done_to_it(steps: list[tuple[str, int, int]]) -> None:
    heap = Heap[int]()
    model: dict[int, tuple[float, int]] = {}
    entries: dict[int, Entry[int]] = {}
    for serial, (step, item, key) in enumerate(steps):
        if step == "push" and item not in model:
            entries[item] = heap.push(item, key, serial)
            model[item] = (key, serial)
        elif step == "move" and item in model:
            heap.move(entries[item], key, serial)
            model[item] = (key, serial)
        elif step == "remove" and item in model:
            heap.remove(entries.pop(item))
            del model[item]
        heap.check()
    while model:
        first = min(model, key=lambda item: model[item])
        assert (heap.first(), heap.first_key()) == (first, model[first][0])
        heap.remove(entries[first])
        del model[first]
    assert len(heap) == 0


def test_with_zero_weights_the_least_recently_used_goes_first_whatever_it_is_worth() -> None:
    draw = random.Random(4)
    order = EvictionOrder[int](LRU)
    model: OrderedDict[int, None] = OrderedDict()
    evicted = 0
    for step in range(4000):
        item = draw.randrange(300)
        if draw.random() < 0.2 and model:
            oldest = next(iter(model))
            assert order.first(step) == oldest
            assert order.pop(step) == oldest
            del model[oldest]
            evicted += 1
        elif draw.random() < 0.1:
            order.discard(item)
            model.pop(item, None)
        else:
            flops, gap_s = draw.randrange(10**15), draw.lognormvariate(3, 2)
            order.offer(item, Worth(step, gap_s, flops, draw.randrange(1, 10**9)))
            model[item] = None
            model.move_to_end(item)
        if step % 100 == 0:
            order.check()
    assert evicted > 500
    assert len(order) == len(model)
    assert all(item in order for item in model)


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.floats(0, 3), st.floats(0, 8))
def test_what_goes_has_the_lowest_score_but_for_the_width_of_a_class(seed: int, alpha: float, patience: float) -> None:
    draw = random.Random(seed)
    worths = {
        item: Worth(draw.uniform(0, 1000), draw.lognormvariate(3, 2), draw.randrange(10**9, 10**14), 10**8)
        for item in range(60)
    }
    order = EvictionOrder[int](Weights(alpha, patience))
    for item, worth in worths.items():
        order.offer(item, worth)

    def score(item: int) -> float:
        worth = worths[item]
        age, habit = 1000.5 - worth.last_use_s, patience * worth.gap_s
        wait = (habit + age**2 / habit) / 2 if age < habit else age
        return alpha * log(worth.efficiency) - log(wait)

    # Half a class is a factor of 2^(1/8) in efficiency or gap, on either side; a wait changes no faster than its gap.
    width = 2 * (alpha * log(2) / 8 + log(2) / 8) + 1e-9
    while worths:
        item = order.pop(1000.0)
        assert item is not None
        assert score(item) <= min(score(other) for other in worths) + width
        del worths[item]
    assert order.pop(1000.0) is None


def test_of_two_things_of_one_age_the_one_that_saves_more_per_byte_stays() -> None:
    worths = {"dear": replace(BASE, flops=10**13), "cheap": BASE, "large": replace(BASE, num_bytes=10**7)}
    assert order_of(worths, Weights()) == ["large", "cheap", "dear"]


def test_of_two_things_of_one_age_the_one_that_is_asked_for_more_often_stays() -> None:
    worths = {"often": replace(BASE, gap_s=5.0), "seldom": replace(BASE, gap_s=3600.0)}
    assert order_of(worths, Weights()) == ["seldom", "often"]
    assert order_of(worths, Weights(patience=0.0)) == ["often", "seldom"], "ties go by arrival"


def test_within_its_habit_the_age_hardly_counts_and_beyond_it_the_age_is_all() -> None:
    hourly = replace(BASE, gap_s=3600.0)
    assert order_of({"hourly": hourly, "late": replace(BASE, gap_s=60.0)}, Weights(), now_s=600.0) == ["hourly", "late"]
    worths = {"long gone": replace(BASE, gap_s=60.0), "hourly": replace(hourly, last_use_s=4000.0)}
    assert order_of(worths, Weights(), now_s=6000.0) == ["long gone", "hourly"]
    ages = {"half": replace(hourly, last_use_s=5100.0), "dearer": replace(hourly, flops=BASE.flops * 6 // 5)}
    assert order_of(ages, Weights(), now_s=6000.0) == ["dearer", "half"]
    assert order_of({**ages, "dearer": replace(ages["dearer"], last_use_s=4200.0)}, Weights(), 6000.0) == [
        "half",
        "dearer",
    ]


def test_nothing_stays_for_ever_because_it_is_dear() -> None:
    worths = {"dear": replace(BASE, flops=10**14), "fresh": replace(BASE, last_use_s=99_990.0)}
    assert order_of({**worths, "fresh": replace(BASE, last_use_s=995.0)}, Weights())[0] == "fresh"
    assert order_of(worths, Weights(), now_s=100_000.0)[0] == "dear"


@pytest.mark.parametrize("weights", [LRU, Weights(), Weights(5.0, 0.0)])
def test_what_does_not_fit_the_tier_goes_before_everything(weights: Weights) -> None:
    worths = {"old": BASE, "huge": replace(BASE, last_use_s=999.0, flops=10**15, fits=False)}
    assert order_of(worths, weights) == ["huge", "old"]


def test_other_weights_hold_from_the_next_decision_on() -> None:
    order = EvictionOrder[str](LRU)
    order.offer("dear", replace(BASE, flops=10**14))
    order.offer("cheap", replace(BASE, last_use_s=100.0))
    assert order.first(200.0) == "dear"
    order.reweigh(Weights())
    assert order.first(200.0) == "cheap"
    order.check()


def test_an_item_offered_again_is_there_once_with_its_new_worth() -> None:
    order = EvictionOrder[str](Weights())
    order.offer("a", BASE)
    order.offer("b", replace(BASE, last_use_s=1.0))
    order.offer("a", replace(BASE, last_use_s=2.0, flops=10**14))
    order.check()
    assert [order.pop(9.0), order.pop(9.0), order.pop(9.0)] == ["b", "a", None]
    order.discard("a")


@pytest.mark.parametrize("alpha", [-1.0, float("inf"), float("nan")])
def test_weights_that_mean_nothing_are_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Weights(alpha=alpha)


def test_decisions_are_recorded_and_the_same_calls_repeat_them() -> None:
    def record() -> list[Decision[int]]:
        draw = random.Random(11)
        decisions: list[Decision[int]] = []
        order = EvictionOrder[int](Weights(), decisions.append)
        for step in range(3000):
            order.offer(draw.randrange(500), Worth(step, draw.lognormvariate(3, 1), draw.randrange(10**12), 10**6))
            if step % 5 == 0:
                order.pop(step)
            if step % 700 == 0:
                order.reweigh(Weights(draw.random(), draw.random()))
        return decisions

    first = record()
    assert len(first) == 600
    assert len({decision.weights for decision in first}) == 6
    assert first == record()


def test_a_decision_does_not_grow_with_the_number_of_items() -> None:
    def cpu_s(num_items: int) -> float:
        draw = random.Random(3)
        order = EvictionOrder[int](Weights())
        for item in range(num_items):
            order.offer(item, Worth(item, draw.lognormvariate(3, 1.5), int(draw.lognormvariate(0, 1) * 1e13), 10**8))
        best = float("inf")
        for _ in range(5):
            before = time.thread_time()
            for _ in range(400):
                item = order.pop(num_items)
                assert item is not None
                order.offer(item, replace(BASE, last_use_s=num_items))
            best = min(best, time.thread_time() - before)
        return best

    assert cpu_s(64_000) < 8 * cpu_s(1000)


def test_changing_alpha_touches_no_item() -> None:
    order = EvictionOrder[int](Weights())
    draw = random.Random(5)
    for item in range(50_000):
        order.offer(item, Worth(item, draw.lognormvariate(3, 1.5), int(draw.lognormvariate(0, 1) * 1e13), 10**8))
    before = time.thread_time()
    for alpha in range(20):
        order.reweigh(Weights(float(alpha), 1.0))
    assert (time.thread_time() - before) / 20 < 0.005
    assert order.num_classes < 2000
