"""The tables an operator can ask for, read from the engine's own books: there is no second spelling of a figure."""

import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import torch

from daemon.engine.meter_report import Metered, report
from daemon.engine.runner import Runner
from daemon.engine.scheduler import Scheduler
from daemon.engine.sequence import Sequence
from daemon.messages import Answer, LedgerRow, Query, QueryKind, SequenceRow, StreamRow, TierRow, TierState
from daemon.models.base import Model
from tiers.cache import TieredCache
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.ledger import device_ledger, disk_ledger, host_ledger, spill_ledger
from tiers.pools import DevicePools
from tiers.residency import Tier
from tiers.resources import Resources


class Books(Metered, Protocol):
    """What the tables are read from."""

    model: Model
    pools: DevicePools
    device: DeviceTier
    cache: TieredCache
    scheduler: Scheduler
    runner: Runner

    def clock(self) -> float: ...

    def check(self) -> None: ...

    def owners(self) -> list[Resources]: ...

    def astray(self) -> list[str]: ...


def answer(books: Books, query: Query) -> Answer:
    """The table a query asks for."""
    match query.kind:
        case QueryKind.TIERS:
            return Answer(query.query_id, tiers=tuple(_tier_rows(books)))
        case QueryKind.METERS:
            return Answer(query.query_id, tiers=tuple(_tier_rows(books)), meters=report(books))
        case QueryKind.SEQUENCES:
            rows = [_sequence_row(books, sequence) for sequence in books.scheduler.sequences()]
            wanted = [row for row in rows if query.id in ("", row.request_id, f"{row.request_id}/{row.index}")]
            return Answer(query.query_id, sequences=tuple(wanted))
        case QueryKind.LEDGER:
            return _ledger(books, query)


def _tier_rows(books: Books) -> Iterator[TierRow]:
    yield _device_row(books)
    if books.cache.host is not None:
        yield _host_row(books, books.cache.host)
    if books.cache.disk is not None:
        yield _disk_row(books, books.cache.disk)


def _host_row(books: Books, host: HostTier) -> TierRow:
    size, cached = host.chunk_bytes, host.num_cached_chunks
    return TierRow(
        name="host",
        medium="pinned memory" if books.pools.blocks.is_cuda else "memory",
        capacity_bytes=host.chunks.size * size,
        held_bytes=(host.chunks.num_held - cached) * size,
        cached_bytes=cached * size,
        free_bytes=host.chunks.num_free * size,
        pinned_bytes=host.num_pinned_chunks * size,
        hit_tokens=host.stats.hit_tokens,
        miss_tokens=0,
        evicted_blocks=host.stats.evicted_copies,
        blocks=host.chunks.size,
        free_blocks=host.chunks.num_free,
        cached_blocks=cached,
        slots=0,
        free_slots=0,
        used_bytes=host.chunks.size * size,
        dirty_bytes=books.cache.writedown.dirty_bytes if books.cache.disk is None else 0,
        reads=host.stats.reads,
        read_bytes=host.stats.read_bytes,
        read_s=host.stats.read_s,
        writes=host.stats.writes,
        written_bytes=host.stats.written_bytes,
        write_s=host.stats.write_s,
        gate_refusals=books.cache.host_refusals,
        is_unified=not books.pools.blocks.is_cuda,
    )


def _disk_row(books: Books, disk: DiskTier) -> TierRow:
    store, stats, health = disk.store, disk.stats, disk.store.health
    cached = disk.cached_bytes
    held = max(0, store.usage_bytes - cached)  # index, log, records of others, and what is being written or deleted
    return TierRow(
        name="disk",
        medium="files",
        capacity_bytes=store.quota_bytes,
        held_bytes=held,
        cached_bytes=cached,
        free_bytes=store.quota_bytes - held - cached,
        pinned_bytes=disk.pinned_bytes,
        hit_tokens=stats.hit_tokens,
        miss_tokens=0,
        evicted_blocks=stats.evicted_records,
        blocks=disk.num_records,
        free_blocks=0,
        cached_blocks=disk.num_records,
        slots=0,
        free_slots=0,
        dirty_bytes=books.cache.writedown.dirty_bytes,
        used_bytes=store.usage_bytes,
        quota_bytes=store.quota_bytes,
        reads=stats.reads,
        read_bytes=stats.read_bytes,
        read_s=stats.read_s,
        writes=stats.writes,
        written_bytes=stats.written_bytes,
        write_s=stats.write_s,
        dropped_writes=stats.dropped_writes,
        verify_failures=stats.verify_failures,
        quarantined=store.num_quarantined,
        gate_refusals=books.cache.disk_refusals,
        state=TierState(health.state.value),
        state_reason=health.reason,
    )


def _device_row(books: Books) -> TierRow:
    device = books.device
    block_bytes, slot_bytes = device.layout.block_bytes, device.layout.slot_bytes
    capacity = device.blocks.size * block_bytes + device.slots.size * slot_bytes
    cached = device.tree.num_cached * block_bytes + device.tree.num_checkpoints * slot_bytes
    free = device.blocks.num_free * block_bytes + device.slots.num_free * slot_bytes
    return TierRow(
        name="device",
        medium=str(books.pools.blocks.device),
        capacity_bytes=capacity,
        held_bytes=capacity - cached - free,
        cached_bytes=cached,
        free_bytes=free,
        pinned_bytes=0,
        hit_tokens=device.stats.hit_tokens,
        miss_tokens=device.stats.miss_tokens,
        evicted_blocks=device.stats.evicted_blocks,
        blocks=device.blocks.size,
        free_blocks=device.blocks.num_free,
        cached_blocks=device.tree.num_cached,
        slots=device.slots.size,
        free_slots=device.slots.num_free,
    )


def _sequence_row(books: Books, sequence: Sequence) -> SequenceRow:
    layout, request = books.device.layout, sequence.request
    num_blocks, num_slots = sequence.resources.count("block"), sequence.resources.count("slot")
    return SequenceRow(
        request_id=request.id,
        index=sequence.index,
        state=sequence.state.value,
        prompt_tokens=request.prompt_len,
        completion_tokens=sequence.num_generated,
        computed_tokens=sequence.computed_len,
        cached_tokens=request.cached_len,
        blocks=num_blocks,
        shared_blocks=len(sequence.nodes),
        held_bytes=num_blocks * layout.block_bytes + num_slots * layout.slot_bytes,
        age_s=books.clock() - request.arrived,
        preemptions=request.preemptions,
        max_tokens=request.max_len - request.prompt_len,
        namespace=request.submit.namespace,
        stream=_stream_row(books, sequence),
    )


def _stream_row(books: Books, sequence: Sequence) -> StreamRow | None:
    stream, residency, streaming = sequence.stream, books.cache.residency, books.scheduler.streaming
    if stream is None or residency is None or streaming is None:
        return None
    blocks = Counter(residency.space.tier_of(block) for block in sequence.block_table)
    return StreamRow(
        device_blocks=blocks[Tier.DEVICE],
        host_blocks=blocks[Tier.HOST],
        disk_blocks=blocks[Tier.SPILL],
        streamed_bytes=stream.last_row.num_bytes,
        bytes_per_s=stream.last_row.bytes_per_s,
        link_bytes_per_s=streaming.link_bytes_per_s,
    )


def words_of(error: AssertionError) -> str:
    """What a check has found: its own words, or where it has none the line that it is."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return str(error) or f"{place.name}: {place.line}"


def _ledger(books: Books, query: Query) -> Answer:
    owners = books.owners()
    findings = books.astray()
    try:
        books.check()
    except AssertionError as error:
        findings.append(words_of(error))
    weights = LedgerRow("device", "weights", "model", books.model.facts.weight_bytes, 1)
    rows = [LedgerRow("device", e.kind, e.owner, e.num_bytes, e.count) for e in device_ledger(books.device, owners)]
    if books.cache.host is not None:
        entries = host_ledger(books.cache.host, owners)
        rows += [LedgerRow("host", e.kind, e.owner, e.num_bytes, e.count) for e in entries]
    if books.cache.disk is not None:
        entries = disk_ledger(books.cache.disk)
        rows += [LedgerRow("disk", e.kind, e.owner, e.num_bytes, e.count) for e in entries]
    if books.cache.residency is not None and books.cache.residency.spill is not None:
        entries = spill_ledger(books.cache.residency.spill, owners)
        rows += [LedgerRow("disk", e.kind, e.owner, e.num_bytes, e.count) for e in entries]
    if books.runner.sources is not None and books.runner.sources.spill is not None:
        rows.append(LedgerRow("device", "scratch", "picked blocks", books.runner.sources.spill.cache_bytes, 1))
        rows.append(LedgerRow("device", "scratch", "index keys", books.runner.sources.spill.spill.kept_bytes, 1))
    if books.pools.blocks.is_cuda:
        # Graphs, plans, a library's workspaces: with them the device's rows sum to the allocator's own figure.
        known_bytes = weights.bytes + books.pools.num_bytes
        scratch_bytes = torch.cuda.memory_allocated(books.pools.blocks.device) - known_bytes
        rows.append(LedgerRow("device", "scratch", "engine", scratch_bytes, 1))
    return Answer(
        query.query_id, ledger=(weights, *rows), balanced=not findings, findings=tuple(dict.fromkeys(findings))
    )
