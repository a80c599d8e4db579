"""Load or compute again: the figures, the decision, and what happens while a tier is slow."""

import random
from itertools import pairwise

import pytest

from tiers.gate import BreakEvenGate, PrefillSpeed

MB = 1_000_000
FLOPS_PER_S = 10**12
CHUNK_FLOPS = 10**12  # one second of prefill


def make_gate(bytes_per_s: float = 500 * MB, latency_s: float = 0.002) -> BreakEvenGate:
    prefill = PrefillSpeed()
    prefill.observe(CHUNK_FLOPS, CHUNK_FLOPS / FLOPS_PER_S)
    gate = BreakEvenGate(prefill)
    for num_bytes in (1 * MB, 50 * MB, 10 * MB, 100 * MB):
        gate.observe(num_bytes, latency_s + num_bytes / bytes_per_s, 0.0)
    return gate


def test_bandwidth_and_latency_come_out_of_loads_of_several_sizes() -> None:
    gate = make_gate(bytes_per_s=300 * MB, latency_s=0.02)
    assert gate.bytes_per_s == pytest.approx(300 * MB, rel=0.01)
    assert gate.latency_s == pytest.approx(0.02, rel=0.01)


def test_the_gate_decides_by_what_is_cheaper_and_says_both_figures() -> None:
    gate = make_gate()
    yes = gate.decide(200 * MB, CHUNK_FLOPS)
    assert yes.is_load
    assert str(yes) == "load is cheaper: load 0.4 s, compute 1.0 s"
    no = gate.decide(600 * MB, CHUNK_FLOPS)
    assert not no.is_load
    assert str(no) == "recompute is cheaper: load 1.2 s, compute 1.0 s"
    assert (yes.deadline_s, no.deadline_s) == (pytest.approx(1.0), None)


def test_what_waits_before_a_load_counts() -> None:
    assert make_gate().decide(200 * MB, CHUNK_FLOPS).is_load
    assert not make_gate().decide(200 * MB, CHUNK_FLOPS, queued_bytes=500 * MB).is_load


def test_before_anything_is_measured_it_loads() -> None:
    unmeasured = BreakEvenGate(PrefillSpeed())
    assert unmeasured.decide(1, 1).is_load
    unmeasured.observe(MB, 0.1, 0.0)
    verdict = unmeasured.decide(1, 1)
    assert verdict.is_load
    assert "prefill speed is not measured" in str(verdict)


def test_near_break_even_the_decision_holds() -> None:
    gate = make_gate(latency_s=0.0)
    assert gate.decide(450 * MB, CHUNK_FLOPS).is_load  # 0.9 of the computation
    assert not gate.decide(510 * MB, CHUNK_FLOPS).is_load
    assert not gate.decide(450 * MB, CHUNK_FLOPS).is_load, "refused until it is clearly cheaper"
    assert gate.decide(350 * MB, CHUNK_FLOPS).is_load
    assert gate.decide(450 * MB, CHUNK_FLOPS).is_load


def test_one_slow_load_is_enough_to_refuse_the_next() -> None:
    gate = make_gate()
    gate.observe(200 * MB, 4.0, 1.0)
    assert not gate.decide(200 * MB, CHUNK_FLOPS).is_load


def test_a_refused_tier_is_probed_ever_less_often_until_a_probe_is_faster() -> None:
    gate = make_gate(bytes_per_s=10 * MB)
    assert not gate.decide(200 * MB, CHUNK_FLOPS).is_load
    now_s, probes = 0.0, list[float]()
    while now_s < 1000.0:
        now_s += 0.5
        if gate.wants_probe(now_s):
            probes.append(now_s)
            gate.observe(20 * MB, 20 / 10, now_s)
    waits = [later - earlier for earlier, later in pairwise(probes)]
    assert waits[0] <= 4.0
    assert max(waits) == 60.0
    assert waits == sorted(waits)
    gate.observe(20 * MB, 20 / 500, now_s)
    assert gate.wants_probe(now_s + 1.0)


def test_an_accepted_tier_is_not_probed() -> None:
    gate = make_gate()
    assert gate.decide(200 * MB, CHUNK_FLOPS).is_load
    assert not gate.wants_probe(10_000.0)


@pytest.mark.parametrize("seed", range(5))
def test_through_fast_and_slow_spells_hits_cost_little_more_than_recompute_and_loading_comes_back(seed: int) -> None:
    """Loads at a jittering speed that falls to a fiftieth for two spells; a slow load is given up at its deadline."""
    draw = random.Random(seed)
    gate = make_gate()
    surprises, refused_well, now_s = 0, 0, 0.0
    costs: dict[bool, list[float]] = {True: [], False: []}  # by whether the tier was slow: of 1 s of recompute
    for step in range(3000):
        is_slow = step % 1500 > 900
        bytes_per_s = (10 if is_slow else 500) * MB * draw.uniform(0.8, 1.2)
        now_s += 1.0
        num_bytes = draw.randrange(50, 300) * MB
        verdict = gate.decide(num_bytes, CHUNK_FLOPS)
        if verdict.is_load:
            assert verdict.deadline_s is not None
            load_s = 0.002 + num_bytes / bytes_per_s
            is_late = load_s > verdict.deadline_s
            surprises += is_late
            costs[is_slow].append(verdict.deadline_s + 1.0 if is_late else load_s)
            gate.observe(num_bytes, min(load_s, verdict.deadline_s), now_s)
        else:
            refused_well += is_slow
            costs[is_slow].append(1.0)
            if gate.wants_probe(now_s):
                gate.observe(20 * MB, 20 * MB / bytes_per_s, now_s)
    assert surprises <= 6, "a spell surprises a few times, not once for each load"
    assert refused_well > 1000
    assert sum(costs[True]) <= 1.05 * len(costs[True])
    assert sum(costs[False]) <= 0.5 * len(costs[False]), "with the tier fast again, it is used again"
