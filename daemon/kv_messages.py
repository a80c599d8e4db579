"""What front and engine say to each other about blocks that come and go; part of the unions in daemon/messages.py.

A watched namespace has one sequence of batches, numbered without a gap. The first number of a watch is the time in
microseconds since the epoch, or more: so the numbers of a later watch, of this engine or of one started after it, lie
above all earlier ones, and an old number is never taken for a newer watch's.
"""

import msgspec

from daemon.cache_messages import TierName

MAX_EVENTS = 256  # of one batch or one part of a snapshot


class KvWatch(msgspec.Struct, frozen=True, tag=True):
    """Tell what comes and goes in a namespace from now on, and what is there now. Watching twice is watching once."""

    query_id: int
    namespace: str


class KvUnwatch(msgspec.Struct, frozen=True, tag=True):
    """Tell it no more."""

    namespace: str


class KvEvent(msgspec.Struct, frozen=True, array_like=True):
    """A block's copy came to a tier; without tokens, it left.

    `key` is the first 8 bytes of the block key, little-endian and signed; `parent` that of the block before it, None at
    a prefix's beginning. `tokens` is little-endian int32.
    """

    tier: TierName
    key: int
    parent: int | None
    tokens: bytes


class KvBatch(msgspec.Struct, frozen=True, tag=True):
    """What came and went, in order. `time_s` since the epoch."""

    namespace: str
    sequence: int
    time_s: float
    events: tuple[KvEvent, ...]


class KvSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Part `index` of `count` of the answer to a KvWatch: all that a namespace has after batch `sequence`.

    The batches that follow may come between the parts, and none before the first. `copies` counts the events of all
    parts.
    """

    query_id: int
    sequence: int
    time_s: float
    index: int
    count: int
    copies: int
    events: tuple[KvEvent, ...]


KvToEngine = KvWatch | KvUnwatch
KvToFront = KvBatch | KvSnapshot
