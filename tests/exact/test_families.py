"""Every family, every way back: what a prefix from a tier leads to has the bytes of a cold run.

Planes of the whole prompt, slots and first-token logits; after preemption every byte of planes and slot at the moment
of return, and the logits of every later token. A run takes a part of the lengths by rotating seeds, N = kG always among
them; `make campaign truth` takes all, in both dtypes.
"""

import random
from pathlib import Path

import pytest

from tests.campaigns.budget import first_seed
from tests.exact.families import DTYPES, FAMILIES, GRID, lengths
from tests.exact.paths import HOST_BYTES, Walk, walk_device_and_host, walk_disk_and_restart, walk_preemption
from tiers.device_transfer import DeviceTransfer

NUM_CHUNKS = 3
NUM_LENGTHS = 5  # of 39


def some_lengths(rng: random.Random) -> list[int]:
    """A whole number of grid chunks, its two neighbours, and others."""
    middle = rng.randint(2, NUM_CHUNKS) * GRID
    wanted = {middle - 1, middle, middle + 1}
    others = sorted(set(lengths(NUM_CHUNKS)) - wanted)
    return sorted(wanted | set(rng.sample(others, NUM_LENGTHS - len(wanted))))


@pytest.fixture(params=FAMILIES)
def walk(request: pytest.FixtureRequest, tmp_path: Path) -> Walk:
    family, seed = str(request.param), first_seed()
    rng = random.Random(f"{family} {seed}")
    return Walk(family, rng.choice(DTYPES), seed, tmp_path / "models", some_lengths(rng))


def test_every_way_back_gives_the_bytes_of_a_cold_run(walk: Walk, tmp_path: Path) -> None:
    seen = walk_device_and_host(walk) + walk_disk_and_restart(walk, tmp_path / "tier")
    seen += walk_preemption(walk, num_prompts=1)
    assert all(seen[path] >= 3 for path in ("device", "host", "disk", "restart", "again", "preemption")), seen
    assert len({cold.logits for cold in walk.colds.values()}) == len(walk.lengths), "the logits say nothing"


def test_one_flipped_bit_in_the_host_tier_is_seen_in_planes_slots_and_logits(tmp_path: Path) -> None:
    """The comparison can fail."""
    walk = Walk("qwen3_5", "bfloat16", 0, tmp_path / "models", [])
    probe = walk.probe(host_bytes=HOST_BYTES)
    transfer = probe.engine.cache.restorer.transfer
    assert isinstance(transfer, DeviceTransfer)
    assert transfer.arena is not None
    prompt = walk.prompt(2 * GRID + 1)
    for part in ("planes", "slots"):
        cold = probe.run(prompt)
        probe.forget()
        path = probe.engine.device.walk(prompt, "")
        copy = path[0].host_block if part == "planes" else path[-1].host_state
        assert copy is not None
        transfer.arena.chunks[copy.chunks[0]][1] ^= 0x40
        hit = probe.run(prompt)
        assert hit.from_host == 2 * GRID
        assert getattr(hit, part) != getattr(cold, part)
        assert hit.logits != cold.logits
        transfer.arena.chunks[copy.chunks[0]][1] ^= 0x40
        probe.forget()
    probe.engine.close()
