"""The spill gives back what was written, in any order and through any forecast, or says that it cannot."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.budget import seeds
from tiers.layout import Plane, StateLayout
from tiers.resources import Resources
from tiers.spill import Spill, SpillError
from tiers.spill_reader import SpillReader

LAYOUT = StateLayout(
    (
        Plane("layers.0.k", "float32", (2, 8)),
        Plane("layers.0.v", "float32", (2, 8)),
        Plane("layers.0.index_k", "bfloat16", (16,), 4, is_scanned=True),
        Plane("layers.1.latent", "bfloat16", (40,)),
    ),
    (),
    block_size=8,
)
CHUNK = 3  # blocks
NUM_EXTENTS = 5
NAMES = [part.name for part in LAYOUT.block_parts]


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[Spill]:
    made = Spill(LAYOUT, tmp_path, chunk_blocks=CHUNK, num_extents=NUM_EXTENTS)
    yield made
    made.close()


def fill(spill: Spill, rng: random.Random, owner: Resources) -> list[bytes]:
    """Fills every extent; the images of all blocks."""
    images: list[bytes] = []
    for _ in range(NUM_EXTENTS):
        extent = spill.take(owner)
        assert extent is not None
        written = [rng.randbytes(LAYOUT.block_bytes) for _ in range(CHUNK)]
        spill.write(extent, [memoryview(image) for image in written])
        images += written
    assert spill.take(owner) is None
    return images


def expected(images: list[bytes], name: str, blocks: list[int]) -> bytes:
    part = LAYOUT.block_parts[NAMES.index(name)]
    return b"".join(images[block][part.offset : part.offset + part.num_bytes] for block in blocks)


def read(spill: Spill, name: str, blocks: list[int]) -> bytes:
    """Neighbours, as they lie."""
    part = LAYOUT.block_parts[NAMES.index(name)]
    out = bytearray(part.num_bytes * len(blocks))
    spill.read(blocks[0], part, memoryview(out))
    return bytes(out)


def neighbours(rng: random.Random) -> list[int]:
    first = rng.randrange(CHUNK * NUM_EXTENTS)
    return list(range(first, rng.randint(first, CHUNK * NUM_EXTENTS - 1) + 1))


def some_blocks(rng: random.Random) -> list[int]:
    together = neighbours(rng)
    return together if rng.random() < 0.5 else rng.sample(range(CHUNK * NUM_EXTENTS), len(together))


def test_what_is_read_is_what_was_written(spill: Spill) -> None:
    rng = random.Random(1)
    images = fill(spill, rng, Resources("r"))
    for _ in range(200):
        name, blocks = rng.choice(NAMES), neighbours(rng)
        assert read(spill, name, blocks) == expected(images, name, blocks)
    assert spill.kept_bytes == spill.num_blocks * 2 * 16 * 2, "index keys are in memory"


def test_every_flipped_bit_is_seen_by_whoever_reads_it(spill: Spill) -> None:
    rng = random.Random(2)
    images = fill(spill, rng, Resources("r"))
    for _ in range(40):
        part = rng.choice([part for part in LAYOUT.block_parts if not spill.is_kept(part)])
        block, byte = rng.randrange(CHUNK * NUM_EXTENTS), rng.randrange(part.num_bytes)
        extent = block // CHUNK
        at = spill.place(part, block) + byte
        (old,) = os.pread(spill.fileno(), 1, at)
        os.pwrite(spill.fileno(), bytes([old ^ 1 << rng.randrange(8)]), at)
        whole = list(range(extent * CHUNK, (extent + 1) * CHUNK))
        around = [n for n in (whole[0] - 1, *whole, whole[-1] + 1) if 0 <= n < CHUNK * NUM_EXTENTS]
        for blocks in ([block], whole, around):
            with pytest.raises(SpillError, match="checksum"):
                read(spill, part.name, blocks)
        for other in whole:
            if other != block:
                assert read(spill, part.name, [other]) == expected(images, part.name, [other])
        os.pwrite(spill.fileno(), bytes([old]), at)


def test_a_file_that_became_shorter_is_an_error(spill: Spill) -> None:
    fill(spill, random.Random(3), Resources("r"))
    last = LAYOUT.block_parts[-1]
    os.ftruncate(spill.fileno(), spill.place(last, CHUNK))
    assert len(read(spill, last.name, [0, 1, 2])) > 0
    for blocks in ([CHUNK], [2, 3]):
        with pytest.raises(SpillError, match="the file ends"):
            read(spill, last.name, blocks)


def test_an_extent_is_free_when_its_last_owner_has_gone(spill: Spill) -> None:
    one, other = Resources("one"), Resources("other")
    extent = spill.take(one)
    assert extent is not None
    spill.hold(other, extent)
    one.release()
    assert spill.extents.num_held == 1
    assert spill.astray([other]) == []
    assert spill.astray([one]) == [f"spill extent {extent.number} has no owner"]
    other.release()
    assert spill.used_bytes == 0


@pytest.mark.parametrize("seed", seeds(fraction=3, full=100))
def test_any_forecast_gives_the_bytes_that_were_written(seed: int, spill: Spill) -> None:
    """Right ones, wrong ones, those of a forward that was dropped half-way."""
    rng = random.Random(seed)
    images = fill(spill, rng, Resources("r"))
    reader = SpillReader(spill, ahead_bytes=rng.randint(0, 20_000), cache_bytes=1 << 20)
    every = [(part, extent) for part in LAYOUT.block_parts for extent in range(NUM_EXTENTS)]
    for _ in range(20):
        forecast = every if rng.random() < 0.5 else rng.sample(every, rng.randint(0, len(every)))
        reader.announce(forecast)
        wanted = every if rng.random() < 0.7 else rng.sample(every, len(every))
        for part, extent in wanted[: rng.randint(1, len(wanted))]:
            blocks = [extent * CHUNK + within for within in sorted(rng.sample(range(CHUNK), rng.randint(1, CHUNK)))]
            blocks += some_blocks(rng) if rng.random() < 0.3 else []
            out = bytearray(part.num_bytes * len(blocks))
            reader.fill(memoryview(out), part, blocks)
            assert bytes(out) == expected(images, part.name, blocks)


def test_what_a_forward_announced_is_asked_of_the_disk_before_it_is_wanted(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far ahead as allowed, whatever was passed over, and neighbours in one piece."""
    images = fill(spill, random.Random(4), Resources("r"))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, num_bytes, advice: asked.append((at, num_bytes)))
    keys, _, _, latents = LAYOUT.block_parts
    one = CHUNK * keys.num_bytes
    reader = SpillReader(spill, ahead_bytes=NUM_EXTENTS * one + 1, cache_bytes=0)
    extents = [0, 1, 3, 4, 2]
    reader.announce((part, extent) for part in (keys, latents) for extent in extents)
    latent = CHUNK * latents.num_bytes
    expect = [(spill.place(keys, 0), 2 * one), (spill.place(keys, 3 * CHUNK), 2 * one), (spill.place(keys, 6), one)]
    expect += [(spill.place(latents, 0), 2 * latent)]
    assert asked == expect
    blocks = [extent * CHUNK + within for extent in extents[2:] for within in range(CHUNK)]
    out = bytearray(len(blocks) * keys.num_bytes)
    reader.fill(memoryview(out), keys, blocks)
    assert bytes(out) == expected(images, keys.name, blocks)
    assert asked[4:] == [(spill.place(latents, 3 * CHUNK), 2 * latent), (spill.place(latents, 6), latent)]
    assert (reader.counts.foreseen, reader.counts.unforeseen) == (2, 0)
    reader.fill(memoryview(out)[:one], keys, [0, 1, 2])
    assert (reader.counts.foreseen, reader.counts.unforeseen) == (2, 1)


def test_a_piece_that_is_broken_fails_whoever_wants_it_and_nobody_else(spill: Spill) -> None:
    images = fill(spill, random.Random(5), Resources("r"))
    part = LAYOUT.block_parts[0]
    os.pwrite(spill.fileno(), b"\xff" * 64, spill.place(part, 0))
    reader = SpillReader(spill, cache_bytes=0)
    for _ in range(3):
        reader.announce([(part, 0), (part, 1)])
        with pytest.raises(SpillError):
            reader.fill(memoryview(bytearray(part.num_bytes * CHUNK)), part, [0, 1, 2])
        out = bytearray(part.num_bytes * CHUNK)
        reader.fill(memoryview(out), part, [3, 4, 5])
        assert bytes(out) == expected(images, part.name, [3, 4, 5])


def test_picked_blocks_are_read_once_and_never_stale(spill: Spill) -> None:
    rng, owner = random.Random(6), Resources("r")
    images = fill(spill, rng, owner)
    part = LAYOUT.block_parts[0]
    reader = SpillReader(spill, cache_bytes=4 * part.num_bytes)

    def pick(blocks: list[int]) -> tuple[bytes, int]:
        out = bytearray(part.num_bytes * len(blocks))
        num_missed = reader.pick(memoryview(out), part, blocks)
        return bytes(out), num_missed

    assert pick([7, 2]) == (expected(images, part.name, [7, 2]), 2)
    assert pick([2, 7, 9]) == (expected(images, part.name, [2, 7, 9]), 1)
    assert pick([0, 1, 3, 4])[1] == 4, "a cache of four parts holds four"
    assert pick([2])[1] == 1
    owner.drop("spill extent", 0)
    again = spill.take(owner)
    assert again is not None
    assert again.number == 0
    spill.write(again, [memoryview(rng.randbytes(LAYOUT.block_bytes)) for _ in range(CHUNK)])
    assert pick([2])[0] == read(spill, part.name, [2]) != expected(images, part.name, [2])
