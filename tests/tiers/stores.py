"""Small records for tests of the disk tier: a layout with every kind of part, and images that follow from a number."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tiers.files import OsFiles
from tiers.keys import Provenance, block_key, root_key, token_bytes
from tiers.layout import Plane, SlotTensor, StateLayout
from tiers.records import Identity, RecordFlaw, RecordHead, RecordKind, RecordRef
from tiers.store import DiskStore, StoreLimits

BLOCK = 8
LAYOUT = StateLayout(
    planes=(
        Plane("layers.0.k", "bfloat16", (4, 32)),
        Plane("layers.0.v", "bfloat16", (4, 33)),  # not a multiple of the alignment
        Plane("layers.1.latent", "float8_e4m3fn", (96,)),
        Plane("layers.1.index", "float32", (16,), tokens_per_row=4),
    ),
    slots=(SlotTensor("layers.2.state", "float32", (24, 32)), SlotTensor("layers.2.tail", "bfloat16", (3, 50))),
    block_size=BLOCK,
)
IDENTITY = Identity(hashlib.sha256(b"model").digest(), hashlib.sha256(b"machine").digest(), LAYOUT)
QUOTA_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """Something to store."""

    head: RecordHead
    image: memoryview

    @property
    def pair(self) -> tuple[RecordHead, memoryview]:
        """As `write` takes it."""
        return self.head, self.image


def open_store(
    directory: Path,
    *,
    identity: Identity = IDENTITY,
    quota_bytes: int = QUOTA_BYTES,
    files: OsFiles | None = None,
    limits: StoreLimits | None = None,
) -> DiskStore:
    """An open store with deadlines that tests can wait for."""
    limits = limits or StoreLimits(write_deadline_s=20, read_stall_s=10, num_read_threads=2, segment_bytes=256 << 10)
    return DiskStore.open(directory, identity, quota_bytes=quota_bytes, files=files, limits=limits)


def chain(
    num_blocks: int,
    *,
    seed: int = 0,
    identity: Identity = IDENTITY,
    namespace: str = "tests",
    provenance: Provenance = Provenance.EXACT,
) -> list[Item]:
    """A path of blocks, with a checkpoint after every fourth."""
    parent = root_key(identity.fingerprint, provenance, namespace)
    items: list[Item] = []
    for number in range(num_blocks):
        tokens = token_bytes([seed * 1_000 + number] * identity.layout.block_size)
        key = block_key(parent, tokens)
        head = RecordHead(RecordKind.BLOCK, provenance, namespace, parent, key, number + 1, tokens)
        items.append(Item(head, image_of(head, identity)))
        if number % 4 == 3 and identity.layout.slots:
            head = RecordHead(RecordKind.CHECKPOINT, provenance, namespace, parent, key, number + 1, b"")
            items.append(Item(head, image_of(head, identity)))
        parent = key
    return items


@lru_cache(maxsize=4096)
def image_of(head: RecordHead, identity: Identity = IDENTITY) -> memoryview:
    """Bytes that follow from key and kind: normal values in every float part, zeros between parts."""
    rng = np.random.default_rng(int.from_bytes(head.key[:8], "little") + head.kind)
    image = np.zeros(identity.image_bytes(head.kind), np.uint8)
    for part in identity.parts(head.kind):
        values = rng.standard_normal(part.num_bytes // 2).astype(np.float32)
        top = (values.view(np.uint32) >> 16).astype(np.uint16)
        image[part.offset : part.offset + part.num_bytes] = top.view(np.uint8)[: part.num_bytes]
    return image.data.toreadonly()


def read_back(
    store: DiskStore, heads: Sequence[RecordHead], refs: Sequence[RecordRef]
) -> list[memoryview | RecordFlaw]:
    """The images, or why not. Targets begin as garbage."""
    targets = [memoryview(bytearray(b"\x5a" * store.identity.image_bytes(head.kind))) for head in heads]
    answers = store.read(list(zip(heads, refs, targets, strict=True)))
    return [target if flaw is None else flaw for flaw, target in zip(answers, targets, strict=True)]


def same_parts(left: memoryview, right: memoryview, head: RecordHead, identity: Identity = IDENTITY) -> bool:
    """Equal in every part; what lies between parts is nobody's."""
    return all(left[start:end] == right[start:end] for start, end in _bounds(identity, head.kind))


@lru_cache(maxsize=64)
def _bounds(identity: Identity, kind: RecordKind) -> tuple[tuple[int, int], ...]:
    return tuple((part.offset, part.offset + part.num_bytes) for part in identity.parts(kind))


def check_contents(store: DiskStore, wanted: Sequence[Item] = ()) -> set[bytes]:
    """Reads everything that the store lists: each is byte for byte what was written, and all `wanted` are there.

    Returns the keys of the blocks that are there.
    """
    entries = list(store.entries())
    found = read_back(store, [entry.head for entry in entries], [entry.ref for entry in entries])
    for entry, image in zip(entries, found, strict=True):
        assert isinstance(image, memoryview), f"{entry.head.kind.name} at {entry.ref} is listed, but {image}"
        assert same_parts(image, image_of(entry.head, store.identity), entry.head, store.identity), "other bytes"
    there = {(entry.head.kind, entry.head.key) for entry in entries}
    missing = [item.head for item in wanted if (item.head.kind, item.head.key) not in there]
    assert not missing, f"{len(missing)} of {len(wanted)} committed records are gone"
    return {key for kind, key in there if kind is RecordKind.BLOCK}


def du(directory: Path) -> int:
    """What du says."""
    return sum(path.stat().st_blocks * 512 for path in (directory, *directory.rglob("*")))


def flip(path: Path, rng: random.Random, start: int, end: int) -> None:
    """Changes one bit in [start, end)."""
    at = rng.randrange(start, end)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
