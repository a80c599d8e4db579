"""How choices of one request end: at a deadline, and by what came for them before their fork."""

from daemon.errors import ErrorReason
from tests.engine.harness import GRID, Harness
from tests.engine.test_engine import prompt_of


def test_choices_that_are_admitted_again_together_end_together_where_their_deadline_is_too_near() -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(6 * GRID), 40, n=3, temperature=1.0, ignore_eos=True, deadline_s=10.0)
    harness.submit("other", prompt_of(5, 1), 40, ignore_eos=True)
    while "r" not in harness.usage:
        harness.step()
    for sequence in [s for s in harness.engine.scheduler.running if s.request.id == "r"]:
        harness.engine.scheduler.preempt(sequence)
    harness.device.drop_cache()
    harness.engine.rate.tokens_per_s = 0.1
    harness.run()
    assert harness.rejected["r"].reason is ErrorReason.DEADLINE_EXCEEDED
    assert len(harness.tokens[("other", 0)]) == 40
    harness.assert_idle_books()
