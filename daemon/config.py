"""The engine's settings, frozen and checked when made. The front parses them and sends them over."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

MIN_DISK_BYTES = 64 << 20  # index, write-ahead log and a few segments


class LoadFormat(StrEnum):
    """Where weights come from."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"  # seeded random weights made from config.json alone


class EvictionPolicy(StrEnum):
    """Which prefix goes first when a tier is full."""

    MARCONI = "marconi"  # the least of recency and FLOPs saved for each byte
    LRU = "lru"  # the one not used for longest


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and bounds of one engine. None means: chosen at start-up from the model and the machine.

    Raises:
        ValueError: a value is out of its bounds; the message names the field and the bounds.
    """

    model_path: str
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    seed: int = 0  # of dummy weights
    dtype: str = "auto"  # auto: the checkpoint's; or float32, bfloat16
    device: str = "auto"  # auto: cuda where there is one, else cpu; or cpu, cuda, cuda:N
    threads: int | None = None  # CPU threads of the forward; None: all cores
    block_size: int = 64  # tokens
    grid: int | None = None  # tokens; None: 1,024 on a CPU, 4,096 on a GPU
    pool_bytes: int | None = None  # device budget for blocks and slots; None: a share of what is free
    max_context_tokens: int | None = None  # None: the model's own limit
    max_sequences: int = 64  # admitted at a time, prefilling or decoding
    max_queue: int = 1024  # requests that wait for admission
    growth_window: int = 512  # tokens reserved ahead of each sequence at admission
    slice_ms: float = 15.0  # longest stretch of a prefill between two decode steps, checked at the forward's pauses
    pin_fraction: float = 0.0  # of the blocks, the most that pins may bind
    policy: Annotated[EvictionPolicy, Meta(description="what goes first from a full tier: marconi or lru")] = (
        EvictionPolicy.MARCONI
    )
    host_bytes: Annotated[int | None, Meta(description="bytes of the host tier; without it, or 0, there is none")] = (
        None
    )
    disk_path: Annotated[str | None, Meta(description="directory of the disk tier; without it there is none")] = None
    disk_bytes: Annotated[int | None, Meta(description="the most that du may say of it; without it 16 GiB")] = None
    write_bytes_per_s: Annotated[
        int | None, Meta(description="bytes written down to disk a second; without it all, and few beside steps")
    ] = None
    break_even: Annotated[
        bool, Meta(description="load a prefix from a lower tier only where computing it would take longer")
    ] = True
    restore_timeout_s: Annotated[
        float, Meta(description="longest wait for a prefix from a lower tier; then it is computed")
    ] = 5.0
    dirty_bytes: Annotated[
        int, Meta(description="most bytes waiting to be written down; beyond it writes are dropped")
    ] = 256 << 20

    def __post_init__(self) -> None:
        _within("block_size", self.block_size, 1, 1024)
        if self.grid is not None:
            _within("grid", self.grid, self.block_size, 65536)
            if self.grid % self.block_size:
                raise ValueError(f"grid {self.grid} is not a multiple of block_size {self.block_size}")
        if self.pool_bytes is not None:
            _within("pool_bytes", self.pool_bytes, 1, 1 << 44)
        if self.max_context_tokens is not None:
            _within("max_context_tokens", self.max_context_tokens, 1, 1 << 30)
        if self.threads is not None:
            _within("threads", self.threads, 1, 1024)
        _within("max_sequences", self.max_sequences, 1, 4096)
        _within("max_queue", self.max_queue, 1, 1_000_000)
        _within("growth_window", self.growth_window, 1, 1 << 20)
        _within("slice_ms", self.slice_ms, 0.1, 10_000)
        _within("pin_fraction", self.pin_fraction, 0.0, 1.0)
        if self.host_bytes is not None:
            _within("host_bytes", self.host_bytes, 0, 1 << 44)
        if self.disk_path is not None and not self.disk_path:
            raise ValueError("disk_path is empty")
        if self.disk_bytes is not None:
            _within("disk_bytes", self.disk_bytes, MIN_DISK_BYTES, 1 << 50)
            if self.disk_path is None:
                raise ValueError("disk_bytes needs disk_path")
        if self.write_bytes_per_s is not None:
            _within("write_bytes_per_s", self.write_bytes_per_s, 1 << 20, 1 << 40)
        _within("restore_timeout_s", self.restore_timeout_s, 0.0, 3600.0)
        _within("dirty_bytes", self.dirty_bytes, 1 << 20, 1 << 40)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, not {self.dtype!r}")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} must be from {low} to {high}, not {value}")
