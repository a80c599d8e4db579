"""Puts the cache together: which tiers this engine has, how large, and what moves between them."""

import logging

from daemon.config import EngineConfig
from tiers.cache import LowerTiers, TieredCache
from tiers.device import DeviceTier
from tiers.disk import DiskTier, RecordStore
from tiers.host import HostTier
from tiers.mover import Mover
from tiers.pools import DevicePools, HostArena
from tiers.transfer import Transfer
from tiers.writedown import WriteLimits

DISK_BYTES = 16 << 30  # quota where none is named
NUM_READERS = 2  # threads that restore; a read of many records is shared between them

log = logging.getLogger("downcore.engine")


def make_cache(
    config: EngineConfig, device: DeviceTier, pools: DevicePools, mover: Mover, store: RecordStore | None
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
        quota_bytes = config.disk_bytes or DISK_BYTES
        disk = DiskTier(device.tree, store, fingerprint=device.fingerprint, quota_bytes=quota_bytes)
        log.info("%d records on disk", disk.load())
    limits = WriteLimits(config.dirty_bytes, config.write_bytes_per_s)
    return TieredCache(device, Transfer(pools, arena), mover, lower=LowerTiers(host, disk), limits=limits)
