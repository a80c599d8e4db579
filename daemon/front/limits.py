"""What each principal has open, and its limits: calls at a time, and prompt tokens in the queue.

Bytes in the cache are limited by namespace, in the engine. What must hold: what a call took is given back when it ends.
"""

import asyncio
from dataclasses import dataclass, field

from daemon.errors import ErrorReason, RequestError
from daemon.front.held import HeldBytes
from daemon.front.principals import Directory, Identity, Principal


class QueuedTokens:
    """A prompt that counts as queued, until it is released; releasing it again does nothing."""

    __slots__ = ("_num_tokens", "_use")

    def __init__(self, use: "Use", num_tokens: int) -> None:
        self._use = use
        self._num_tokens = num_tokens
        use.queued_tokens += num_tokens

    def release(self) -> None:
        self._use.queued_tokens -= self._num_tokens
        self._num_tokens = 0


@dataclass(slots=True)
class Use:
    """What one principal has open now."""

    num_requests: int = 0
    queued_tokens: int = 0

    def queue(self, principal: Principal, num_tokens: int) -> QueuedTokens:
        """Counts a prompt. Raises RequestError where its principal has too many tokens queued already.

        One prompt alone is never too much: the limit is of what waits, not of a prompt's length.
        """
        limit = principal.max_queued_tokens
        if limit is not None and self.queued_tokens and self.queued_tokens + num_tokens > limit:
            text = f"{self.queued_tokens} prompt tokens of this caller wait already; {limit} may"
            raise RequestError(ErrorReason.LIMIT_EXCEEDED, text)
        return QueuedTokens(self, num_tokens)


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call whose caller has shown a credential. `ended` says so where that is taken back before the call ends."""

    identity: Identity
    task: "asyncio.Task[object]"
    ended: RequestError | None = None


@dataclass(slots=True)
class Uses:
    """All principals' use, what they hold together, and the calls that a credential has opened."""

    held: HeldBytes
    by_name: dict[str, Use] = field(default_factory=dict[str, Use])
    calls: set[OpenCall] = field(default_factory=set[OpenCall])

    def of(self, principal: Principal) -> Use:
        """What this principal has open."""
        return self.by_name.setdefault(principal.name, Use())

    def begin(self, principal: Principal) -> Use:
        """Counts a call; the caller ends it. Raises RequestError where its principal is at a limit."""
        use = self.of(principal)
        limit, queue = principal.max_requests, principal.max_queued_tokens
        if limit is not None and use.num_requests >= limit:
            raise RequestError(ErrorReason.LIMIT_EXCEEDED, f"{limit} calls of this caller are open, which is its limit")
        if queue is not None and use.queued_tokens >= queue > 0:
            text = f"{use.queued_tokens} prompt tokens of this caller wait already; {queue} may"
            raise RequestError(ErrorReason.LIMIT_EXCEEDED, text)
        use.num_requests += 1
        return use

    def end_unknown(self, directory: Directory, now_s: float) -> int:
        """Ends the calls whose credential is no longer good. Returns: how many."""
        gone = [call for call in self.calls if call.ended is None and not directory.still_knows(call.identity, now_s)]
        for call in gone:
            call.ended = RequestError(ErrorReason.UNAUTHENTICATED, "the credential of this call is no longer good")
            call.task.cancel()
        return len(gone)

    def forget(self, directory: Directory) -> None:
        """Principals that are no longer known, and have nothing open, leave the table."""
        for name, use in list(self.by_name.items()):
            if name not in directory.principals and not use.num_requests and not use.queued_tokens:
                del self.by_name[name]

    def check(self) -> None:
        """Raises AssertionError where more was given back than taken."""
        for name, use in self.by_name.items():
            assert use.num_requests >= 0, name
            assert use.queued_tokens >= 0, name
