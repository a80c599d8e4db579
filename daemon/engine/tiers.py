"""Puts the cache together: which tiers this engine has, how large, and what moves between them."""

import logging
from pathlib import Path

from daemon.config import EngineConfig, EvictionPolicy
from daemon.models.base import Compute, Model
from daemon.sizing import Division
from kernels.dispatch import choose_kernels
from tiers.cache import Costs, LowerTiers, TieredCache
from tiers.device import DeviceTier
from tiers.device_transfer import DeviceTransfer
from tiers.disk import DiskTier
from tiers.eviction import LRU, Weights
from tiers.flops import ComputeCost
from tiers.gate import PrefillSpeed
from tiers.host import HostTier
from tiers.layout import StateLayout
from tiers.mover import Mover
from tiers.pools import DevicePools, HostArena
from tiers.record_store import RecordStore
from tiers.records import Identity
from tiers.shadow import CacheShape
from tiers.spill import Spill
from tiers.spill_reader import SpillReader
from tiers.store import DiskStore
from tiers.streamed import Sources
from tiers.tuner import Tuner
from tiers.worth import Appraiser
from tiers.writedown import WriteLimits

DISK_BYTES = 16 << 30  # quota where none is named
BUSY_BYTES_PER_S = 8 << 20  # of images coded beside steps on the same cores
SPILL_CACHE_BYTES = 32 << 20  # of the blocks that selection picks
NUM_READERS = 2  # threads that restore; a read of many records is shared between them

log = logging.getLogger("downcore.engine")


def open_store(config: EngineConfig, identity: Identity) -> DiskStore | None:
    """The store of the directory that the settings name; None where they name none.

    Raises:
        StoreError: another process has the directory, it is something else, or the disk fails.
    """
    if config.disk_path is None:
        return None
    store = DiskStore.open(Path(config.disk_path), identity, quota_bytes=config.disk_bytes or DISK_BYTES)
    for other in store.unreadable():
        log.info(
            "%d records on disk cannot be used here (%s): %d bytes", other.num_records, other.reason, other.stored_bytes
        )
    return store


def make_device(
    config: EngineConfig, layout: StateLayout, division: Division, *, grid: int, fingerprint: bytes, compute: Compute
) -> DeviceTier:
    """The device's books, with the order that the settings name for what goes first."""
    return DeviceTier(
        layout,
        grid=grid,
        num_blocks=division.num_blocks,
        num_slots=division.num_slots,
        fingerprint=fingerprint,
        appraiser=Appraiser(layout, grid, _cost(compute)),
        weights=Weights() if config.policy is EvictionPolicy.MARCONI else LRU,
    )


def make_tuner(config: EngineConfig, cache: TieredCache) -> Tuner | None:
    """Learns the weights of the lowest tier; None where they are to stay as they are."""
    if config.policy is not EvictionPolicy.MARCONI:
        return None
    device, layout = cache.device, cache.device.layout
    chunk_bytes = device.appraiser.chunk_blocks * layout.block_bytes
    shape = CacheShape(device.grid, chunk_bytes, layout.slot_bytes, device.appraiser.cost)
    budget_bytes = device.blocks.size * layout.block_bytes
    if cache.disk is not None:
        budget_bytes = cache.disk.store.quota_bytes
    elif cache.host is not None:
        budget_bytes = cache.host.chunks.size * cache.host.chunk_bytes
    return Tuner(shape, budget_bytes, device.weights)


def may_stream(config: EngineConfig, model: Model) -> bool:
    """Whether sequences larger than the device may run. On an accelerator that takes a kernel which reads the host."""
    facts = model.facts
    reads_below = facts.device.type == "cpu" or choose_kernels(facts.device, facts.dtype).move_rows is not None
    return config.stream_blocks and model.caps.streaming and reads_below


def make_sources(cache: TieredCache, pools: DevicePools) -> Sources | None:
    """Where forwards of sequences larger than the device read; None where nothing is below it."""
    residency = cache.residency
    if residency is None:
        return None
    assert isinstance(residency.transfer, DeviceTransfer)
    reader = None
    if residency.spill is not None:
        reader = SpillReader(residency.spill, cache_bytes=SPILL_CACHE_BYTES)
    arena = residency.transfer.arena
    planes = {} if arena is None else arena.planes(pools.layout)
    return Sources(residency.space, pools, planes, reader, pools.layout.block_parts)


def _cost(compute: Compute) -> ComputeCost:
    return ComputeCost(matmul_params=compute.matmul_params, pair_flops=compute.pair_flops)


def make_cache(
    config: EngineConfig,
    device: DeviceTier,
    pools: DevicePools,
    mover: Mover,
    *,
    compute: Compute,
    store: RecordStore | None,
) -> TieredCache:
    """The cache over the tiers that the settings name; what the store holds is known from the start."""
    host, arena = None, None
    chunk_bytes = device.layout.block_bytes
    num_chunks = (config.host_bytes or 0) // chunk_bytes
    if num_chunks:
        host = HostTier(device, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
        arena = HostArena(num_chunks, chunk_bytes, is_pinned=pools.blocks.device.type == "cuda")
    disk = None
    if store is not None:
        disk = DiskTier(device, store)
        log.info("%d records on disk", disk.load())
    spill = None
    num_extents = (config.spill_bytes or 0) // (device.grid // device.layout.block_size * chunk_bytes)
    if num_extents and config.stream_blocks:
        assert config.disk_path is not None
        chunk_blocks = device.grid // device.layout.block_size
        spill = Spill(device.layout, Path(config.disk_path), chunk_blocks=chunk_blocks, num_extents=num_extents)
    shares_cores = pools.blocks.device.type == "cpu" and config.write_bytes_per_s is None
    limits = WriteLimits(config.dirty_bytes, config.write_bytes_per_s, BUSY_BYTES_PER_S if shares_cores else None)
    return TieredCache(
        device,
        DeviceTransfer(pools, arena),
        mover,
        lower=LowerTiers(host, disk, spill),
        limits=limits,
        costs=Costs(_cost(compute), PrefillSpeed(), config.break_even),
    )
