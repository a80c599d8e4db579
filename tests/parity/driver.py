"""Runs sequences through a model by hand: blocks from a shuffled free list, chunks, decode steps, reuse under poison.

Knows no family and no plane or slot by name. Whatever is not held is full of NaN (bytes of ones), so that a result that
read it cannot pass.
"""

import dataclasses
from dataclasses import dataclass, field

import torch

from daemon.batch import SequenceRows, make_batch
from daemon.models.base import Model, finish
from tiers.pools import DevicePools

POISON = 0xFF  # every float of such bytes is NaN, every signed integer -1


@dataclass(slots=True)
class Sequence:
    """Tokens whose state lies in the driver's pools: positions [0, computed_len)."""

    slot: int
    computed_len: int = 0
    block_table: list[int] = field(default_factory=list)


class Driver:
    """Owns pools and free lists. The last slot is the shadow that a chunk writes its state to."""

    def __init__(self, model: Model, *, block_size: int, num_blocks: int = 64, num_slots: int = 12, seed: int = 0):
        self.model = model
        self.block_size = block_size
        self.pools = DevicePools(model.layout(block_size), num_blocks, num_slots, model.facts.device)
        self.pools.blocks.fill_(POISON)
        self.pools.slots.fill_(POISON)
        generator = torch.Generator().manual_seed(seed)
        self.free_blocks = torch.randperm(num_blocks, generator=generator).tolist()
        self.free_slots = torch.randperm(num_slots, generator=generator).tolist()
        self.shadow = self.free_slots.pop()

    def add(self) -> Sequence:
        """A sequence with nothing computed."""
        slot = self.free_slots.pop()
        self.pools.clear_slot(slot)
        return Sequence(slot)

    def free(self, sequence: Sequence) -> None:
        """Gives everything back and poisons it; the next to come reuses it first."""
        self.pools.blocks[sequence.block_table] = POISON
        self.pools.slots[sequence.slot] = POISON
        self.free_blocks.extend(sequence.block_table)
        self.free_slots.append(sequence.slot)

    def chunk(self, sequence: Sequence, token_ids: list[int]) -> torch.Tensor:
        """Computes the next tokens in one forward, through the shadow slot; logits of all of them."""
        rows = self._rows(sequence, token_ids, slot_out=self.shadow, want_all_logits=True)
        logits = self._forward([rows])
        sequence.slot, self.shadow = self.shadow, sequence.slot
        self.pools.slots[self.shadow] = POISON
        sequence.computed_len += len(token_ids)
        return logits

    def chunks(self, sequence: Sequence, token_ids: list[int], sizes: list[int]) -> torch.Tensor:
        """Computes all tokens in chunks of these sizes; logits of all of them."""
        assert sum(sizes) == len(token_ids)
        logits: list[torch.Tensor] = []
        begin = 0
        for size in sizes:
            logits.append(self.chunk(sequence, token_ids[begin : begin + size]))
            begin += size
        return torch.cat(logits)

    def prefill(self, sequence: Sequence, token_ids: list[int], grid: int) -> torch.Tensor:
        """Computes all tokens in chunks on the grid; logits of all of them."""
        assert sequence.computed_len % grid == 0
        full, rest = divmod(len(token_ids), grid)
        return self.chunks(sequence, token_ids, [grid] * full + ([rest] if rest else []))

    def step(self, rows: list[tuple[Sequence, list[int]]]) -> torch.Tensor:
        """One forward of a few tokens of each of several sequences, in this order; logits of all rows."""
        batch = [self._rows(s, tokens, slot_out=s.slot, want_all_logits=True) for s, tokens in rows]
        logits = self._forward(batch)
        for sequence, tokens in rows:
            sequence.computed_len += len(tokens)
        return logits

    def verify(self, rows: list[tuple[Sequence, list[int]]]) -> tuple[torch.Tensor, list[list[int]]]:
        """One forward whose every row leaves its state in a slot of its own; logits of all rows, and those slots."""
        batch: list[SequenceRows] = []
        slots: list[list[int]] = []
        for sequence, tokens in rows:
            slots.append([self.free_slots.pop() for _ in tokens])
            part = self._rows(sequence, tokens, slot_out=sequence.slot, want_all_logits=True)
            batch.append(dataclasses.replace(part, row_slots=slots[-1]))
        return self._forward(batch), slots

    def keep(self, sequence: Sequence, slots: list[int], num_rows: int) -> None:
        """Keeps the first `num_rows` rows that were verified, and drops the others with their states."""
        assert num_rows > 0
        self.pools.slots[sequence.slot] = POISON
        self.free_slots.append(sequence.slot)
        for dropped in slots[: num_rows - 1] + slots[num_rows:]:
            self.pools.slots[dropped] = POISON
            self.free_slots.append(dropped)
        sequence.slot = slots[num_rows - 1]
        sequence.computed_len += num_rows

    def drop_after(self, sequence: Sequence, token_ids: list[int], pauses: int) -> bool:
        """Begins a chunk and drops it at its pause number `pauses`; False where it ended before."""
        rows = self._rows(sequence, token_ids, slot_out=self.shadow, want_all_logits=True)
        batch = make_batch([rows], self.block_size, self.model.facts.device)
        with torch.inference_mode():
            forward = self.model.forward(batch, self.pools)
            try:
                for _ in range(pauses + 1):
                    next(forward)
            except StopIteration:
                return False
            forward.close()
        return True

    def fork(self, sequence: Sequence, length: int) -> Sequence:
        """A sequence with the first `length` tokens of another's planes, copied into other blocks; its slot, copied."""
        child = self.add()
        child.computed_len = length
        for block in sequence.block_table[: -(-length // self.block_size)]:
            child.block_table.append(self.free_blocks.pop())
            self.pools.copy_block(block, child.block_table[-1])
        if self.pools.layout.slot_bytes:
            self.pools.copy_slot(sequence.slot, child.slot)
        return child

    def state(self, sequence: Sequence) -> dict[str, torch.Tensor]:
        """What a sequence holds, by name: whole plane rows up to its length, and its slot tensors; copies."""
        held: dict[str, torch.Tensor] = {}
        for plane in self.pools.layout.planes:
            rows = self.pools.planes[plane.name][sequence.block_table].flatten(0, 1)
            held[plane.name] = rows[: sequence.computed_len // plane.tokens_per_row].clone()
        for slot in self.pools.layout.slots:
            held[slot.name] = self.pools.slot_tensors[slot.name][sequence.slot].clone()
        return held

    def _rows(self, sequence: Sequence, token_ids: list[int], *, slot_out: int, want_all_logits: bool) -> SequenceRows:
        end = sequence.computed_len + len(token_ids)
        while len(sequence.block_table) * self.block_size < end:
            sequence.block_table.append(self.free_blocks.pop())
        return SequenceRows(
            token_ids, sequence.computed_len, sequence.block_table, sequence.slot, slot_out, want_all_logits
        )

    def _forward(self, rows: list[SequenceRows]) -> torch.Tensor:
        batch = make_batch(rows, self.block_size, self.model.facts.device)
        with torch.inference_mode():
            return finish(self.model.forward(batch, self.pools))
