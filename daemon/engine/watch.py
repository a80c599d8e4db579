"""What an operator is told of the tiers unasked: one failed or recovered, lost records, or gave much up at once.

Looked at with the pulse, from counters that are there anyway; nothing is sent while nothing happens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from daemon.cache_messages import TierName
from daemon.messages import TierEvent, TierEventKind
from tiers.cache import TieredCache
from tiers.health import StoreState

BULK_FRACTION = 1 / 16  # of a tier's blocks, evicted within BULK_S, is worth a word
BULK_S = 10.0


@dataclass(slots=True)
class _Evictions:
    """Of one tier since the last time they were told or forgiven."""

    tier: TierName
    evicted: Callable[[], int]  # blocks since start-up
    size: Callable[[], int]  # blocks of the tier, or on disk those that are there
    last: int
    since_s: float


class TierWatch:
    """Compares the tiers with how they were the last time. `poll` belongs to the thread that owns the books."""

    def __init__(self, cache: TieredCache, send: Callable[[TierEvent], None], now_s: float) -> None:
        self._cache = cache
        self._send = send
        device, host, disk = cache.device, cache.host, cache.disk
        watched = [
            _Evictions(TierName.DEVICE, lambda: device.stats.evicted_blocks, lambda: device.blocks.size, 0, now_s)
        ]
        if host is not None:
            watched.append(
                _Evictions(TierName.HOST, lambda: host.stats.evicted_copies, lambda: host.chunks.size, 0, now_s)
            )
        if disk is not None:
            watched.append(
                _Evictions(TierName.DISK, lambda: disk.stats.evicted_records, lambda: disk.num_records, 0, now_s)
            )
        self._evictions = watched
        self._state = StoreState.OK
        self._num_bad = self._num_dropped = 0

    def poll(self, now_s: float) -> None:
        """Tells what is new."""
        for row in self._evictions:
            self._look_at_evictions(row, now_s)
        if self._cache.disk is not None:
            self._look_at_disk()

    def _look_at_evictions(self, row: _Evictions, now_s: float) -> None:
        evicted = row.evicted()
        count = evicted - row.last
        if count and count >= row.size() * BULK_FRACTION:
            took_s = now_s - row.since_s
            self._tell(TierEventKind.EVICTED, row.tier, f"{count} blocks evicted within {took_s:.1f} s", count)
        elif now_s - row.since_s < BULK_S:
            return
        row.last, row.since_s = evicted, now_s

    def _look_at_disk(self) -> None:
        disk = self._cache.disk
        assert disk is not None
        health = disk.store.health
        if health.state is not self._state:
            self._state = health.state
            if health.state is StoreState.OK:
                self._tell(TierEventKind.RECOVERED, TierName.DISK, "the tier serves and takes again", 0)
            else:
                self._tell(TierEventKind.DEGRADED, TierName.DISK, f"{health.state.value}: {health.reason}", 0)
        bad, self._num_bad = disk.stats.verify_failures - self._num_bad, disk.stats.verify_failures
        if bad:
            self._tell(TierEventKind.QUARANTINED, TierName.DISK, f"{bad} records did not check and were set aside", bad)
        dropped, self._num_dropped = disk.stats.dropped_writes - self._num_dropped, disk.stats.dropped_writes
        if dropped:
            self._tell(TierEventKind.DROPPED, TierName.DISK, f"{dropped} writes were given up", dropped)

    def _tell(self, kind: TierEventKind, tier: TierName, message: str, count: int) -> None:
        self._send(TierEvent(kind, tier, message, count))
