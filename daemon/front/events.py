"""What has happened to the daemon, for operators: a bounded log with sequence numbers, and those who follow it.

Adding an event never waits: a reader that is too slow for the log's length learns how many it has missed. Sequence
numbers count from 1 without a gap; they mean something together with the log's id alone, which each start makes anew.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from downcore.v1 import admin_pb2 as pb

MAX_EVENTS = 4096  # remembered


@dataclass(frozen=True, slots=True)
class Entry:
    """An event for one reader, and how many it has missed before it."""

    event: pb.Event
    missed: int


class EventLog:
    """The latest events. Used by the loop's thread alone."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.id = secrets.token_hex(8)
        self._events: deque[pb.Event] = deque(maxlen=max_events)
        self._num_added = 0
        self._added = asyncio.Event()  # replaced at each event

    def add(self, kind: pb.EventKind, message: str, *, tier: str = "", count: int = 0) -> None:
        """Remembers an event and wakes those who follow."""
        self._num_added += 1
        self._events.append(
            pb.Event(sequence=self._num_added, time_s=time.time(), kind=kind, message=message, tier=tier, count=count)
        )
        added, self._added = self._added, asyncio.Event()
        added.set()

    async def read(self, after: int, *, follow: bool) -> AsyncGenerator[Entry]:
        """Events after a sequence number, oldest first; with `follow` without end."""
        while True:
            added = self._added
            missed = 0
            for event in self._since(after):
                missed = event.sequence - after - 1
                after = event.sequence
                yield Entry(event, missed)
            if not follow and after >= self._num_added:
                return
            if after >= self._num_added:
                await added.wait()

    def _since(self, after: int) -> list[pb.Event]:
        """Those after a number, a copy: the log goes on while its reader writes."""
        num_wanted = min(self._num_added - after, len(self._events))
        if num_wanted <= 0:
            return []
        if num_wanted == len(self._events):
            return list(self._events)
        return [self._events[index] for index in range(len(self._events) - num_wanted, len(self._events))]
