"""Times the way back of a long prefix from a lower tier, beside computing it: a real engine, weights made up."""

import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from daemon.config import EngineConfig, LoadFormat
from daemon.engine.engine import Engine
from daemon.engine.start import start
from daemon.messages import Rejected, SamplingParams, Started, Submit, ToFront, Usage
from kernels.host import ints

SUFFIX_TOKENS = 64  # of the prompt, past the last position of the grid
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
        ids = ints(torch.randint(3, info.vocab_size, (context_len + SUFFIX_TOKENS,)))
        with torch.inference_mode():
            _serve(engine, "compile", ids[: 2 * info.grid + 7])
            engine.device.drop_cache()
            computed_s = _serve(engine, "cold", ids)
            _settle(engine)
            engine.device.drop_cache()
            restored_s = _serve(engine, "again", ids)
            engine.device.drop_cache()
            restored_s = min(restored_s, _serve(engine, "third", ids))
        engine.close()
    usage = served.usage["third"]
    cached = usage.cached_host if tier == "host" else usage.cached_disk
    layout = engine.device.layout
    loaded_bytes = cached * layout.block_bytes // layout.block_size + layout.slot_bytes
    load_s = sum(load.end_s - load.begin_s for load in usage.loads)
    return {
        "tier": tier,
        "context_tokens": context_len,
        "computed_s": computed_s,
        "restored_s": restored_s,
        "cached_tokens": cached,
        "loaded_bytes": loaded_bytes,
        "load_s": load_s,
        "loaded_bytes_per_s": loaded_bytes / load_s if load_s else 0.0,
        "times_faster": computed_s / restored_s,
        "tokens_per_s": context_len / restored_s,
    }


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
