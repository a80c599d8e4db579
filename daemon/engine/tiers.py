"""Puts the cache together: which tiers this engine has, how large, and what moves between them."""

import logging
from pathlib import Path

from daemon.config import EngineConfig
from daemon.models.base import Compute
from tiers.cache import Costs, LowerTiers, TieredCache
from tiers.device import DeviceTier
from tiers.disk import DiskTier, RecordStore
from tiers.flops import ComputeCost
from tiers.gate import PrefillSpeed
from tiers.host import HostTier
from tiers.mover import Mover
from tiers.pools import DevicePools, HostArena
from tiers.records import Identity
from tiers.store import DiskStore
from tiers.transfer import Transfer
from tiers.writedown import WriteLimits

DISK_BYTES = 16 << 30  # quota where none is named
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
        host = HostTier(device.tree, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
        arena = HostArena(num_chunks, chunk_bytes, is_pinned=pools.blocks.device.type == "cuda")
    disk = None
    if store is not None:
        disk = DiskTier(device, store)
        log.info("%d records on disk", disk.load())
    limits = WriteLimits(config.dirty_bytes, config.write_bytes_per_s)
    cost = ComputeCost(matmul_params=compute.matmul_params, pair_flops=compute.pair_flops)
    return TieredCache(
        device,
        Transfer(pools, arena),
        mover,
        lower=LowerTiers(host, disk),
        limits=limits,
        costs=Costs(cost, PrefillSpeed(), config.break_even),
    )
