"""One memory, counted once: with the CPU as device, what the system has given is what the books say.

A process of its own serves until every tier is full, then more, then a storm of cancels (tests/engine/soak.py). What
resident memory can not show (a block that is taken and never returned lies in a pool that was touched at start-up)
the idle proof names.
"""

from collections.abc import Callable

import pytest

from daemon.messages import Answer, Query, QueryKind
from tests.campaigns.budget import first_seed
from tests.engine.harness import GRID, Harness
from tests.engine.memory_store import MemoryStore
from tests.engine.soak import Job, Sample, run_job
from tests.engine.test_tiers import prompt_of, serve
from tiers.keys import Provenance
from tiers.records import RecordHead, RecordKind

TOLERANCE = 0.01
# What the engine may take beside imports, weights, pools, arena and the store's buffers: tree and books of what the
# tiers hold here (about 13,000 nodes), the remembered past, the index's own cache, torch's workspaces, thread stacks.
FIXED_BYTES = 64 << 20
LOG_BYTES = 1 << 20  # the index's write-ahead log is sometimes longer, sometimes shorter
LEAK_BYTES = 1 << 20  # a request


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    job = Job(
        folder=str(tmp_path_factory.mktemp("soak")),
        pool_bytes=16 << 20,
        host_bytes=16 << 20,
        disk_bytes=64 << 20,
        num_warmup=2400,  # the tiers are full after half of it; tree and remembered past grow until here
        num_requests=400,
        num_cancels=300,
        num_samples=2,
        is_traced=False,
        seed=first_seed(),
    )
    return run_job(job)


def assert_within_books(samples: list[Sample]) -> None:
    """Resident memory and page cache stay at weights + ledger + the fixed overhead that was there after the warm-up."""
    first = samples[0]
    overhead = first.charged_bytes - first.declared_bytes
    assert overhead <= first.imports_bytes + first.buffer_bytes + FIXED_BYTES
    for sample in samples:
        assert sample.declared_bytes == first.declared_bytes, "the books grow"
        expected = sample.declared_bytes + overhead
        assert abs(sample.charged_bytes - expected) <= TOLERANCE * expected, (sample.charged_bytes, expected)
        assert sample.findings == ()


def assert_flat(samples: list[Sample]) -> None:
    """Files, handles, threads and index stay as they are while records come and go."""
    first = samples[0]
    for sample in samples:
        assert (sample.num_handles, sample.num_threads) == (first.num_handles, first.num_threads)
        assert sample.num_files <= first.num_files + 2
        assert sample.index_bytes <= first.index_bytes + LOG_BYTES
        assert sample.num_bare_nodes == 0, "the tree remembers what no tier has"


def assert_all_tiers_worked(samples: list[Sample]) -> None:
    """Hits from every tier, and evictions from every tier, while it was looked at."""
    first, last = samples[0], samples[-1]
    assert all(after > before for before, after in zip(first.hit_tokens, last.hit_tokens, strict=True))
    assert all(after > before for before, after in zip(first.evicted, last.evicted, strict=True))


def test_memory_stays_what_the_books_say_over_a_soak_and_a_storm_of_cancels(samples: list[Sample]) -> None:
    assert samples[-1].cancelled >= 300
    assert_all_tiers_worked(samples)
    assert_within_books(samples)


def test_files_handles_threads_and_index_stay_flat(samples: list[Sample]) -> None:
    assert_flat(samples)


def leak_block(harness: Harness) -> None:
    harness.device.blocks.take(-(-LEAK_BYTES // harness.device.layout.block_bytes))


def leak_slot(harness: Harness) -> None:
    harness.device.slots.take(1)


def leak_host_chunk(harness: Harness) -> None:
    assert harness.engine.cache.host is not None
    harness.engine.cache.host.chunks.take(1)


def leak_dirty_bytes(harness: Harness) -> None:
    harness.engine.cache.writedown.dirty_bytes += LEAK_BYTES


def leak_record(harness: Harness) -> None:
    disk = harness.engine.cache.disk
    assert disk is not None
    head = RecordHead(RecordKind.CHECKPOINT, Provenance.EXACT, "", b"p" * 32, b"k" * 32, 1, b"")
    disk.store.write([(head, memoryview(bytes(harness.device.layout.slot_bytes)))])


def leak_pin(harness: Harness) -> None:
    harness.device.tree.pin(next(harness.device.tree.nodes()))


LEAKS: dict[str, Callable[[Harness], None]] = {
    "block": leak_block,
    "slot": leak_slot,
    "host chunk": leak_host_chunk,
    "dirty bytes": leak_dirty_bytes,
    "record": leak_record,
    "pin": leak_pin,
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_planted_leak_that_resident_memory_does_not_show_is_named_by_the_idle_proof(kind: str) -> None:
    block_bytes = Harness().device.layout.block_bytes
    harness = Harness(num_blocks=3 * LEAK_BYTES // block_bytes, num_chunks=40, store=MemoryStore())
    serve(harness, "first", prompt_of(2 * GRID + 1))
    harness.assert_idle_books()
    assert findings_of(harness) == ()
    for number in range(2):
        LEAKS[kind](harness)
        findings = findings_of(harness)
        assert any(kind in finding for finding in findings), f"leak {number + 1} is not named: {findings}"
        with pytest.raises(AssertionError, match=kind):
            harness.engine.check()


def findings_of(harness: Harness) -> tuple[str, ...]:
    harness.engine.handle(Query(1, QueryKind.LEDGER))
    answer = harness.other.pop()
    assert isinstance(answer, Answer)
    assert answer.balanced is not bool(answer.findings)
    return answer.findings
