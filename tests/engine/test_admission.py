"""Admission and admission again: when the head of the queue is tried, and what who comes back goes on to do."""

from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import Oracle
from tests.engine.test_engine import prompt_of


def test_a_prompt_that_waits_is_looked_up_again_only_when_there_may_be_room() -> None:
    harness = Harness(num_blocks=80, growth_window=4)
    known = prompt_of(20 * GRID)
    harness.submit("known", known, 2)
    harness.run()
    for i in range(4):
        harness.submit(f"grows{i}", prompt_of(3 * GRID + i, i), 60, ignore_eos=True)
    while any(f"grows{i}" not in harness.usage for i in range(4)):
        harness.step()
    harness.submit("waits", known + prompt_of(6 * GRID, 9), 40, ignore_eos=True)
    harness.step()
    before = sum(harness.engine.cache.lookup_s.counts)
    while len(harness.engine.scheduler.running) == 4:
        assert harness.engine.scheduler.waiting
        harness.step()
    assert sum(harness.engine.cache.lookup_s.counts) - before <= 2
    harness.run()
    expected = Oracle(INVENTED, BLOCK).answer(known + prompt_of(6 * GRID, 9), 40, stop_at_eos=False)
    assert harness.tokens[("waits", 0)] == expected
    harness.assert_idle_books()


def test_a_prompt_that_is_replayed_keeps_the_state_at_its_end_although_it_once_resumed_from_it() -> None:
    harness = Harness(num_blocks=128)
    prompt = prompt_of(6 * GRID + 3)
    harness.submit("cold", prompt, 2)
    harness.run()
    harness.submit("hit", prompt, 20, ignore_eos=True)
    while len(harness.tokens[("hit", 0)]) < 5:
        harness.step()
    (sequence,) = harness.engine.scheduler.running
    harness.engine.scheduler.preempt(sequence)
    harness.device.drop_cache()
    harness.run()
    harness.submit("again", prompt, 2)
    harness.run()
    assert harness.usage["hit"].cached_device == harness.usage["again"].cached_device == 6 * GRID
    assert harness.tokens[("hit", 0)] == Oracle(INVENTED, BLOCK).answer(prompt, 20, stop_at_eos=False)
    harness.assert_idle_books()
