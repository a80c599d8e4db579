"""Questions answered right after a prefix came from host, from disk, and from disk after a restart; and, so that this
says something, answered wrongly where a block or a checkpoint in such a tier is another prompt's.

What is foreign is planted past every check: in the host tier by copying one image over another, on disk by writing the
other's image again as a record of its own, with a good checksum, under the victim's key.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.config import EngineConfig
from ops.models.shipped import TINY_HYBRID
from tests.exact.probe import Probe, Snapshot
from tests.semantic.needles import ANSWER_TOKENS, Question
from tests.semantic.test_corruption import (
    BLOCK,
    GRID,
    MOST_RIGHT,
    NUM_CASES,
    _encode,
    _note_blocks,
    _questions,
    _resume_len,
    _text,
)
from tiers.device_transfer import DeviceTransfer
from tiers.records import Identity, RecordKind
from tiers.store import DiskStore
from tiers.tree import Node


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and what its prefix depends on: the note's two blocks, or the state that it resumes from."""

    question: Question
    ids: list[int]
    needed: tuple[int, ...]  # blocks by index; empty: the state


class Tiers:
    """Engines one after another over one disk directory; the first one has a host tier too."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.probe = self._open(host_bytes=96 << 20)

    def restart(self) -> None:
        self.close()
        self.probe = self._open()

    def close(self) -> None:
        self.probe.engine.close()

    def ask(self, asked: Asked) -> Snapshot:
        """From an empty device."""
        self.probe.forget()
        return self.probe.run(asked.ids, ANSWER_TOKENS)

    def nodes(self, asked: Asked) -> list[Node]:
        """Whose images decide the answer."""
        path = self.probe.engine.device.walk(asked.ids, "")[: _resume_len(asked.ids) // BLOCK]
        return [path[index] for index in asked.needed] or [path[-1]]

    def plant_in_host(self, pairs: list[tuple[Asked, Asked]]) -> None:
        """The victims' images in the arena become copies of the others'."""
        transfer = self.probe.engine.cache.restorer.transfer
        assert isinstance(transfer, DeviceTransfer)
        arena = transfer.arena
        assert arena is not None
        before = arena.chunks.clone()
        for victim, other in pairs:
            for to_node, from_node in zip(self.nodes(victim), self.nodes(other), strict=True):
                to, source = (n.host_block if victim.needed else n.host_state for n in (to_node, from_node))
                assert to is not None
                assert source is not None
                for to_chunk, chunk in zip(to.chunks, source.chunks, strict=True):
                    arena.chunks[to_chunk] = before[chunk]
                assert any(not before[chunk].equal(arena.chunks[chunk]) for chunk in to.chunks)

    def plant_on_disk(self, pairs: list[tuple[Asked, Asked]]) -> None:
        """Everything is written once more, the victims' records with the others' images; then a restart."""
        device, profile = self.probe.engine.device, bytes.fromhex(self.probe.info.numerics_profile)
        identity = Identity(device.fingerprint, profile, device.layout)
        foreign: dict[tuple[RecordKind, bytes], bytes] = {}  # by whose record it becomes: whose image
        for victim, other in pairs:
            kind = RecordKind.BLOCK if victim.needed else RecordKind.CHECKPOINT
            for to_node, from_node in zip(self.nodes(victim), self.nodes(other), strict=True):
                foreign[(kind, to_node.key)] = from_node.key
        self.close()
        store = DiskStore.open(self.disk, identity, quota_bytes=1 << 30)
        heads = [entry.head for entry in store.entries()]
        images = {(head.kind, head.key): memoryview(bytearray(identity.image_bytes(head.kind))) for head in heads}
        requests = [(entry.head, entry.ref, images[(entry.head.kind, entry.head.key)]) for entry in store.entries()]
        assert store.read(requests) == [None] * len(requests)
        store.write([(head, images[(head.kind, foreign.get((head.kind, head.key), head.key))]) for head in heads])
        store.close()
        self.probe = self._open()

    def _open(self, **more: object) -> Probe:
        settings: dict[str, object] = {
            "dtype": "bfloat16",
            "threads": 1,
            "block_size": BLOCK,
            "grid": GRID,
            "pool_bytes": 64 << 20,
            "max_sequences": 4,
            "break_even": False,
            "restore_timeout_s": 60.0,
            "disk_path": str(self.disk),
            **more,
        }
        return Probe(EngineConfig(str(TINY_HYBRID), **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["needle", "status"])
def test_answers_after_every_tier_are_right_and_foreign_bytes_make_them_wrong(kind: str, tmp_path: Path) -> None:
    asked: list[Asked] = []
    for question in _questions(kind):
        needed = _note_blocks(question) if kind == "needle" else ()
        asked.append(Asked(question, _encode(question).ids, needed))
    pairs = [(each, other_than(each, asked)) for each in asked]
    tiers = Tiers(tmp_path / "tier")
    colds = [tiers.ask(each) for each in asked]
    assert all(cold.cached_len == 0 for cold in colds)
    assert num_right(asked, colds) == NUM_CASES

    from_host = [tiers.ask(each) for each in asked]
    assert [hit.from_host for hit in from_host] == [_resume_len(each.ids) for each in asked]
    assert num_right(asked, from_host) == NUM_CASES
    tiers.plant_in_host(pairs)
    foreign = [tiers.ask(each) for each in asked]
    assert [hit.from_host for hit in foreign] == [_resume_len(each.ids) for each in asked], "it was not read"
    assert num_right(asked, foreign) <= MOST_RIGHT

    tiers.restart()
    for _ in ("after the restart", "again from disk"):
        from_disk = [tiers.ask(each) for each in asked]
        assert [hit.from_disk for hit in from_disk] == [_resume_len(each.ids) for each in asked]
        assert num_right(asked, from_disk) == NUM_CASES
    tiers.plant_on_disk(pairs)
    foreign = [tiers.ask(each) for each in asked]
    assert [hit.from_disk for hit in foreign] == [_resume_len(each.ids) for each in asked]
    assert num_right(asked, foreign) <= MOST_RIGHT
    tiers.close()


def other_than(victim: Asked, asked: list[Asked]) -> Asked:
    """One with another answer."""
    return next(other for other in asked if other.question.expected != victim.question.expected)


def num_right(asked: list[Asked], got: list[Snapshot]) -> int:
    return sum(_text(hit.answer) == each.question.expected for each, hit in zip(asked, got, strict=True))
