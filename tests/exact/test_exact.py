"""A prefix hit gives the bytes of a cold run: first-token logits, every plane row of the prompt, every slot."""

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from daemon.config import EngineConfig, LoadFormat
from ops.models.shipped import TINY_HYBRID
from tests.e2e.daemon import tiny_model
from tests.exact.probe import Probe, Snapshot

LENGTHS = (1, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3000)
HYBRID_LENGTHS = (63, 1024, 1025, 2048, 2049, 3000)
GRID = 1024
SMALL_BLOCK, SMALL_GRID = 4, 16


Step = Mapping[str, object]
"""Of a probe's job: a prompt with its max_tokens, or forget."""


def random_ids(count: int, seed: int, vocab_size: int = 40_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, vocab_size) for _ in range(count)]


def run_process(model: Path, steps: Sequence[Step], **more: object) -> list[Snapshot]:
    """A process of its own with two compute threads, block 64 and grid 1,024, in bfloat16."""
    config = {
        **{"model_path": str(model), "dtype": "bfloat16", "threads": 2, "pool_bytes": 1 << 28, "max_sequences": 4},
        **more,
    }
    job = json.dumps({"config": config, "steps": steps})
    done = subprocess.run(
        [sys.executable, "-m", "tests.exact.probe"], input=job, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return msgspec.json.decode(done.stdout, type=list[Snapshot])


def assert_same_bytes(cold: Snapshot, hit: Snapshot) -> None:
    where = f"prompt of {cold.prompt_len}, {hit.cached_len} cached"
    assert hit.planes == cold.planes, where
    assert hit.slots == cold.slots, where
    assert hit.logits == cold.logits, where


@pytest.mark.model
def test_a_hit_equals_a_cold_run_across_processes_on_the_embedded_model(embedded_model: Path) -> None:
    text = random_ids(max(LENGTHS) + 50, 7)
    cold_steps: list[Step] = []
    for length in LENGTHS:
        cold_steps += [{"prompt": text[:length]}, {"forget": True}]
    colds = run_process(embedded_model, cold_steps)
    history = [{"prompt": random_ids(700, 1)}, {"prompt": random_ids(1500, 2), "max_tokens": 3}]
    warm = {"prompt": [*text, 5]}
    hits = run_process(embedded_model, [*history, warm, *({"prompt": text[:length]} for length in reversed(LENGTHS))])
    hits = hits[len(history) + 1 :][::-1]
    for length, cold, hit in zip(LENGTHS, colds, hits, strict=True):
        assert cold.cached_len == 0
        assert hit.cached_len == (length - 1) // GRID * GRID
        assert_same_bytes(cold, hit)
    assert any(set(cold.blocks) != set(hit.blocks) for cold, hit in zip(colds, hits, strict=True)), "same block ids"


@pytest.mark.model
def test_the_next_turn_equals_a_cold_run_across_processes_on_the_embedded_model(embedded_model: Path) -> None:
    first, question = random_ids(1500, 11), random_ids(40, 12)
    (turn_1,) = run_process(embedded_model, [{"prompt": first, "max_tokens": 24}])
    second = first + list(turn_1.answer) + question
    _, hit = run_process(embedded_model, [{"prompt": first, "max_tokens": 24}, {"prompt": second}])
    (cold,) = run_process(embedded_model, [{"prompt": second}])
    assert hit.cached_len == 1024, "the published floor"
    assert_same_bytes(cold, hit)


def test_a_hit_and_its_recurrent_state_equal_a_cold_run_across_processes_on_the_hybrid_model() -> None:
    text, vocab_size = random_ids(max(HYBRID_LENGTHS) + 50, 21, 8_000), 8_000
    cold_steps: list[Step] = []
    for length in HYBRID_LENGTHS:
        cold_steps += [{"prompt": text[:length]}, {"forget": True}]
    colds = run_process(TINY_HYBRID, cold_steps)
    # A prompt leaves a checkpoint at its last grid position only: two prompts make those at 1,024 and 2,048, the second
    # of them from a state that was itself resumed.
    history = [
        {"prompt": random_ids(700, 22, vocab_size)},
        {"prompt": random_ids(1500, 23, vocab_size), "max_tokens": 3},
        {"prompt": text[:1100]},
        {"prompt": [*text, 5]},
    ]
    steps = [*history, *({"prompt": text[:length]} for length in reversed(HYBRID_LENGTHS))]
    hits = run_process(TINY_HYBRID, steps)[len(history) :][::-1]
    for length, cold, hit in zip(HYBRID_LENGTHS, colds, hits, strict=True):
        assert cold.cached_len == 0
        assert hit.cached_len == (length - 1) // GRID * GRID
        assert_same_bytes(cold, hit)
    assert sum(hit.cached_len > 0 for hit in hits) == 4
    assert len({cold.slots for cold in colds}) == len(HYBRID_LENGTHS), "the recurrent state says nothing"
    assert any(set(cold.blocks) != set(hit.blocks) for cold, hit in zip(colds, hits, strict=True)), "same block ids"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
def test_a_hit_equals_a_cold_run_at_every_length_on_a_small_grid(model_type: str, tmp_path: Path) -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
    model = tiny_model(tmp_path / "model", model_type=model_type, **(moe if model_type == "qwen3_moe" else {}))
    config = EngineConfig(
        str(model),
        load_format=LoadFormat.DUMMY,
        dtype="float32",
        threads=1,
        block_size=SMALL_BLOCK,
        grid=SMALL_GRID,
        pool_bytes=1 << 20,
        max_sequences=4,
    )
    cold_probe, hit_probe = Probe(config), Probe(config)
    for seed in range(3):
        hit_probe.run(random_ids(37, seed, 300), 5)
    text = random_ids(5 * SMALL_GRID + 3, 9, 300)
    hit_probe.run(text, 4)
    num_hits = 0
    for length in range(1, len(text) + 1):
        cold_probe.forget()
        cold, hit = cold_probe.run(text[:length]), hit_probe.run(text[:length])
        assert cold.cached_len == 0
        assert hit.cached_len == (length - 1) // SMALL_GRID * SMALL_GRID
        assert_same_bytes(cold, hit)
        num_hits += hit.cached_len > 0
    assert num_hits == len(text) - SMALL_GRID
