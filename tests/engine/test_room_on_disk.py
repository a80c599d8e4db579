"""Records that this engine cannot use make room for its own, also where the disk could not delete them at once."""

from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import prompt_of, serve
from tiers.errors import StoreDegraded
from tiers.records import RecordRef

FOREIGN_BYTES, NUM_FOREIGN = 1 << 20, 4


class Upgraded(MemoryStore):
    """Full of what another model wrote. `is_late`: it cannot be deleted now."""

    quota_bytes = FOREIGN_BYTES * NUM_FOREIGN
    is_late = False

    def __init__(self) -> None:
        super().__init__()
        self.foreign = [RecordRef(9, i * FOREIGN_BYTES, FOREIGN_BYTES, i) for i in range(NUM_FOREIGN)]

    @property
    def unreadable_bytes(self) -> int:
        return sum(ref.stored_bytes for ref in self.foreign)

    @property
    def usage_bytes(self) -> int:
        return super().usage_bytes + self.unreadable_bytes

    @property
    def num_records(self) -> int:
        return super().num_records + len(self.foreign)

    def reclaim_unreadable(self, num_bytes: int) -> list[RecordRef]:
        if self.is_late:
            raise StoreDegraded("the index took longer than 30 s")
        return [self.foreign.pop(0) for _ in range(min(len(self.foreign), -(-num_bytes // FOREIGN_BYTES)))]


def test_what_could_not_be_reclaimed_for_one_write_is_reclaimed_for_the_next() -> None:
    store = Upgraded()
    harness = Harness(store=store)
    store.is_late = True
    serve(harness, "fails", prompt_of(2 * GRID + 1, 1))
    assert len(store.foreign) == NUM_FOREIGN
    assert not store.records
    store.is_late = False
    serve(harness, "next", prompt_of(2 * GRID + 1, 2))
    assert store.records
    assert len(store.foreign) < NUM_FOREIGN
    assert store.usage_bytes <= store.quota_bytes
    harness.engine.check()
