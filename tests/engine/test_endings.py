"""How choices of one request end together: at a deadline, and where something cannot be returned."""

from daemon.errors import ErrorReason
from daemon.messages import Abort
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import Oracle
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


def fails() -> None:
    raise OSError("it cannot be returned")


def test_what_one_choice_cannot_return_keeps_nothing_of_the_others_and_no_chunk_in_flight() -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(6 * GRID), 12, n=3)
    harness.step()
    (lead,) = harness.engine.scheduler.running
    assert harness.engine.prefill.chunk is not None
    lead.siblings[0].resources.hold("odd", 1, fails)
    harness.engine.handle(Abort("r"))
    harness.assert_idle_books()
    harness.submit("next", prompt_of(2 * GRID, 1), 12)
    harness.run()
    assert harness.tokens[("next", 0)] == Oracle(INVENTED, BLOCK).answer(prompt_of(2 * GRID, 1), 12)
    harness.assert_idle_books()
