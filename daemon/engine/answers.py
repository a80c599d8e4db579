"""The tables an operator can ask for, read from the engine's own books: there is no second spelling of a figure."""

from typing import Protocol

from daemon.engine.scheduler import Scheduler
from daemon.engine.sequence import Sequence
from daemon.messages import Answer, LedgerRow, Query, QueryKind, SequenceRow, TierRow
from daemon.models.base import Model
from tiers.device import DeviceTier
from tiers.ledger import device_ledger
from tiers.pools import DevicePools


class Books(Protocol):
    """What the tables are read from."""

    model: Model
    pools: DevicePools
    device: DeviceTier
    scheduler: Scheduler

    def clock(self) -> float: ...

    def check(self) -> None: ...


def answer(books: Books, query: Query) -> Answer:
    """The table a query asks for."""
    match query.kind:
        case QueryKind.TIERS:
            return Answer(query.query_id, tiers=(_device_row(books),))
        case QueryKind.SEQUENCES:
            rows = [_sequence_row(books, sequence) for sequence in books.scheduler.sequences()]
            wanted = [row for row in rows if query.id in ("", row.request_id, f"{row.request_id}/{row.index}")]
            return Answer(query.query_id, sequences=tuple(wanted))
        case QueryKind.LEDGER:
            return _ledger(books, query)


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
        pinned_bytes=device.tree.num_pinned * block_bytes,
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
    )


def _ledger(books: Books, query: Query) -> Answer:
    owners = [sequence.resources for sequence in books.scheduler.sequences()]
    findings = books.device.astray(owners)
    try:
        books.check()
    except AssertionError as error:
        findings.append(str(error))
    weights = LedgerRow("device", "weights", "model", books.model.facts.weight_bytes, 1)
    rows = [LedgerRow("device", e.kind, e.owner, e.num_bytes, e.count) for e in device_ledger(books.device, owners)]
    return Answer(
        query.query_id, ledger=(weights, *rows), balanced=not findings, findings=tuple(dict.fromkeys(findings))
    )
