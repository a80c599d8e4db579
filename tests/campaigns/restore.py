"""What a restore costs: 6,144 tokens of the embedded model from disk after a restart, beside computing them.

`make campaign restore` writes results/restore.json. Three processes: one computes and writes down, one restores after a
restart, one decodes while everything is written down and while nothing is, and one asks for prefixes of every length
again, from the host tier and from disk: a hit may cost at most MOST_OF_COMPUTING of what its first asking cost.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import torch

from daemon.config import EngineConfig
from daemon.messages import SamplingParams, Submit
from tests.campaigns.disk import wall_read_rate
from tests.exact.probe import Probe
from tests.exact.test_exact import random_ids
from tiers.meters import EvictionReason
from tiers.restore import Restore

RESULT = Path("tests/campaigns/results/restore.json")
PREFIX, SUFFIX, GRID = 6144, 32, 1024
ROUNDS = 5
MOST_OF_COMPUTING = 1.05
MODEL = Path.home() / ".cache/downcore/models/smollm2-135m-instruct"


def main() -> int:
    """Each phase in a process of its own, one after the other; about two minutes."""
    if len(sys.argv) > 1:
        print(json.dumps(PHASES[sys.argv[1]](Path(sys.argv[2]))))
        return 0
    with tempfile.TemporaryDirectory(prefix="dc-restore-", dir=os.environ.get("DOWNCORE_DISK", "/tmp")) as folder:
        phases = {name: run_phase(name, folder) for name in PHASES}
        coded_bytes = phases["restore"]["read_bytes"]
        read_s = coded_bytes / 1e6 / wall_read_rate(Path(folder), int(coded_bytes))
    decode_s = float(json.loads(RESULT.with_name("disk.json").read_text())["decode_alone_s"])
    bar_s = 1.5 * max(read_s, decode_s) + 0.02
    faster = phases["compute"]["prefill_s"] / phases["restore"]["restore_s"]
    result: dict[str, object] = {
        "campaign": "restore",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "tokens": PREFIX,
        "read_alone_s": round(read_s, 3),
        "decode_alone_s": decode_s,
        "bar_s": round(bar_s, 3),
        "times_faster_than_computing": round(faster, 1),
        **{f"{phase}_{name}": value for phase, figures in phases.items() for name, value in figures.items()},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(phases["hits"]["worst"] > MOST_OF_COMPUTING)


def run_phase(name: str, folder: str) -> dict[str, float]:
    """The figures of one process."""
    command = [sys.executable, "-m", "tests.campaigns.restore", name, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def probe(folder: Path, **more: object) -> Probe:
    """An engine with two threads, in bfloat16, over the directory."""
    settings = {"dtype": "bfloat16", "threads": 2, "pool_bytes": 1 << 29, "disk_path": str(folder), **more}
    return Probe(EngineConfig(str(MODEL), **settings))  # type: ignore[arg-type]


def prompt() -> list[int]:
    """The same in every process."""
    return random_ids(PREFIX + SUFFIX, 51)


def compute(folder: Path) -> dict[str, float]:
    """From nothing; the prefix is on disk when this ends."""
    engine = probe(folder)
    engine.run(prompt())
    usage = engine.usage_of_last()
    engine.engine.close()
    return {"prefill_s": round(usage.prefill_s, 3), "first_token_s": round(usage.first_token_s, 3)}


def restore(folder: Path) -> dict[str, float]:
    """After a restart, several times: plan to last byte, and the time to the first token."""
    engine = probe(folder)
    seen: list[Restore] = []
    ended = engine.engine.cache.restorer.ended

    def note(restore: Restore) -> None:
        seen.append(restore)
        ended(restore)

    engine.engine.cache.restorer.ended = note
    first_token_s: list[float] = []
    for _ in range(ROUNDS):
        engine.forget()
        engine.run(prompt())
        usage = engine.usage_of_last()
        assert usage.cached_disk == PREFIX
        first_token_s.append(usage.first_token_s)
    engine.engine.close()
    took = [restore.elapsed_s for restore in seen]
    return {
        "first_restore_s": round(took[0], 3),
        "restore_s": round(statistics.median(took), 3),
        "first_token_s": round(statistics.median(first_token_s), 3),
        "read_bytes": seen[0].read_bytes,
    }


def saving(folder: Path) -> dict[str, float]:
    """Milliseconds between tokens of one stream while 6,000 other tokens a second are written down, and without."""
    rates: dict[str, list[float]] = {"idle": [], "writing": []}
    engine = probe(folder / "saving", dirty_bytes=1 << 30)
    filler = random_ids(PREFIX, 52)
    engine.run(filler)
    for _ in range(ROUNDS):
        for kind in rates:
            rates[kind].append(_decode_ms(engine, filler, is_writing=kind == "writing"))
    engine.engine.close()
    idle, writing = statistics.median(rates["idle"]), statistics.median(rates["writing"])
    return {"idle_ms": round(idle, 2), "writing_ms": round(writing, 2), "ratio": round(writing / idle, 3)}


def _decode_ms(engine: Probe, filler: list[int], *, is_writing: bool) -> float:
    """Decodes 40 tokens; `is_writing`: what the filler left is written again at the same time."""
    core = engine.engine
    sampling = SamplingParams(seed=0, temperature=0.0)
    core.handle(Submit("s", array("i", random_ids(40, 53)).tobytes(), 1, 48, 0, (), sampling, ""))
    engine.begin("s")
    times: list[float] = []
    with torch.inference_mode():
        while not core.is_idle:
            if is_writing and len(times) == 4 and core.cache.disk is not None:
                node = core.device.walk([*filler, 0], "")[-1]
                for above in reversed(node.path()):
                    if above.disk_block is not None:
                        core.cache.disk.drop_block(above, EvictionReason.ASKED)
                core.cache.offer(node)
            began = time.perf_counter()
            core.step()
            times.append(time.perf_counter() - began)
        while not core.cache.is_settled:
            core.step()
            time.sleep(0.001)
    return statistics.mean(times[4:]) * 1e3


def hits(folder: Path) -> dict[str, float]:
    """Time to the first token of a hit, as a part of what the same prompt cost when nothing was known of it."""
    ratios: dict[str, float] = {}
    for tier, more in (("host", {"host_bytes": 1 << 29, "disk_path": None}), ("disk", {})):
        engine = probe(folder / "hits", **more)
        for chunks in range(1, PREFIX // GRID + 1):
            ids = random_ids(chunks * GRID + SUFFIX, 60 + chunks)
            engine.run(ids)
            cold_s = engine.usage_of_last().first_token_s
            hits_s: list[float] = []
            for _ in range(ROUNDS):
                engine.forget()
                engine.run(ids)
                usage = engine.usage_of_last()
                assert (usage.cached_host if tier == "host" else usage.cached_disk) == chunks * GRID
                hits_s.append(usage.first_token_s)
            ratios[f"{tier}_{chunks * GRID}"] = round(statistics.median(hits_s) / cold_s, 3)
        engine.engine.close()
    return {**ratios, "worst": max(ratios.values())}


PHASES = {"compute": compute, "restore": restore, "saving": saving, "hits": hits}

if __name__ == "__main__":
    sys.exit(main())
