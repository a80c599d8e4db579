"""A look-up says what a prompt would find, and changes nothing that one finds."""

import pytest

from daemon.cache_messages import GateDecision, Lookup, LookupAnswer
from tests.engine.harness import GRID, Harness
from tests.engine.test_engine import prompt_of
from tests.engine.test_meters import array_of


@pytest.mark.parametrize("is_looked_up", [False, True])
def test_a_look_up_that_finds_a_load_too_slow_refuses_no_other(is_looked_up: bool) -> None:
    harness = Harness(num_chunks=200, break_even=True)
    small, large = prompt_of(GRID + 1, 1), prompt_of(6 * GRID + 1, 2)
    for name, prompt in (("small", small), ("large", large)):
        harness.submit(name, prompt, 2)
        harness.run()
    harness.device.drop_cache()
    cache = harness.engine.cache
    gate, cost = cache.gates["host"], cache.costs.cost
    cache.costs.prefill.flops_per_s = 1.0
    gate.latency_s, gate.s_per_byte, gate.slowdown = 0.9 * cost.flops(0, 6 * GRID), 1e-12, 1.0
    if is_looked_up:
        harness.engine.handle(Lookup(1, "", array_of(small)))
        answer = harness.other[-1]
        assert isinstance(answer, LookupAnswer)
        assert answer.gate is GateDecision.COMPUTE
    harness.submit("again", large, 2)
    harness.run()
    assert harness.usage["again"].cached_host == 6 * GRID
    harness.assert_idle_books()
