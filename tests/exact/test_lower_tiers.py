"""A prefix from the host tier, from disk, or from disk after a restart gives the bytes of a cold run: real weights in
bfloat16, block 64, grid 1,024, across processes.

A model takes two processes: one computes every prompt cold and serves it again from the host tier; the next has only
what the first left on disk. A run takes some lengths; `make campaign truth` takes all.
"""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from ops.models.shipped import TINY_HYBRID
from tests.campaigns.budget import first_seed
from tests.exact.probe import Snapshot
from tests.exact.test_exact import GRID, Step, assert_same_bytes, random_ids, run_process

FORGET: Step = {"forget": True}
VOCAB_SIZE = 8_000
CORE = (1025, 2048)  # one row past a grid position, and N = kG
LENGTHS = (1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 2111, 2112, 2113, 3071, 3072, 3073)
HOST_BYTES = 1 << 28


def compare_with_cold(model: Path, lengths: Sequence[int], disk: Path) -> Counter[str]:
    """Serves a text of each length cold, from host, from disk after a restart, and from disk again; cases by path."""
    prompts = [random_ids(length, 100 + length, VOCAB_SIZE) for length in lengths]
    settings: dict[str, object] = {"break_even": False, "restore_timeout_s": 60.0, "disk_path": str(disk)}
    first: list[Step] = []
    for prompt in prompts:
        first += [{"prompt": prompt}, FORGET, {"prompt": prompt}]
    served = run_process(model, first, host_bytes=HOST_BYTES, **settings)
    colds, hosts = served[::2], served[1::2]

    others = [random_ids(700, 32, VOCAB_SIZE), random_ids(1500, 33, VOCAB_SIZE)]  # so that block ids differ
    own = random_ids(GRID + 65, 34, VOCAB_SIZE)
    second: list[Step] = [{"prompt": other} for other in others]
    for prompt in reversed(prompts):
        second += [{"prompt": prompt}, FORGET, {"prompt": prompt}]
    second += [{"prompt": own}, FORGET, {"prompt": own}]
    served = run_process(model, second, **settings)[len(others) :]
    restarts, again = served[:-2][::2][::-1], served[:-2][1::2][::-1]
    assert_hit(served[-2], served[-1], disk=GRID)

    for length, cold, from_host, restarted, from_disk in zip(lengths, colds, hosts, restarts, again, strict=True):
        prefix = (length - 1) // GRID * GRID
        assert_hit(cold, from_host, host=prefix)
        assert_hit(cold, restarted, disk=prefix)
        assert_hit(cold, from_disk, disk=prefix)
    assert any(set(cold.blocks) != set(hit.blocks) for cold, hit in zip(colds, restarts, strict=True)), "same block ids"
    assert len({cold.logits for cold in colds}) == len(lengths), "the logits say nothing"
    num_prefixes = sum(length > GRID for length in lengths)
    return Counter({"host": num_prefixes, "restart": num_prefixes, "disk": num_prefixes + 1})


def assert_hit(cold: Snapshot, hit: Snapshot, *, host: int = 0, disk: int = 0) -> None:
    """The prefix came from where it should, and all is as when nothing was cached."""
    assert cold.cached_len == 0
    assert (hit.from_host, hit.from_disk, hit.cached_len) == (host, disk, host + disk), f"prompt of {hit.prompt_len}"
    assert_same_bytes(cold, hit)


@pytest.mark.parametrize("name", ["tiny-hybrid", pytest.param("smollm2", marks=pytest.mark.model)])
def test_a_prefix_from_a_lower_tier_equals_a_cold_run(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = TINY_HYBRID if name == "tiny-hybrid" else request.getfixturevalue("embedded_model")
    lengths = set[int](CORE)
    if model is TINY_HYBRID:
        lengths.add(random.Random(first_seed()).choice([length for length in LENGTHS if length < 2200]))
    seen = compare_with_cold(model, sorted(lengths), tmp_path / "tier")
    assert min(seen.values()) >= len(CORE)
