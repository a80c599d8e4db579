"""Why a request is not queued: it can never run, or not now. Nothing has been computed or taken for it."""

from dataclasses import dataclass

from daemon.engine.scheduler import Scheduler
from daemon.errors import ErrorReason

BUSY_RETRY_S = 1.0
SLOW_RETRY_S = 30.0  # where others share the link; alone it would not be faster later


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason of the catalogue, the figures, and when to ask again."""

    reason: ErrorReason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides about a request. Lengths are in tokens; `most_tokens` is what a sequence may ever have."""

    prompt_len: int
    max_len: int
    most_tokens: int
    n: int
    is_warm: bool


def refusal(scheduler: Scheduler, asked: Asked) -> Refusal | None:
    """None where it may wait for its turn."""
    if asked.prompt_len >= asked.most_tokens:
        limit = f"the limit is {asked.most_tokens} with at least one token of answer"
        return Refusal(ErrorReason.CONTEXT_TOO_LONG, f"prompt of {asked.prompt_len} tokens: {limit}")
    if error := scheduler.capacity_error(asked.prompt_len, asked.max_len, asked.n):
        return Refusal(ErrorReason.CONTEXT_TOO_LONG, error)
    if scheduler.streaming is not None and (error := scheduler.streaming.rate_error(asked.max_len)):
        return Refusal(ErrorReason.NO_CAPACITY, error, SLOW_RETRY_S)
    if scheduler.is_full(is_warm=asked.is_warm):
        return Refusal(ErrorReason.QUEUE_FULL, f"{scheduler.max_queue} requests wait already", BUSY_RETRY_S)
    return None
