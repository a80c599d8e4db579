"""A record store in memory, for tests of everything above it: it checks what it is given, and fails when told to."""

from collections.abc import Callable, Iterator, Sequence

from tiers.health import StoreHealth, StoreState
from tiers.index import Pin, Quota, TimeToLive
from tiers.records import RecordHead, RecordKind, RecordRef, StoredRecord


class MemoryStore:
    """What a disk would hold. `fails` is asked before each read and write; what it raises is what happens."""

    quota_bytes = 1 << 40
    num_quarantined = 0
    health = StoreHealth(StoreState.OK, "", 0.0)

    def __init__(self) -> None:
        self.records: dict[int, tuple[RecordHead, RecordRef, bytes]] = {}
        self.pinned: dict[tuple[str, bytes], Pin] = {}
        self.expiring: dict[tuple[str, bytes], TimeToLive] = {}
        self.limits: dict[str, Quota] = {}
        self.takes_writes = True
        self.fails: Callable[[str, RecordHead], Exception | None] = lambda what, head: None
        self.num_reads = 0
        self._generation = 0

    @property
    def usage_bytes(self) -> int:
        return sum(ref.stored_bytes for _, ref, _ in self.records.values())

    @property
    def num_records(self) -> int:
        return len(self.records)

    def reserve_bytes(self, num_records: int) -> int:
        return 64 * num_records

    def touch(self, refs: Sequence[RecordRef], last_use: int) -> None:
        assert all(ref.generation in self.records for ref in refs)

    def entries(self) -> Iterator[StoredRecord]:
        by_depth = sorted(self.records.values(), key=lambda record: (record[0].depth, record[0].kind))
        for head, ref, _ in by_depth:
            yield StoredRecord(head, ref, ref.generation)

    def write(self, records: Sequence[tuple[RecordHead, memoryview]], *, last_use: int = 0) -> list[RecordRef]:
        for head, _ in records:
            error = self.fails("write", head)
            if error is not None:
                raise error
        refs: list[RecordRef] = []
        for head, image in records:
            assert head.depth >= 1
            assert head.kind is RecordKind.CHECKPOINT or head.tokens
            replaced = [
                g for g, (known, _, _) in self.records.items() if (known.key, known.kind) == (head.key, head.kind)
            ]
            for generation in replaced:
                del self.records[generation]
            self._generation += 1
            ref = RecordRef(0, self._generation * 4096, len(image), self._generation)
            self.records[ref.generation] = (head, ref, bytes(image))
            refs.append(ref)
        return refs

    def read(self, requests: Sequence[tuple[RecordHead, RecordRef, memoryview]]) -> list[Exception | None]:
        return [self._read(*request) for request in requests]

    def delete(self, refs: Sequence[RecordRef]) -> None:
        for ref in refs:
            self.records.pop(ref.generation, None)  # what is not there any more is no failure

    def other_profile_keys(self) -> frozenset[bytes]:
        return frozenset()

    unreadable_bytes = 0

    def reclaim_unreadable(self, num_bytes: int) -> list[RecordRef]:
        raise AssertionError("there are none")

    def pins(self) -> list[Pin]:
        return list(self.pinned.values())

    def set_pin(self, pin: Pin) -> None:
        self.pinned[(pin.namespace, pin.key)] = pin
        self.expiring.pop((pin.namespace, pin.key), None)

    def remove_pin(self, namespace: str, key: bytes) -> bool:
        return self.pinned.pop((namespace, key), None) is not None

    def times_to_live(self) -> list[TimeToLive]:
        return list(self.expiring.values())

    def set_times_to_live(self, times: Sequence[TimeToLive]) -> None:
        for time in times:
            if time.expires_at is None:
                self.expiring.pop((time.namespace, time.key), None)
            else:
                self.expiring[(time.namespace, time.key)] = time

    def quotas(self) -> list[Quota]:
        return list(self.limits.values())

    def set_quota(self, quota: Quota) -> None:
        self.limits[quota.namespace] = quota

    def remove_quota(self, namespace: str) -> bool:
        return self.limits.pop(namespace, None) is not None

    def close(self) -> None:
        self.takes_writes = False

    def _read(self, head: RecordHead, ref: RecordRef, target: memoryview) -> Exception | None:
        self.num_reads += 1
        error = self.fails("read", head)
        if error is not None:
            return error
        if ref.generation not in self.records:
            return OSError("gone")
        known, _, image = self.records[ref.generation]
        assert known == head, "a reference of another record"
        target[:] = image
        return None
