"""The head of the queue is tried again when it may fit, and not for each block that others take."""

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
