"""What a subscriber of the blocks that come and go makes of them: the copies that there are, by tier."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from smg_grpc_proto.generated import common_pb2 as common

from daemon.cache_messages import TierName
from daemon.front.vllm.kv import TIERS, message_of
from daemon.kv_messages import KvBatch, KvSnapshot

NAMES = {number: tier for tier, number in TIERS.items()}


@dataclass(slots=True)
class Mirror:
    """Takes what goes over the wire. `copies`: of each tier and block, the block before it and its token ids."""

    copies: dict[tuple[TierName, int], tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    sequence: int = 0
    num_parts: int = 0  # of snapshots
    num_came: Counter[TierName] = field(default_factory=Counter)  # copies, by tier
    num_left: Counter[TierName] = field(default_factory=Counter)
    _next_part: int = 0

    def take(self, told: KvBatch | KvSnapshot) -> None:
        """A batch or part, by way of the message that a gateway reads."""
        self.read(common.KvEventBatch.FromString(message_of(told).SerializeToString()))

    def read(self, batch: common.KvEventBatch) -> None:
        """A message, which must follow the one before it without a gap or be of a snapshot."""
        if batch.HasField("snapshot"):
            assert batch.snapshot.index == self._next_part
            assert batch.snapshot.index == 0 or batch.sequence_number == self.sequence + 1
            assert (batch.snapshot.index == 0) == any(event.HasField("cleared") for event in batch.events)
            self._next_part = (batch.snapshot.index + 1) % batch.snapshot.count
            self.num_parts += 1
        else:
            assert self._next_part == 0, "a batch amid the parts of a snapshot"
            assert batch.sequence_number == self.sequence + 1, "a gap"
            assert batch.events
        self.sequence = batch.sequence_number
        self._apply(batch.events)
        if batch.HasField("snapshot") and self._next_part == 0:
            assert len(self.copies) == batch.snapshot.blocks

    def blocks(self, tier: TierName) -> set[int]:
        return {key for where, key in self.copies if where is tier}

    def _apply(self, events: Iterable[common.KvCacheEvent]) -> None:
        for event in events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.copies.clear()
                case "stored":
                    tier = NAMES[event.stored.tier]
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert (tier, block.block_hash) not in self.copies, "it is there already"
                        assert block.block_size == len(block.token_ids) > 0
                        self.copies[(tier, block.block_hash)] = (parent, tuple(block.token_ids))
                        self.num_came[tier] += 1
                        parent = block.block_hash
                case "removed":
                    tier = NAMES[event.removed.tier]
                    for key in event.removed.block_hashes:
                        del self.copies[(tier, key)]
                        self.num_left[tier] += 1
                case _:
                    raise AssertionError("an event of no kind")
