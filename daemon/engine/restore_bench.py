"""Times the way back of a long prefix from a lower tier, beside computing it: a real engine, weights made up.

The same run measures what the way leads over, the link from pinned memory or the disk by direct reads of the records'
own files, and whether the gate takes the faster way for a prefix of one grid chunk and for the long one.
"""

import os
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from daemon import memory
from daemon.config import EngineConfig, LoadFormat
from daemon.engine.engine import Engine
from daemon.engine.start import start
from daemon.messages import Rejected, SamplingParams, Started, Submit, ToFront, Usage
from kernels.host import ints
from tiers.files import aligned_buffer
from tiers.reading import RUN_BYTES
from tiers.restore import Restore
from tiers.store import StoreLimits

SUFFIX_TOKENS = 64  # of the prompt, past the last position of the grid
TURNS = 4  # of the way back
ROOM = 1.3  # of the lower tier, times the prefix


@dataclass(slots=True)
class Served:
    """What the engine told of the prompts."""

    usage: dict[str, Usage] = field(default_factory=dict[str, Usage])

    def take(self, message: ToFront) -> None:
        if isinstance(message, Rejected):
            raise RuntimeError(message.message)
        if isinstance(message, Started):
            self.usage[message.request_id] = message.usage


def time_restore(config: Path, tier: str, context_len: int) -> dict[str, object]:
    """Seconds to the first token of a prompt that is computed, and of the same one when `tier` has its prefix."""
    bytes_per_token = 1 << 15  # at most, of the models that are measured
    lower_bytes = int(ROOM * context_len * bytes_per_token)
    with TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        (Path(folder) / "model" / "config.json").write_bytes(config.read_bytes())
        settings = EngineConfig(
            str(Path(folder) / "model"),
            load_format=LoadFormat.DUMMY,
            device="cuda",
            dtype="bfloat16",
            max_sequences=4,
            slice_ms=10_000,
            host_bytes=lower_bytes if tier == "host" else None,
            disk_path=str(Path(folder) / "tier") if tier == "disk" else None,
            disk_bytes=lower_bytes if tier == "disk" else None,
            dirty_bytes=lower_bytes,
            restore_timeout_s=120.0,
        )
        served = Served()
        engine, info = start(settings, send=served.take, progress=lambda _done, _total: None)
        memory.settle()  # as the engine's process does
        ids = ints(torch.randint(3, info.vocab_size, (context_len + SUFFIX_TOKENS,)))
        other = ints(torch.randint(3, info.vocab_size, (info.grid + SUFFIX_TOKENS,)))
        with torch.inference_mode():
            # Once for the kernels to be compiled, for short and for long histories.
            _serve(engine, "compile", ids[::-1])
            short = _way_back(engine, served, "short", [other[::-1], other])
            long = _way_back(engine, served, "long", [ids])
            suffix_s = min(_serve(engine, f"on the device {turn}", ids) for turn in range(2))
        engine.close()
        if tier == "host":
            way_bytes_per_s = link_bytes_per_s(torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True))
        else:
            records = sorted((Path(folder) / "tier").rglob("*.seg"))
            way_bytes_per_s = max(_disk_bytes_per_s(records) for _ in range(2))
    layout = engine.device.layout
    restored, usage = long.restored, long.restored.usage
    cached = usage.cached_host if tier == "host" else usage.cached_disk
    loaded_bytes = cached * layout.block_bytes // layout.block_size + layout.slot_bytes
    return {
        "tier": tier,
        "context_tokens": context_len,
        "computed_s": long.computed_s,
        "restored_s": restored.seconds,
        "suffix_s": suffix_s,  # of the same prompt with its prefix on the device
        "cached_tokens": cached,
        "loaded_bytes": loaded_bytes,
        "stored_bytes": restored.read_bytes,  # as they lie in the tier, coded on disk
        "reading_s": restored.reading_s,  # of the threads that copied or read, together
        "load_s": restored.load_s,  # from the plan to the last byte
        "waited_s": sum(load.end_s - load.begin_s for load in usage.loads),  # by the prompt, its look-up included
        "loaded_bytes_per_s": loaded_bytes / restored.load_s,
        "way_bytes_per_s": way_bytes_per_s,  # of the link or the disk, measured in this run
        "floor_s": restored.read_bytes / way_bytes_per_s + suffix_s,
        "times_faster": long.computed_s / restored.seconds,
        "tokens_per_s": context_len / restored.seconds,
        "gates": [short.gate(), long.gate()],
    }


@dataclass(frozen=True, slots=True)
class Restored:
    """A prompt whose prefix came back from a lower tier."""

    seconds: float  # from its arrival to its end
    load_s: float  # of those, from the plan to the last byte
    read_bytes: int
    reading_s: float  # of the threads that copied or read, together
    usage: Usage


@dataclass(frozen=True, slots=True)
class WayBack:
    """A prompt computed, loaded, and left to the gate."""

    num_tokens: int
    computed_s: float
    restored: Restored
    was_loaded: bool  # when the gate had the choice

    def gate(self) -> dict[str, object]:
        """What the gate chose, and what was faster."""
        return {
            "tokens": self.num_tokens,
            "computed_s": self.computed_s,
            "restored_s": self.restored.seconds,
            "gate_loads": self.was_loaded,
            "loading_is_faster": self.restored.seconds < self.computed_s,
        }


def _way_back(engine: Engine, served: Served, name: str, prompts: list[list[int]]) -> WayBack:
    """Prompts of one length: each computed, the last one brought back too, four times; the fastest counts."""
    cache, ids = engine.cache, prompts[-1]
    computed_s = min(_serve(engine, f"{name} cold {turn}", prompt) for turn, prompt in enumerate(prompts))
    _settle(engine)
    costs, cache.costs = cache.costs, replace(cache.costs, is_gated=False)
    ways: list[Restored] = []
    restores: list[Restore] = []
    ended = cache.restorer.ended

    def note(restore: Restore) -> None:
        restores.append(restore)
        ended(restore)

    cache.restorer.ended = note
    for turn in range(TURNS):
        engine.device.drop_cache()
        bytes_before, s_before = _read(engine)
        seconds = _serve(engine, f"{name} {turn}", ids)
        bytes_after, s_after = _read(engine)
        load_s, read_bytes, reading_s = restores.pop().elapsed_s, bytes_after - bytes_before, s_after - s_before
        ways.append(Restored(seconds, load_s, read_bytes, reading_s, served.usage[f"{name} {turn}"]))
    cache.restorer.ended = ended
    cache.costs = costs
    engine.device.drop_cache()
    _serve(engine, f"{name} gated", ids)
    chosen = served.usage[f"{name} gated"]
    was_loaded = chosen.cached_host + chosen.cached_disk > 0
    return WayBack(len(ids) - SUFFIX_TOKENS, computed_s, min(ways, key=lambda way: way.seconds), was_loaded)


def _read(engine: Engine) -> tuple[int, float]:
    """Bytes that were read from lower tiers so far, and the seconds that threads took for it."""
    stats = [tier.stats for tier in (engine.cache.host, engine.cache.disk) if tier is not None]
    return sum(one.read_bytes for one in stats), sum(one.read_s for one in stats)


def link_bytes_per_s(source: torch.Tensor) -> float:
    """From pinned memory to the device, one long copy."""
    target = torch.empty_like(source, device="cuda")
    seconds: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return source.nbytes / min(seconds)


def _disk_bytes_per_s(paths: list[Path]) -> float:
    """Of the files whole, by direct reads in pieces of a restore's, as many at a time as a restore has."""
    pieces = [(path, at) for path in paths for at in range(0, path.stat().st_size, RUN_BYTES)]
    num_threads = StoreLimits().num_read_threads

    def read(number: int) -> int:
        """Every `num_threads`th piece."""
        buffer, num_bytes = aligned_buffer(RUN_BYTES), 0
        for path, at in pieces[number::num_threads]:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                num_bytes += os.preadv(fd, [buffer], at)
            finally:
                os.close(fd)
        return num_bytes

    with ThreadPoolExecutor(num_threads) as readers:
        began = time.perf_counter()
        num_bytes = sum(readers.map(read, range(num_threads)))
        return num_bytes / (time.perf_counter() - began)


def _serve(engine: Engine, name: str, ids: list[int]) -> float:
    """Seconds from a prompt's arrival to its end, after one token."""
    params = SamplingParams(seed=0, temperature=0.0)
    began = time.perf_counter()
    engine.handle(Submit(name, array("i", ids).tobytes(), 1, 1, 0, (), params, ""))
    while not engine.is_idle:
        engine.step()
        if engine.only_waits:
            time.sleep(0.0005)  # leaves the interpreter to the threads that copy
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _settle(engine: Engine) -> None:
    """Waits until what was offered to the tier below has been written."""
    while not engine.cache.is_settled:
        engine.step()
        time.sleep(0.001)
