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

    model_path: Annotated[str, Meta(description="Hugging Face snapshot folder")]
    load_format: Annotated[
        LoadFormat, Meta(description="safetensors, or dummy: weights made from the seed and config.json")
    ] = LoadFormat.SAFETENSORS
    seed: Annotated[int, Meta(description="of dummy weights")] = 0
    dtype: Annotated[str, Meta(description="auto (the checkpoint's), float32 or bfloat16")] = "auto"
    device: Annotated[str, Meta(description="auto (cuda where there is one), cpu, cuda or cuda:N")] = "auto"
    threads: Annotated[int | None, Meta(description="CPU threads of the forward; without it all cores")] = None
    block_size: Annotated[int, Meta(description="tokens of a block")] = 64
    grid: Annotated[
        int | None, Meta(description="tokens of a prefill chunk; without it 1,024 on a CPU, 4,096 on a GPU")
    ] = None
    pool_bytes: Annotated[
        int | None, Meta(description="device memory for blocks and slots; without it a share of what is free")
    ] = None
    max_context_tokens: Annotated[int | None, Meta(description="longest sequence; without it the model's limit")] = None
    max_sequences: Annotated[int, Meta(description="admitted at a time, prefilling or decoding")] = 64
    max_queue: Annotated[int, Meta(description="requests that wait for admission")] = 1024
    replay: Annotated[bool, Meta(description="decode steps replay captured graphs, on a device that has them")] = True
    growth_window: Annotated[int, Meta(description="tokens reserved ahead of each sequence at admission")] = 512
    slice_ms: Annotated[
        float, Meta(description="longest stretch of a prefill between two decode steps, seen at the forward's pauses")
    ] = 15.0
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
    stream_blocks: Annotated[
        bool,
        Meta(description="on a CPU, run sequences larger than the device's blocks, the rest in tiers below"),
    ] = True
    spill_bytes: Annotated[
        int | None, Meta(description="room beside disk_bytes for blocks of such sequences; without it none on disk")
    ] = None
    stream_share: Annotated[
        float, Meta(description="of the blocks free at its admission, the most that such a sequence keeps resident")
    ] = 0.5
    min_tokens_per_s: Annotated[
        float, Meta(description="a sequence larger than the device that would be slower is refused")
    ] = 0.0
    flush_window_s: Annotated[
        float, Meta(description="how long an ending engine may write down what the disk tier lacks")
    ] = 15.0

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
        if self.spill_bytes is not None:
            _within("spill_bytes", self.spill_bytes, 0, 1 << 50)
            if self.disk_path is None:
                raise ValueError("spill_bytes needs disk_path")
        _within("stream_share", self.stream_share, 0.0, 1.0)
        _within("min_tokens_per_s", self.min_tokens_per_s, 0.0, 1e6)
        _within("flush_window_s", self.flush_window_s, 0.0, 3600.0)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, not {self.dtype!r}")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} must be from {low} to {high}, not {value}")
