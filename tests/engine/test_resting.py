"""The engine's loop sleeps where nothing can be done, and nowhere else."""

import pytest

from daemon.engine import kv_events
from daemon.engine.resting import may_sleep
from daemon.kv_messages import KvSnapshot, KvWatch
from tests.engine.harness import BLOCK, GRID, Harness
from tests.engine.test_engine import prompt_of


def test_an_idle_engine_does_not_sleep_between_the_parts_of_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_EVENTS", 1)
    harness = Harness()
    harness.submit("r", prompt_of(6 * GRID + 1), 2)
    harness.run()
    assert may_sleep(harness.engine)
    harness.engine.handle(KvWatch(1, ""))
    while not may_sleep(harness.engine):
        assert harness.engine.has_work
        harness.step()
    parts = [message for message in harness.other if isinstance(message, KvSnapshot)]
    assert [part.index for part in parts] == list(range(6 * GRID // BLOCK))
