"""A sequence larger than the device computes the bytes that it computes with everything resident.

Planes, slots and logits at every token that is drawn, through a prompt that is larger than the device from its first
token on and past its end, for every family, with the rest in the host tier or on disk. A run takes a budget and a
dtype of each family by rotating seeds; `make campaign longctx` takes all.
"""

import random
from pathlib import Path

import pytest

from tests.campaigns.budget import first_seed
from tests.exact.families import BLOCK, DTYPES, FAMILIES, GRID, prompt_of
from tests.exact.longctx import TIERS, Case, LongProbe, compare_with_resident, small_device
from tiers.layout import Part
from tiers.spill import SpillError

NUM_CHUNKS = 26
LENGTHS = (NUM_CHUNKS * GRID - 1, NUM_CHUNKS * GRID, NUM_CHUNKS * GRID + 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_larger_than_the_device_has_the_bytes_of_a_resident_one(family: str, tmp_path: Path) -> None:
    rng = random.Random(f"{family} {first_seed()}")
    tier, share = rng.choice(TIERS), rng.choice((0.0, rng.random() / 2))
    seen = compare_with_resident([Case(family, rng.choice(DTYPES), rng.choice(LENGTHS), share)], (tier,), tmp_path)
    assert seen[tier] > GRID


def test_one_flipped_bit_below_the_device_is_seen_in_the_next_logits(tmp_path: Path) -> None:
    """The comparison can fail."""
    prompt = prompt_of(NUM_CHUNKS * GRID + 5, 3)
    config = small_device("llama", tmp_path / "models", "float32", 0.0, tier="host", folder=tmp_path)
    probe, damaged = LongProbe(config), LongProbe(config)
    draws = probe.serve(prompt, 4)
    damaged.flip_after = 2
    assert damaged.serve(prompt, 4)[:2] == draws[:2]
    assert [draw.logits for draw in damaged.draws[2:]] != [draw.logits for draw in draws[2:]]
    probe.engine.close()
    damaged.engine.close()


@pytest.mark.parametrize("below", ["host", "spill", "spill and a small host tier"])
def test_a_prefix_that_is_larger_than_the_device_comes_back_without_being_on_it(below: str, tmp_path: Path) -> None:
    """From the host tier where it lies; from records by way of the spill where the host tier has no room for it."""
    prompt = prompt_of(NUM_CHUNKS * GRID + 5, 3)
    more = {"host_bytes": 1 << 16} if "small" in below else {}
    tier = "host" if below == "host" else "spill"
    config = small_device("qwen3_5", tmp_path / "models", "float32", 0.0, tier=tier, folder=tmp_path, **more)
    probe = LongProbe(config)
    cold = probe.serve(prompt, 3)
    assert probe.usage_of_last().cached_host == probe.usage_of_last().cached_disk == 0
    again = probe.serve([*prompt], 3)
    usage = probe.usage_of_last()
    assert usage.cached_device + usage.cached_host + usage.cached_disk == NUM_CHUNKS * GRID
    assert (usage.cached_host if below == "host" else usage.cached_disk) > 0
    assert probe.engine.device.num_usable_blocks < NUM_CHUNKS * GRID // BLOCK // 2
    residence = probe.residences[0]
    assert residence.host + residence.spill > NUM_CHUNKS * GRID // BLOCK // 2
    if more:
        assert probe.engine.cache.host is not None
        assert 0 < probe.engine.cache.host.chunks.size < NUM_CHUNKS * GRID // BLOCK // 2
    assert not probe.engine.cache.restorer.in_flight
    assert again == cold
    probe.engine.close()


def test_a_context_past_the_model_s_limit_is_refused_before_any_work(tmp_path: Path) -> None:
    config = small_device("llama", tmp_path / "models", "float32", 0.0, tier="host", folder=tmp_path)
    limit = NUM_CHUNKS * GRID
    probe = LongProbe(
        small_device(
            "llama", tmp_path / "models", "float32", 0.0, tier="host", folder=tmp_path, max_context_tokens=limit
        )
    )
    assert config.max_context_tokens is None
    with pytest.raises(AssertionError, match="the limit is"):
        probe.serve(prompt_of(limit, 1), 1)
    assert probe.engine.steps == 0
    assert len(probe.serve(prompt_of(limit - 1, 1), 5)) == 1, "one token more than the limit"
    probe.engine.close()


def test_blocks_that_are_lost_below_come_back_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read fails in the prompt and another past its end: prompt, answer and state are as of an undisturbed run."""
    prompt, models = prompt_of(NUM_CHUNKS * GRID + 5, 3), tmp_path / "models"
    probe = LongProbe(small_device("qwen3_5", models, "float32", 0.0, tier="spill", folder=tmp_path))
    undisturbed = probe.serve(prompt, 12)
    residency = probe.engine.cache.residency
    assert residency is not None
    spill = residency.spill
    assert spill is not None
    read, failed_at = spill.read, list[int]()

    def failing(block: int, part: Part, out: memoryview) -> None:
        running = probe.engine.scheduler.running
        length = running[0].computed_len if running else 0
        if length > ((NUM_CHUNKS - 2) * GRID, len(prompt) + 3, 1 << 30)[len(failed_at)]:
            failed_at.append(length)
            raise SpillError("read: the disk is gone")
        read(block, part, out)

    monkeypatch.setattr(spill, "read", failing)
    draws = probe.serve(prompt, 12)
    assert len(failed_at) == 2
    assert failed_at[0] < len(prompt) <= failed_at[1]
    assert draws == undisturbed
    probe.engine.close()
