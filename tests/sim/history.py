"""Random work on a store, and what must, may and must not be there after it was interrupted at any point."""

import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tests.tiers.stores import Item, chain, check_contents, du, open_store, read_back
from tiers.errors import StoreFull
from tiers.files import OsFiles
from tiers.index import Pin, TimeToLive
from tiers.records import RecordKind, RecordRef
from tiers.store import DiskStore, StoreLimits

PATH_BLOCKS = 12
QUOTA_BYTES = 4 << 20
LIMITS = StoreLimits(write_deadline_s=20, read_stall_s=10, num_read_threads=2, segment_bytes=128 << 10)
OPEN_CPU_S = 1.0  # of work: a store that needs more to open is not open in bounded time (the clock depends on others)

Id = tuple[int, int]  # seed of a chain, number in it
Tell = Callable[[str, list[Id]], None]


@dataclass(slots=True)
class History:
    """What was announced and what was done. An id is in one of these sets at most."""

    there: set[Id] = field(default_factory=set[Id])
    unsure: set[Id] = field(default_factory=set[Id])  # being written or deleted when the story ended
    gone: set[Id] = field(default_factory=set[Id])

    def tell(self, event: str, ids: list[Id]) -> None:
        """Writing and deleting are announced, done when they returned."""
        new = {"writing": self.unsure, "wrote": self.there, "deleting": self.unsure, "deleted": self.gone}[event]
        for old in (self.there, self.unsure, self.gone):
            old.difference_update(ids)
        new.update(ids)

    def tell_line(self, line: str) -> None:
        """An event as `line_of` wrote it."""
        event, ids = json.loads(line)
        self.tell(event, [(seed, number) for seed, number in ids])


def line_of(event: str, ids: list[Id]) -> str:
    """An event as one line."""
    return json.dumps([event, ids]) + "\n"


def items_of(ids: Iterable[Id]) -> list[Item]:
    """What belongs to them."""
    return [_path(seed)[number] for seed, number in ids]


def work(store: DiskStore, history: History, tell: Tell, rng: random.Random, num_turns: int) -> None:
    """Writes, deletes, replaces, reads and touches at random; goes on from where the history is."""
    listed = {(entry.head.kind, entry.head.key): entry.ref for entry in store.entries()}
    refs: dict[Id, RecordRef] = {}
    known = sorted(history.there | history.unsure)
    for id_, item in zip(known, items_of(known), strict=True):
        ref = listed.get((item.head.kind, item.head.key))
        if ref is not None:
            refs[id_] = ref

    def write(ids: list[Id]) -> None:
        tell("writing", ids)
        while True:
            try:
                written = store.write([item.pair for item in items_of(ids)], last_use=rng.randrange(100))
                break
            except StoreFull:
                delete(rng.sample(sorted(refs.keys() - set(ids)), min(20, len(refs.keys() - set(ids)))))
        refs.update(zip(ids, written, strict=True))
        tell("wrote", ids)

    def delete(ids: list[Id]) -> None:
        tell("deleting", ids)
        store.delete([refs.pop(id_) for id_ in ids])
        tell("deleted", ids)

    def write_path(num_items: int) -> None:
        seed = 1 + max((seed for seed, _ in history.there | history.unsure | history.gone), default=0)
        write([(seed, number) for number in range(num_items)])

    def delete_oldest_segment() -> None:
        segment = min(ref.segment for ref in refs.values())
        delete([id_ for id_, ref in sorted(refs.items()) if ref.segment == segment])

    for _ in range(num_turns):
        turn = rng.random()
        some = rng.sample(sorted(refs), min(len(refs), rng.randrange(1, 12)))
        if turn < 0.5 or not refs:
            write_path(rng.randrange(1, PATH_BLOCKS))
        elif turn < 0.7:
            delete(some)
        elif turn < 0.77:
            delete_oldest_segment()
        elif turn < 0.8:
            write(some)
        elif turn < 0.9:
            items = items_of(some)
            assert not any(
                isinstance(answer, Exception)
                for answer in read_back(store, [item.head for item in items], [refs[id_] for id_ in some])
            )
        elif turn < 0.95:
            store.touch([refs[id_] for id_ in some], rng.randrange(100))
        else:
            key = items_of(some)[0].head.key
            store.set_pin(Pin("tests", key, rng.randrange(100)))
            store.set_times_to_live([TimeToLive("tests", key, 100)])
    write_path(PATH_BLOCKS)  # each kind of step at least once, whatever the seed
    write_path(PATH_BLOCKS)
    delete_oldest_segment()
    delete(rng.sample(sorted(refs), 2))


def check_survivor(directory: Path, history: History, files: OsFiles | None = None) -> float:
    """Opens what was left and compares it with the history, to the byte; then settles what the history is unsure of.

    Returns the seconds that opening took by the clock.
    """
    began, worked = time.monotonic(), time.process_time()
    store = open_store(directory, quota_bytes=QUOTA_BYTES, files=files, limits=LIMITS)
    open_s = time.monotonic() - began
    assert time.process_time() - worked < OPEN_CPU_S
    try:
        check_contents(store, items_of(sorted(history.there)))
        there = {(entry.head.kind, entry.head.key) for entry in store.entries()}
        assert {time.key for time in store.times_to_live()} <= {key for _, key in there}
        known = sorted(history.there | history.unsure | history.gone)
        ids = {(item.head.kind, item.head.key): id_ for id_, item in zip(known, items_of(known), strict=True)}
        assert there <= set(ids), "a record that nobody wrote"
        back = {ids[entry] for entry in there} & history.gone
        assert not back, f"deleted records came back: {sorted(back)}"
        unsure = sorted(history.unsure)
        history.there |= {id_ for id_ in unsure if _name(id_) in there}
        history.gone |= {id_ for id_ in unsure if _name(id_) not in there}
        history.unsure.clear()
        store.check()
        assert store.usage_bytes == du(directory) <= QUOTA_BYTES
    finally:
        store.close()
    return open_s


@lru_cache(maxsize=256)
def _path(seed: int) -> tuple[Item, ...]:
    return tuple(chain(PATH_BLOCKS, seed=seed))


def _name(id_: Id) -> tuple[RecordKind, bytes]:
    (item,) = items_of([id_])
    return item.head.kind, item.head.key
