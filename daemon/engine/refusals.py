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
    if error := _capacity_error(scheduler, asked):
        return Refusal(ErrorReason.CONTEXT_TOO_LONG, error)
    if scheduler.streaming is not None and (error := scheduler.streaming.rate_error(asked.max_len)):
        return Refusal(ErrorReason.NO_CAPACITY, error, SLOW_RETRY_S)
    if scheduler.is_full(is_warm=asked.is_warm):
        return Refusal(ErrorReason.QUEUE_FULL, f"{scheduler.max_queue} requests wait already", BUSY_RETRY_S)
    return None


def _capacity_error(scheduler: Scheduler, asked: Asked) -> str | None:
    """Why it could never run, however empty the tiers; None where it could."""
    device, n = scheduler.device, asked.n
    if n > scheduler.max_sequences:
        return f"n is {n}, but only {scheduler.max_sequences} sequences run at a time"
    # What is warmed is the tree's at the end, and the tail of what is larger than the device is not yet.
    if scheduler.streaming is not None and scheduler.streaming.wants(asked.max_len) and not asked.is_warm:
        return scheduler.streaming.capacity_error(asked.max_len, n)
    first_len = min(asked.max_len, asked.prompt_len + scheduler.growth_window)
    shared = asked.prompt_len // device.layout.block_size
    together = device.blocks_for(first_len) + (n - 1) * (device.blocks_for(first_len) - shared)
    alone = device.blocks_for(asked.max_len)
    if max(together, alone) > device.num_usable_blocks:
        return (
            f"prompt of {asked.prompt_len} tokens, at most {asked.max_len} with the answer and n = {n}, needs "
            f"{max(together, alone)} blocks of {device.layout.block_size} tokens; "
            f"the device has {device.num_usable_blocks}"
        )
    return None
