"""Reading every record of the disk tier to see whether it still checks, a few at a time among the other writes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.cache_messages import MAX_DAMAGE_ROWS, CacheAnswer, Damage, Refused, VerifyDone, VerifyProgress
from daemon.errors import ErrorReason
from tiers.cache import TieredCache
from tiers.disk import DiskTier, Place
from tiers.mover import Job, Priority
from tiers.records import is_refusal

RECORDS_A_JOB = 16


@dataclass(slots=True)
class Scrub:
    """One that runs. `places` are the records there were when it began; what went since is passed over."""

    query_id: int
    places: list[Place]
    began: float
    done_records: int = 0
    done_bytes: int = 0
    num_damaged: int = 0
    damage: list[Damage] = field(default_factory=list[Damage])

    @property
    def total_bytes(self) -> int:
        return sum(place.ref.stored_bytes for place in self.places)


class Scrubs:
    """Owns the scrubs in flight; each has at most one job."""

    def __init__(self, cache: TieredCache, send: Callable[[CacheAnswer], None]) -> None:
        self.cache = cache
        self.send = send
        self._running: dict[int, Scrub] = {}

    def start(self, query_id: int, disk: DiskTier) -> None:
        """Answers with progress after each job, and with a report at the end."""
        self._running[query_id] = scrub = Scrub(query_id, disk.places(), time.monotonic())
        self._go_on(scrub, disk)

    def cancel(self, query_id: int) -> None:
        """Nobody waits for it any more; the job under way is its last."""
        self._running.pop(query_id, None)

    def close(self) -> None:
        """The engine leaves: no job follows the ones under way."""
        self._running.clear()

    def _go_on(self, scrub: Scrub, disk: DiskTier) -> None:
        part = scrub.places[scrub.done_records : scrub.done_records + RECORDS_A_JOB]
        flaws: list[Exception | None] = []

        def work() -> None:
            flaws.extend(disk.examine(part))

        def done(error: Exception | None) -> None:
            if scrub.query_id not in self._running:
                return
            error = error or next((flaw for flaw in flaws if is_refusal(flaw)), None)
            if error is not None:
                self.cancel(scrub.query_id)
                self.send(Refused(scrub.query_id, ErrorReason.TIER_UNAVAILABLE, str(error)))
                return
            for place, flaw in zip(part, flaws, strict=True):
                if flaw is not None and self.cache.restorer.set_aside(place.node, place.ref, flaw):
                    scrub.num_damaged += 1
                    if len(scrub.damage) < MAX_DAMAGE_ROWS:
                        scrub.damage.append(_damage(place, str(flaw)))
            scrub.done_records += len(part)
            scrub.done_bytes += sum(place.ref.stored_bytes for place in part)
            total = len(scrub.places)
            self.send(VerifyProgress(scrub.query_id, scrub.done_records, total, scrub.done_bytes, scrub.total_bytes))
            if scrub.done_records < total:
                self._go_on(scrub, disk)
            else:
                self.cancel(scrub.query_id)
                self.send(_report(scrub))

        self.cache.mover.submit(Job(Priority.CLEAN_UP, work, done))


def _damage(place: Place, what: str) -> Damage:
    name = f"segment {place.ref.segment}, offset {place.ref.offset}"
    return Damage(name, place.node.key.hex(), what, place.ref.stored_bytes)


def _report(scrub: Scrub) -> VerifyDone:
    return VerifyDone(
        query_id=scrub.query_id,
        records=scrub.done_records,
        bytes=scrub.done_bytes,
        seconds=time.monotonic() - scrub.began,
        damaged=scrub.num_damaged,
        damage=tuple(scrub.damage),
    )
