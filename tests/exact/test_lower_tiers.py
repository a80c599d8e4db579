"""A prefix from the host tier, from disk, or from disk after a restart gives the bytes of a cold run, in bfloat16."""

from pathlib import Path

import pytest

from ops.models.shipped import TINY_HYBRID
from tests.exact.probe import Snapshot
from tests.exact.test_exact import GRID, Step, assert_same_bytes, random_ids, run_process

LENGTHS = (1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 3000)


def serve_each(model: Path, prompts: list[list[int]], *, forget: bool, **config: object) -> list[Snapshot]:
    """Each prompt in turn, in one process; with `forget` each finds an empty device."""
    steps: list[Step] = []
    for prompt in prompts:
        steps += [{"forget": True}] if forget else []
        steps += [{"prompt": prompt, "max_tokens": 2}]
    return run_process(model, steps, **config)


@pytest.mark.parametrize("name", ["tiny-hybrid", pytest.param("smollm2", marks=pytest.mark.model)])
@pytest.mark.parametrize("tier", ["host", "disk", "restart"])
def test_a_prefix_from_a_lower_tier_equals_a_cold_run(
    name: str, tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = TINY_HYBRID if name == "tiny-hybrid" else request.getfixturevalue("embedded_model")
    text = random_ids(3100, 31, 8_000)
    other = [random_ids(700, 32, 8_000), random_ids(1500, 33, 8_000)]  # so that block ids differ
    prompts = [text[:length] for length in LENGTHS]
    colds = serve_each(model, prompts, forget=True)
    assert all(cold.cached_len == 0 for cold in colds)
    lower = {"host_bytes": 1 << 28} if tier == "host" else {"disk_path": str(tmp_path / "tier")}
    if tier == "restart":
        serve_each(model, prompts, forget=False, **lower)
        again = serve_each(model, [*other, *prompts], forget=True, **lower)
        hits = again[len(other) :]
    else:
        again = serve_each(model, [*other, *prompts, *prompts], forget=True, **lower)
        hits = again[len(other) + len(prompts) :]
    for length, cold, hit in zip(LENGTHS, colds, hits, strict=True):
        expected = (length - 1) // GRID * GRID
        assert hit.cached_len == expected
        assert (hit.from_host if tier == "host" else hit.from_disk) == expected
        assert_same_bytes(cold, hit)
    assert any(set(cold.blocks) != set(hit.blocks) for cold, hit in zip(colds, hits, strict=True)), "same block ids"
