"""The cache's exactness on an accelerator: device, host and disk hits and a restart have the bytes of a cold run."""

from pathlib import Path

import pytest
import torch

from ops.models.shipped import TINY_HYBRID
from tests.exact.test_exact import GRID, Step, assert_same_bytes, random_ids, run_process

LENGTHS = (1024, 1025, 2049, 3000)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator here")


def test_every_tier_gives_the_bytes_of_a_cold_run_on_the_accelerator(tmp_path: Path) -> None:
    text = random_ids(3100, 41, 8_000)
    prompts = [text[:length] for length in LENGTHS]
    others: list[Step] = [{"prompt": random_ids(700, 42, 8_000)}, {"prompt": random_ids(1500, 43, 8_000)}]
    each: list[Step] = [step for prompt in prompts for step in ({"forget": True}, {"prompt": prompt, "max_tokens": 2})]
    config = {"device": "cuda", "grid": GRID}
    colds = run_process(TINY_HYBRID, each, **config)
    disk = {"disk_path": str(tmp_path / "tier")}
    paths = {
        "device": (run_process(TINY_HYBRID, [*others, *(s for s in each * 2 if "prompt" in s)], **config), "device"),
        "host": (run_process(TINY_HYBRID, [*others, *each * 2], host_bytes=1 << 28, **config), "host"),
        "disk": (run_process(TINY_HYBRID, [*others, *each * 2], **disk, **config), "disk"),
        "restart": (run_process(TINY_HYBRID, [*others, *each], **disk, **config), "disk"),
    }
    for path, (again, tier) in paths.items():
        for cold, hit in zip(colds, again[-len(prompts) :], strict=True):
            assert cold.cached_len == 0
            assert hit.cached_len == (cold.prompt_len - 1) // GRID * GRID, path
            assert tier == "device" or hit.cached_len == (hit.from_host if tier == "host" else hit.from_disk), path
            assert_same_bytes(cold, hit)
