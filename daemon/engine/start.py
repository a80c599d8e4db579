"""Makes an engine ready: threads, weights, budgets, pools, and the digests that say whose bytes it can read."""

import hashlib
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import daemon.layers
import daemon.models
import daemon.weights
import kernels
from daemon.cache_messages import TierName
from daemon.config import EngineConfig
from daemon.engine.decode_step import CanaryError
from daemon.engine.engine import Engine
from daemon.engine.tiers import NUM_READERS, make_cache, make_device, open_store
from daemon.messages import EngineInfo, ToFront
from daemon.models.load import LoadedModel, load_model
from daemon.sizing import divide, free_budget
from daemon.weights.errors import LoadError
from kernels.dispatch import choose_kernels
from tiers.errors import StoreError
from tiers.keys import state_fingerprint
from tiers.layout import StateLayout
from tiers.mover import ThreadMover
from tiers.pools import DevicePools
from tiers.records import Identity

CPU_GRID, GPU_GRID = 1024, 4096  # tokens
CPU_INFO = Path("/proc/cpuinfo")
PROCESSOR_FACTS = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
}
FORMAT_VERSION = b"1"  # of images and keys: a change makes every older byte unreadable, on purpose

log = logging.getLogger("downcore.engine")


class StartError(Exception):
    """The engine cannot start with these settings on this machine."""


def start(
    config: EngineConfig, *, send: Callable[[ToFront], None], progress: Callable[[int, int], None]
) -> tuple[Engine, EngineInfo]:
    """Loads the model and allocates everything that the engine will ever hold on its device.

    Args:
        progress: called with (bytes of weights read, bytes in all).

    Raises:
        StartError: a setting does not fit, the folder is unusable, or there is no room.
    """
    _fix_numerics(config)
    grid = config.grid or (CPU_GRID if _is_cpu(config) else GPU_GRID)
    try:
        loaded = load_model(msgspec.structs.replace(config, grid=grid), progress)
        layout = loaded.model.layout(config.block_size)
        layout.check_grid(grid)
        _check_rooms(config, layout, grid)
        budget = config.pool_bytes or free_budget(loaded.model.facts.device)
        division = divide(budget, layout, max_sequences=config.max_sequences, grid=grid)
    except (LoadError, ValueError) as error:
        raise StartError(str(error)) from error
    fingerprint = _fingerprint(config, loaded, layout, grid)
    num_blocks, num_slots = division.num_blocks, division.num_slots
    try:
        pools = DevicePools(layout, num_blocks, num_slots, loaded.model.facts.device)
    except RuntimeError as error:
        raise StartError(f"pool_bytes: {str(error).splitlines()[0]}") from error
    device = make_device(config, layout, division, grid=grid, fingerprint=fingerprint, compute=loaded.model.compute)
    profile = _numerics_profile(loaded.model.facts.dtype, loaded.model.facts.device)
    try:
        store = open_store(config, Identity(fingerprint, profile, layout))
    except StoreError as error:
        raise StartError(f"the disk tier: {error}") from error
    mover = ThreadMover(NUM_READERS)
    try:
        cache = make_cache(config, device, pools, mover, compute=loaded.model.compute, store=store)
    except (OSError, RuntimeError) as error:
        mover.close()
        raise StartError(f"the tiers below the device: {str(error).splitlines()[0]}") from error
    engine = Engine(
        config=config,
        model=loaded.model,
        pools=pools,
        cache=cache,
        send=send,
        clock=time.monotonic,
        unix_clock=time.time,
    )
    engine.grammars.prepare()
    try:
        with torch.inference_mode():
            engine.runner.prove(config.max_sequences)
    except (CanaryError, AssertionError) as error:  # kernels assert the sizes that they take
        raise StartError(f"the canary step failed: {error}") from error
    facts = loaded.model.facts
    info = EngineInfo(
        model=Path(config.model_path).name,
        family=facts.family,
        parameters=facts.num_parameters,
        dtype=str(facts.dtype).removeprefix("torch."),
        device=str(facts.device),
        vocab_size=facts.vocab_size,
        max_context_tokens=engine.max_context_tokens,
        block_size=config.block_size,
        grid=grid,
        num_blocks=num_blocks,
        num_slots=num_slots,
        bytes_per_token=layout.bytes_per_token,
        slot_bytes=layout.slot_bytes,
        state_fingerprint=fingerprint.hex(),
        numerics_profile=profile.hex(),
        tiers=tuple(TierName(name) for name in cache.names),
        eos_token_ids=facts.eos_token_ids,
    )
    log.info(
        "%d blocks of %d bytes, %d slots of %d bytes", num_blocks, layout.block_bytes, num_slots, layout.slot_bytes
    )
    return engine, info


def _check_rooms(config: EngineConfig, layout: StateLayout, grid: int) -> None:
    """Raises ValueError for a tier that is asked for, and too small to hold anything."""
    chunk_bytes = grid // layout.block_size * layout.block_bytes
    for name, num_bytes, least, what in (
        ("host_bytes", config.host_bytes, layout.block_bytes, "a block"),
        ("spill_bytes", config.spill_bytes, chunk_bytes, "a grid chunk"),
    ):
        if num_bytes and num_bytes < least:
            raise ValueError(f"{name} of {num_bytes} cannot hold {what} of {least} bytes; 0 is none")


def _fix_numerics(config: EngineConfig) -> None:
    """Threads and precision flags, fixed before the first operation: bytes depend on them."""
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _is_cpu(config: EngineConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())


def _fingerprint(config: EngineConfig, loaded: LoadedModel, layout: StateLayout, grid: int) -> bytes:
    tokenizer = Path(config.model_path) / "tokenizer.json"
    tokenizer_digest = b""
    if tokenizer.is_file():
        tokenizer_digest = hashlib.blake2b(tokenizer.read_bytes(), digest_size=32).digest()
    return state_fingerprint(
        {
            "adapters": b"",
            "architecture": loaded.architecture_digest,
            "dtype": str(loaded.model.facts.dtype).encode(),
            "format": FORMAT_VERSION,
            "grid": str(grid).encode(),
            "layout": layout.digest(),
            "parallel": b"1",
            "tokenizer": tokenizer_digest,
            "weights": loaded.weights_digest,
        }
    )


def _processor(info: Path) -> str:
    """What libraries choose their code by: not the instruction set alone, but the very model and its extensions."""
    try:
        lines = info.read_text().partition("\n\n")[0].splitlines()  # of the first core
    except OSError:
        lines = []
    told = (line.partition(":") for line in lines)
    facts = [f"{key.strip()}={value.strip()}" for key, _, value in told if key.strip() in PROCESSOR_FACTS]
    return "\n".join((platform.machine(), *facts))


def _numerics_profile(dtype: torch.dtype, device: torch.device) -> bytes:
    """Would another machine compute the same bytes? Two that agree here would."""
    sources = hashlib.blake2b(digest_size=32)
    for package in (kernels, daemon.layers, daemon.models, daemon.weights):
        folder = Path(package.__path__[0])
        for path in sorted((*folder.glob("*.py"), *folder.glob("tables/*.json"))):
            sources.update(path.name.encode() + b"\0" + path.read_bytes())
    is_gpu = device.type == "cuda"
    return state_fingerprint(
        {
            "device": (torch.cuda.get_device_name(device) if is_gpu else _processor(CPU_INFO)).encode(),
            "dtype": str(dtype).encode(),
            "forms": choose_kernels(device, dtype).name.encode(),
            "instructions": torch.backends.cpu.get_cpu_capability().encode(),
            "python": sys.version.encode(),
            "sources": sources.digest(),
            "threads": str(torch.get_num_threads()).encode(),
            "torch": torch.__version__.encode() + torch.__config__.show().encode(),
        }
    )
