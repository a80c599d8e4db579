"""Every way in which a prefix comes back, walked with one model: what is served is compared with cold to the byte.

Each function serves prompts of the given lengths, asserts where their prefixes came from, and returns how many cases it
compared by path. Free blocks and slots are full of NaN at every step (probe.py).
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.exact.families import BLOCK, GRID, config_of, lengths, prompt_of
from tests.exact.preemption import PreemptingProbe
from tests.exact.probe import Probe, Snapshot
from tests.exact.test_exact import assert_same_bytes

HOST_BYTES = 8 << 20


@dataclass(slots=True)
class Walk:
    """One family's prompts, and what a cold run of each gave."""

    family: str
    dtype: str
    seed: int
    folder: Path
    lengths: list[int]
    colds: dict[int, Snapshot] = field(default_factory=dict[int, Snapshot])

    def prompt(self, length: int) -> list[int]:
        """Each length has a text of its own, so that each finds what it left itself."""
        return prompt_of(length, self.seed * 1000 + length)

    def probe(self, **more: object) -> Probe:
        """A fresh engine that has served something already, so that block ids differ between engines."""
        probe = Probe(config_of(self.family, self.folder, self.dtype, **more))
        rng = random.Random(repr(sorted(more)))
        for _ in range(rng.randint(1, 3)):
            probe.run(prompt_of(rng.randint(1, 2 * GRID), rng.randrange(1 << 40)))
        return probe

    def see(self, length: int, got: Snapshot, *, host: int = 0, disk: int = 0, device: int = 0) -> None:
        """Compares with the cold run; the first run of a length is the cold one. 1: the whole prefix is from there."""
        prefix = (length - 1) // GRID * GRID
        where = (got.cached_len - got.from_host - got.from_disk, got.from_host, got.from_disk)
        assert where == (device * prefix, host * prefix, disk * prefix), (self.family, length, where)
        assert_same_bytes(self.colds.setdefault(length, got), got)


def walk_device_and_host(walk: Walk) -> Counter[str]:
    """Cold, from the device, from the host tier, and once more from the device, as the host tier left it there."""
    seen: Counter[str] = Counter()
    probe = walk.probe(host_bytes=HOST_BYTES)
    for length in walk.lengths:
        prompt = walk.prompt(length)
        walk.see(length, probe.run(prompt))
        walk.see(length, probe.run(prompt), device=1)
        probe.forget()
        walk.see(length, probe.run(prompt), host=1)
        walk.see(length, probe.run(prompt), device=1)
        seen.update({"device": 1, "host": 1, "again": 1} if length > GRID else {"no prefix": 3})
    probe.engine.close()
    return seen


def walk_disk_and_restart(walk: Walk, disk: Path) -> Counter[str]:
    """From disk and again; then all of it, in another order, by an engine that has never computed any of it."""
    seen: Counter[str] = Counter()
    probe = walk.probe(disk_path=str(disk))
    for length in walk.lengths:
        prompt = walk.prompt(length)
        walk.see(length, probe.run(prompt))
        probe.forget()
        walk.see(length, probe.run(prompt), disk=1)
        walk.see(length, probe.run(prompt), device=1)
        seen.update({"disk": 1, "again": 1} if length > GRID else {"no prefix": 2})
    probe.engine.close()
    probe = walk.probe(disk_path=str(disk), host_bytes=HOST_BYTES)
    for length in random.Random(walk.seed).sample(walk.lengths, len(walk.lengths)):
        prompt = walk.prompt(length)
        walk.see(length, probe.run(prompt), disk=1)
        walk.see(length, probe.run(prompt), device=1)
        seen.update({"restart": 1, "again": 1} if length > GRID else {"no prefix": 2})
    probe.engine.close()
    return seen


def walk_preemption(walk: Walk, num_prompts: int) -> Counter[str]:
    """Moved to the host and back inside the prompt, at its end and while decoding: every later logit as undisturbed.

    The decoded tokens cross a block's end and, where the prompt ends just before, a grid position.
    """
    seen: Counter[str] = Counter()
    rng = random.Random(walk.seed)
    chosen = [length for length in lengths(3) if length > GRID]
    for length in rng.sample(chosen, num_prompts):
        max_tokens = 2 * BLOCK + 2
        prompt = walk.prompt(length)
        config = config_of(walk.family, walk.folder, walk.dtype, host_bytes=HOST_BYTES, slice_ms=0.1)
        probe, quiet_probe = PreemptingProbe(config), PreemptingProbe(config)
        undisturbed = quiet_probe.serve(prompt, max_tokens, [])
        inside = list(range(GRID, length, GRID))
        decoding = [length, *sorted(rng.sample(range(length + 1, length + max_tokens - 1), 2))]
        trace = probe.serve(prompt, max_tokens, inside + decoding)
        probe.engine.close()
        quiet_probe.engine.close()
        assert len(undisturbed.draws) == max_tokens
        assert trace.preempted_at == inside + decoding
        assert trace.draws == undisturbed.draws, (walk.family, length)
        seen["preemption"] += len(trace.preempted_at)
    return seen
