"""Moments in which nobody waits for a row: whether the engine's loop may sleep, and what it does instead."""

import logging

from daemon.engine.engine import Engine

RESTING_VISITS = 4  # replayed by the tuner in one idle moment, a few milliseconds

log = logging.getLogger("downcore.engine")


def may_sleep(engine: Engine) -> bool:
    """Nothing can be done before a message comes, a transfer ends or a grammar is built."""
    return (engine.is_idle or engine.only_waits) and not engine.questions.kv_events.is_due


def rest(engine: Engine) -> None:
    """Work for idle moments: the eviction weights learn from the latest prompts."""
    if engine.tuning is None:
        return
    change = engine.tuning.advance(RESTING_VISITS)
    if change is not None:
        log.info("%s", change)
        engine.cache.reweigh(change.new)
