"""Every byte of a tier by owner and kind, read from the books that decide about it."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.resources import Resources
from tiers.spill import Spill


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes of one kind that one owner has. The entries of a kind sum to its pool."""

    kind: str  # "blocks" or "slots"
    owner: str  # "free", "cache", "reserved", "shared", "astray" or a sequence's id
    num_bytes: int
    count: int


def device_ledger(device: DeviceTier, owners: Sequence[Resources]) -> list[Entry]:
    """Who has each block and each slot of the device. What several sequences hold is "shared", once."""
    in_tree = {node.block_id for node in device.tree.nodes()}
    checkpoints = {node.checkpoint for node in device.tree.nodes() if node.checkpoint is not None}
    reserved = {"block": set(device.reserved_blocks), "slot": set(device.reserved_slots)}
    entries: list[Entry] = []
    for kind, pool, cached, size in (
        ("block", device.blocks, in_tree, device.layout.block_bytes),
        ("slot", device.slots, checkpoints, device.layout.slot_bytes),
    ):
        holders: dict[Hashable, list[str]] = {}
        for resources in owners:
            for id_ in resources.ids(kind):
                holders.setdefault(id_, []).append(resources.owner)
        counts: Counter[str] = Counter()
        for id_ in range(pool.size):
            names = holders.get(id_, [])
            if pool.refs(id_) == 0:
                counts["free"] += 1
            elif len(names) > 1:
                counts["shared"] += 1
            elif names:
                counts[names[0]] += 1
            elif id_ in cached:
                counts["cache"] += 1
            else:
                counts["reserved" if id_ in reserved[kind] else "astray"] += 1
        entries += [Entry(f"{kind}s", owner, count * size, count) for owner, count in sorted(counts.items())]
    return entries


def host_ledger(host: HostTier, owners: Sequence[Resources]) -> list[Entry]:
    """Who has each chunk of the arena. A chunk of the tree's that somebody uses counts as the tree's."""
    size = host.chunk_bytes
    counts: Counter[str] = Counter({"free": host.chunks.num_free, "cache": host.num_cached_chunks})
    for resources in owners:
        for chunks in resources.ids("host chunks"):
            counts[resources.owner] += host.size_of(chunks)
    counts.update(_by_owner(host.private_chunks(owners)))
    counts["astray"] = host.chunks.size - counts.total()
    return [Entry("chunks", owner, count * size, count) for owner, count in sorted(counts.items()) if count]


def spill_ledger(spill: Spill, owners: Sequence[Resources]) -> list[Entry]:
    """Who has each extent of the spill."""
    counts = _by_owner((number, r.owner) for r in owners for number in r.ids("spill extent"))
    counts["free"] = spill.extents.num_free
    counts["astray"] = spill.extents.size - counts.total()
    return [Entry("spill", who, n * spill.extent_bytes, n) for who, n in sorted(counts.items()) if n]


def _by_owner(held: Iterable[tuple[Hashable, str]]) -> Counter[str]:
    """How many ids each owner has; one that several have is "shared", once."""
    owners: dict[Hashable, set[str]] = {}
    for id_, owner in held:
        owners.setdefault(id_, set()).add(owner)
    return Counter(next(iter(names)) if len(names) == 1 else "shared" for names in owners.values())


def disk_ledger(disk: DiskTier) -> list[Entry]:
    """What the quota is spent on: records of the tree, and everything else that du counts."""
    cached, used = disk.cached_bytes, disk.store.usage_bytes
    return [
        Entry("records", "cache", cached, disk.num_records),
        Entry("files", "index, log and records of others", max(0, used - cached), 1),
        Entry("records", "free", disk.store.quota_bytes - used, 0),
    ]
