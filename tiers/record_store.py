"""What the disk tier's books need of the store that holds the records."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from tiers.health import StoreHealth
from tiers.index import Pin, Quota, TimeToLive
from tiers.records import RecordHead, RecordRef, StoredRecord


class RecordStore(Protocol):
    """What holds the records; tiers/store.py keeps them on disk. Called on I/O threads, but for the properties."""

    @property
    def takes_writes(self) -> bool:
        """It is in order: not degraded, not read-only."""
        ...

    @property
    def usage_bytes(self) -> int:
        """What du says of it."""
        ...

    def entries(self) -> Iterator[StoredRecord]:
        """Every committed record that this engine may read, parents before children."""
        ...

    @property
    def num_records(self) -> int:
        """Committed records, those of other models too."""
        ...

    @property
    def num_quarantined(self) -> int:
        """Records that are not touched any more, and not deleted yet."""
        ...

    @property
    def quota_bytes(self) -> int:
        """What `usage_bytes` never exceeds."""
        ...

    @property
    def health(self) -> StoreHealth:
        """For people."""
        ...

    def reserve_bytes(self, num_records: int) -> int:
        """What a write of so many records needs of the quota beside their own bytes."""
        ...

    def touch(self, refs: Sequence[RecordRef], last_use: int) -> None:
        """Records were used, at a second of the epoch. Cheap: it is kept with the next change."""
        ...

    def write(self, records: Sequence[tuple[RecordHead, memoryview]], *, last_use: int = 0) -> list[RecordRef]:
        """Makes images durable, all of them or none."""
        ...

    def read(self, requests: Sequence[tuple[RecordHead, RecordRef, memoryview]]) -> Sequence[Exception | None]:
        """Reads, checks and decodes records into buffers of their images' sizes; of each, why not."""
        ...

    def delete(self, refs: Sequence[RecordRef]) -> None:
        """Forgets records durably; their room comes back once nobody reads them."""
        ...

    def other_profile_keys(self) -> frozenset[bytes]:
        """Keys of blocks that only another numerics profile has."""
        ...

    @property
    def unreadable_bytes(self) -> int:
        """Bytes of the records that this engine cannot use. Asked at the start."""
        ...

    def reclaim_unreadable(self, num_bytes: int) -> list[RecordRef]:
        """Deletes such records, oldest use first, until so many bytes are gone; which."""
        ...

    def pins(self) -> list[Pin]:
        """Every pin that was set."""
        ...

    def set_pin(self, pin: Pin) -> None:
        """Adds a pin, or changes when it ends; a time to live of the prefix is gone. Durable on return."""
        ...

    def remove_pin(self, namespace: str, key: bytes) -> bool:
        """Whether there was one."""
        ...

    def times_to_live(self) -> list[TimeToLive]:
        """Of every prefix that has one, those of other models too."""
        ...

    def set_times_to_live(self, times: Sequence[TimeToLive]) -> None:
        """Adds, changes or removes them, all or none. Durable on return."""
        ...

    def quotas(self) -> list[Quota]:
        """Those of namespaces."""
        ...

    def set_quota(self, quota: Quota) -> None:
        """Adds or changes a namespace's quota. Durable on return."""
        ...

    def remove_quota(self, namespace: str) -> bool:
        """Whether there was one."""
        ...

    def close(self) -> None:
        """Gives the directory back."""
        ...
