"""What has happened to the daemon, for operators: a bounded log with sequence numbers, and those who follow it.

Adding an event never waits: a reader that is too slow for the log's length learns how many it has missed. Sequence
numbers count from 1 without a gap; they mean something together with the log's id alone, which each start makes anew.

The log takes its memory when it is made, so that the front does not grow while it fills: events are kept as they go
over the wire (a protobuf message holds a kilobyte of its own), in the places of blank ones of a usual event's size.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from downcore.v1 import admin_pb2 as pb

MAX_EVENTS = 4096  # remembered
USUAL_BYTES = 96  # of one


@dataclass(frozen=True, slots=True)
class Entry:
    """An event for one reader, and how many it has missed before it."""

    event: pb.Event
    missed: int


class EventLog:
    """The latest events. Used by the loop's thread alone."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.id = secrets.token_hex(8)
        self._events = deque((bytes(USUAL_BYTES) for _ in range(max_events)), maxlen=max_events)  # the latest come last
        self._num_added = 0
        self._added = asyncio.Event()  # replaced at each event

    def add(self, kind: pb.EventKind, message: str, *, tier: str = "", count: int = 0) -> None:
        """Remembers an event and wakes those who follow."""
        self._num_added += 1
        event = pb.Event(
            sequence=self._num_added, time_s=time.time(), kind=kind, message=message, tier=tier, count=count
        )
        self._events.append(event.SerializeToString())
        added, self._added = self._added, asyncio.Event()
        added.set()

    async def read(self, after: int, *, follow: bool) -> AsyncGenerator[Entry]:
        """Events after a sequence number, oldest first; with `follow` without end."""
        while True:
            added = self._added
            missed = 0
            for event in map(pb.Event.FromString, self._since(after)):
                missed = event.sequence - after - 1
                after = event.sequence
                yield Entry(event, missed)
            if not follow and after >= self._num_added:
                return
            if after >= self._num_added:
                await added.wait()

    def _since(self, after: int) -> list[bytes]:
        """Those after a number, a copy: the log goes on while its reader writes."""
        num_places = len(self._events)
        num_wanted = min(self._num_added - after, num_places)
        return [self._events[index] for index in range(num_places - num_wanted, num_places)]
