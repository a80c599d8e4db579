"""A pin binds all that a prompt needs to resume, and can be taken back whatever became of it."""

from array import array

import pytest

from daemon.cache_messages import ListPrefixes, PinPrefix, PrefixAnswer, PrefixList, PrefixOrder, Selector, UnpinPrefix
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import forget_device, prompt_of, serve

PROMPT = prompt_of(2 * GRID + 1, 1)
SELECTOR = Selector(prompt_ids=array("i", PROMPT).tobytes())


def test_a_pinned_state_stays_in_the_host_tier_while_the_disk_lacks_its_record() -> None:
    """Without the state a prompt of this model resumes nowhere, whatever blocks are kept."""
    harness = Harness(num_chunks=32, store=MemoryStore())
    serve(harness, "kept", PROMPT)
    harness.engine.handle(PinPrefix(1, "", SELECTOR))
    harness.run()
    (pinned,) = harness.engine.prefixes.pins
    assert pinned.host_state is not None
    assert pinned.disk_state is not None
    assert harness.engine.cache.restorer.set_aside(pinned, pinned.disk_state, OSError("damaged"))
    before = harness.host.stats.evicted_copies
    for seed in range(2, 12):
        serve(harness, f"other {seed}", prompt_of(4 * GRID + 1, seed))
    assert harness.host.stats.evicted_copies > before
    forget_device(harness)
    serve(harness, "hit", PROMPT)
    usage = harness.usage["hit"]
    assert usage.cached_host + usage.cached_disk == 2 * GRID
    harness.assert_idle_books()


@pytest.mark.parametrize("by", ["key", "prompt"])
def test_a_pin_can_be_seen_and_taken_back_when_the_state_after_its_prefix_is_gone(by: str) -> None:
    harness = Harness(store=(store := MemoryStore()))
    serve(harness, "shorter", PROMPT[: GRID + 1])
    serve(harness, "kept", PROMPT)
    harness.engine.handle(PinPrefix(1, "", SELECTOR))
    harness.run()
    (pinned,) = harness.engine.prefixes.pins
    forget_device(harness)
    assert pinned.disk_state is not None
    assert harness.engine.cache.restorer.set_aside(pinned, pinned.disk_state, OSError("damaged"))
    assert not pinned.has_state
    harness.engine.handle(ListPrefixes(2, "", "", PrefixOrder.RECENCY, 10))
    listed = harness.other[-1]
    assert isinstance(listed, PrefixList)
    assert [row.key for row in listed.rows if row.pinned] == [pinned.key.hex()]
    harness.engine.handle(UnpinPrefix(3, "", Selector(key=pinned.key.hex()) if by == "key" else SELECTOR))
    harness.run()
    answer = harness.other[-1]
    assert isinstance(answer, PrefixAnswer)
    assert answer.prefix.key == pinned.key.hex()
    assert not store.pinned
    assert harness.disk.pinned_bytes == 0
    harness.assert_idle_books()


def answers(harness: Harness) -> list[tuple[int, bool]]:
    """To pins and their ends: the question, and whether the prefix is pinned."""
    return [(told.query_id, told.prefix.pinned) for told in harness.other if isinstance(told, PrefixAnswer)]


def test_a_pin_and_its_end_are_answered_when_the_disk_has_them() -> None:
    harness = Harness(store=(store := MemoryStore()))
    serve(harness, "kept", PROMPT)
    for question, is_pinned in ((PinPrefix(1, "", SELECTOR), True), (UnpinPrefix(2, "", SELECTOR), False)):
        harness.mover.is_stalled = True
        harness.engine.handle(question)
        harness.step(3)
        assert len(answers(harness)) == question.query_id - 1
        harness.mover.is_stalled = False
        harness.run()
        assert answers(harness)[-1] == (question.query_id, is_pinned)
        assert bool(store.pinned) is is_pinned
    harness.assert_idle_books()


def test_a_disk_that_hangs_does_not_keep_the_answer_to_a_pin_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.engine.questions.KEPT_WITHIN_S", 0.0)
    harness = Harness(store=(store := MemoryStore()))
    serve(harness, "kept", PROMPT)
    harness.mover.is_stalled = True
    harness.engine.handle(PinPrefix(1, "", SELECTOR))
    harness.step()
    assert answers(harness) == [(1, True)]
    assert not store.pinned
    harness.mover.is_stalled = False
    harness.run()
    assert answers(harness) == [(1, True)]
    assert store.pinned
    harness.assert_idle_books()
