"""One prompt at a time, a grid chunk at a time: from what is cached to the prompt's last row.

What must hold: a chunk dropped half-way has changed nothing that anybody reads; only blocks of whole grid chunks
reach the tree, after their chunk; a checkpoint is the state at the very position of its node.
"""

import torch

from daemon.engine.rate import PrefillRate
from daemon.engine.runner import Chunk, Runner
from daemon.engine.scheduler import Scheduler
from daemon.engine.sequence import Sequence
from tiers.cache import TieredCache
from tiers.device import Match, MatchEnd
from tiers.keys import token_bytes
from tiers.pools import DevicePools


class Prefill:
    """Owns the chunk in flight, which is registered in its sequence's resources."""

    def __init__(
        self,
        *,
        pools: DevicePools,
        cache: TieredCache,
        scheduler: Scheduler,
        runner: Runner,
        rate: PrefillRate,
        slice_s: float,
    ) -> None:
        self.pools = pools
        self.cache = cache
        self.device = cache.device
        self.scheduler = scheduler
        self.runner = runner
        self.rate = rate
        self.slice_s = slice_s
        self.chunk: Chunk | None = None

    def begin(self, sequence: Sequence, match: Match, now: float) -> None:
        """Gives a sequence the state that its prompt resumes from, and decides which states will be worth keeping."""
        request, grid = sequence.request, self.device.grid
        assert sequence.slot is not None
        if match.nodes and self.pools.layout.slots:
            assert match.checkpoint is not None, "attention without state is a miss"
            self.pools.copy_slot(match.checkpoint, sequence.slot)
        else:
            self.pools.clear_slot(sequence.slot)
        if request.admitted is None:
            request.admitted = now
            request.cached_len = match.resume_len
            self.device.stats.hit_tokens += match.resume_len
            self.device.stats.miss_tokens += request.prompt_len - match.resume_len
        ends = {request.prompt_len // grid * grid, (request.prompt_len - 1) // grid * grid}
        if match.end is not MatchEnd.WHOLE:
            ends.add(match.known_len)  # the branch point: others came this way and may again
        sequence.checkpoint_at = frozenset(ends)

    def advance(self, sequence: Sequence) -> torch.Tensor | None:
        """One slice of the sequence's chunk; logits [1, vocab_size] once the prompt's last row is computed.

        Raises:
            RuntimeError, HostStageError: the forward failed. The chunk is still held, by the sequence.
        """
        if self.chunk is None:
            self._adopt_newer(sequence)
            start, end = self.scheduler.start_chunk(sequence)
            self.chunk = self.runner.start_chunk(sequence, start, end)
            sequence.resources.hold("chunk", start, self._drop_chunk)
        chunk = self.chunk
        logits = self.runner.advance(chunk, self.slice_s)
        if logits is None:
            return None
        sequence.resources.drop("chunk", chunk.start)
        self._take_state(sequence, chunk)
        self._publish(sequence, chunk)
        return None if sequence.in_prompt else logits

    def _drop_chunk(self) -> None:
        assert self.chunk is not None
        self.chunk.forward.close()
        self.chunk = None

    def _adopt_newer(self, sequence: Sequence) -> None:
        """Takes over what another sequence with the same prompt has published since this one was admitted."""
        device, request = self.device, sequence.request
        if len(sequence.nodes) * device.layout.block_size != sequence.computed_len:
            return
        after = sequence.nodes[-1] if sequence.nodes else None
        match = device.lookup(request.prompt_ids, request.submit.namespace, after)
        if match.resume_len <= sequence.computed_len:
            return
        for node in match.nodes:
            position = len(sequence.nodes)
            sequence.block_table[position] = device.adopt(sequence.resources, sequence.block_table[position], node)
            sequence.nodes.append(node)
        if self.pools.layout.slots:
            assert match.checkpoint is not None
            assert sequence.slot is not None
            self.pools.copy_slot(match.checkpoint, sequence.slot)
        gained = match.resume_len - sequence.computed_len
        sequence.computed_len = match.resume_len
        if request.prefilled is None:
            request.cached_len += gained
            device.stats.hit_tokens += gained
            device.stats.miss_tokens -= gained

    def _take_state(self, sequence: Sequence, chunk: Chunk) -> None:
        """The state after the chunk becomes the sequence's: its slot and the shadow change places."""
        device = self.device
        assert sequence.slot is not None
        fresh = self.runner.swap_shadow(sequence.slot)
        device.reserved_slots[-1] = self.runner.shadow_slot
        sequence.resources.swap("slot", sequence.slot, fresh, lambda: device.slots.release(fresh))
        sequence.slot = fresh
        sequence.computed_len = chunk.end
        if chunk.end - chunk.start == device.grid:
            self.rate.saw(device.grid, chunk.elapsed_s)
            costs = self.cache.costs
            costs.prefill.observe(costs.cost.flops(chunk.start, chunk.end), chunk.elapsed_s)

    def _publish(self, sequence: Sequence, chunk: Chunk) -> None:
        """The blocks of a whole grid chunk become the tree's; the state after it a checkpoint, where worth keeping."""
        device, size = self.device, self.device.layout.block_size
        if chunk.end - chunk.start < device.grid or len(sequence.nodes) * size != chunk.start:
            return
        for start in range(chunk.start, chunk.end, size):
            position = start // size
            node = device.publish(
                sequence.resources,
                parent=sequence.nodes[-1] if sequence.nodes else None,
                namespace=sequence.request.submit.namespace,
                tokens=token_bytes(sequence.token_ids[start : start + size]),
                block_id=sequence.block_table[position],
            )
            if node is None:
                return
            assert node.block_id is not None
            sequence.block_table[position] = node.block_id
            sequence.nodes.append(node)
        if self.pools.layout.slots and chunk.end in sequence.checkpoint_at:
            slot_id = device.take_checkpoint(sequence.nodes[-1])
            if slot_id is not None:
                assert sequence.slot is not None
                self.pools.copy_slot(sequence.slot, slot_id)
            self.cache.offer(sequence.nodes[-1])
        elif not self.pools.layout.slots:
            self.cache.offer(sequence.nodes[-1])
