"""One prompt at a time, a grid chunk at a time: from what is cached to the prompt's last row.

What must hold: a chunk dropped half-way has changed nothing that anybody reads; only blocks of whole grid chunks
reach the tree, after their chunk; a checkpoint is the state at the very position of its node.
"""

import logging

import torch

from daemon.engine.rate import PrefillRate
from daemon.engine.runner import Chunk, Runner
from daemon.engine.scheduler import Scheduler
from daemon.engine.sequence import Request, Sequence, SequenceState
from daemon.layers.steps import HostStageError
from tiers.admission import checkpoint_positions
from tiers.cache import TieredCache
from tiers.history import PASSED_GAP_S
from tiers.keys import token_bytes
from tiers.match import Match, MatchEnd
from tiers.pools import DevicePools
from tiers.shadow import Visit
from tiers.spill import SpillError
from tiers.tuner import Tuner

MAX_LOSSES = 3  # of blocks below the device, without a row more than before each

log = logging.getLogger("downcore.engine")


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
        tuning: Tuner | None,
    ) -> None:
        self.pools = pools
        self.cache = cache
        self.device = cache.device
        self.scheduler = scheduler
        self.runner = runner
        self.rate = rate
        self.tuning = tuning
        self.slice_s = slice_s
        self.chunk: Chunk | None = None

    def begin(self, sequence: Sequence, match: Match, now: float) -> None:
        """Gives a sequence the state that its prompt resumes from, and decides which states will be worth keeping."""
        request = sequence.request
        assert sequence.slot is not None
        if sequence.stream is not None and sequence.stream.has_state:
            sequence.stream.has_state = False
        elif match.nodes and self.pools.layout.slots:
            assert match.checkpoint is not None, "attention without state is a miss"
            self.pools.copy_slot(match.checkpoint, sequence.slot)
            self.device.state_was_read(sequence.resources, match.nodes[-1])
        else:
            self.pools.clear_slot(sequence.slot)
        if request.admitted is None:
            request.admitted = now
            self.device.stats.miss_tokens += request.prompt_len
            self._found(request, match.resume_len)
            self._remember(sequence, match)
        else:  # what it resumed from at first may be gone
            self._found(request, match.resume_len)
            sequence.checkpoint_at |= {(request.prompt_len - 1) // self.device.grid * self.device.grid}

    def _found(self, request: Request, end: int) -> None:
        """A prompt's positions [0, end) were found. Each counts once, as what it was when the prompt first came there:
        what was computed before a preemption and is found after it was computed."""
        gained = max(0, end - request.reached_len)
        request.cached_len += gained
        request.reached_len += gained
        self.device.stats.hit_tokens += gained
        self.device.stats.miss_tokens -= gained

    def _remember(self, sequence: Sequence, match: Match) -> None:
        """What history says of a new prompt: how soon it may come back, and which states will be worth keeping."""
        request, device = sequence.request, self.device
        now_s = device.tree.time_s
        keys = device.grid_keys(request.prompt_ids, request.submit.namespace, match.nodes)
        seen = self.cache.history.visit(keys, now_s)
        request.gap_s = seen.gap_s
        if seen.since_s is not None:
            self.scheduler.meters.asked_again(request, seen.since_s, self.cache.meters)
        if self.tuning is not None:
            self.tuning.note(Visit(now_s, request.prompt_len, keys, seen))
        branch_len = seen.num_known * device.grid if seen.leaves_path else None
        if branch_len is None and match.end is not MatchEnd.WHOLE and match.known_len > match.resume_len:
            branch_len = match.known_len  # known from before this process: others came this way and may again
        # The position below the end is where the very same prompt would resume.
        longest = self.cache.longest_lens
        asked = ((request.prompt_len - 1) // device.grid * device.grid, *(longest if seen.num_known else ()))
        positions = checkpoint_positions(
            request.prompt_len, grid=device.grid, resume_len=match.resume_len, branch_len=branch_len, asked=asked
        )
        sequence.checkpoint_at = frozenset(positions)
        if match.nodes:
            last = match.nodes[-1]
            goes_on = not last.children and any(position <= min(longest, default=position) for position in positions)
            self.cache.used(last, PASSED_GAP_S if goes_on else seen.gap_s)

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
        try:
            logits = self.runner.advance(chunk, self.slice_s)
        except SpillError as error:
            if sequence.lost_blocks() > MAX_LOSSES:
                raise HostStageError(f"its blocks below the device are lost again and again: {error}") from error
            log.warning("%s lost blocks below the device, and computes them again: %s", sequence.id, error)
            self.scheduler.preempt(sequence)
            return None
        if logits is None:
            return None
        sequence.resources.drop("chunk", chunk.start)
        self._take_state(sequence, chunk)
        self._publish(sequence, chunk)
        if sequence.in_prompt:
            return None
        if sequence.state is SequenceState.PREFILLING and sequence.request.prefilled is None:
            self.scheduler.meters.prompt_computed(sequence.request, self.cache.meters)
        return logits

    def _drop_chunk(self) -> None:
        assert self.chunk is not None
        self.runner.end(self.chunk)
        self.chunk = None

    def _adopt_newer(self, sequence: Sequence) -> None:
        """Takes over what another sequence with the same prompt has published since this one was admitted."""
        device, request = self.device, sequence.request
        is_behind = len(sequence.nodes) * device.layout.block_size != sequence.computed_len
        if sequence.stream is not None or is_behind:
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
        sequence.computed_len = match.resume_len
        self._found(request, match.resume_len)

    def _take_state(self, sequence: Sequence, chunk: Chunk) -> None:
        """The state after the chunk becomes the sequence's: its slot and the shadow change places."""
        device = self.device
        assert sequence.slot is not None
        fresh = self.runner.swap_shadow(sequence.slot)
        device.reserved_slots[-1] = self.runner.shadow_slot
        sequence.resources.swap("slot", sequence.slot, fresh, lambda: device.slots.release(fresh))
        sequence.slot = fresh
        self.scheduler.turns.spent(sequence, chunk.elapsed_s)
        if chunk.streamed is not None and sequence.stream is not None and self.scheduler.streaming is not None:
            self.scheduler.streaming.saw(sequence.stream, chunk.streamed)
        if not sequence.in_prompt:
            return  # a row, which is committed as any decode row is
        sequence.computed_len = chunk.end
        sequence.request.reached_len = max(sequence.request.reached_len, chunk.end)
        if chunk.end - chunk.start == device.grid and chunk.streamed is None:
            self.rate.saw(device.grid, chunk.elapsed_s)
            costs = self.cache.costs
            costs.prefill.observe(costs.cost.flops(chunk.start, chunk.end), chunk.elapsed_s)

    def _publish(self, sequence: Sequence, chunk: Chunk) -> None:
        """The blocks of a whole grid chunk become the tree's; the state after it a checkpoint, where worth keeping."""
        device, size, stream = self.device, self.device.layout.block_size, sequence.stream
        if stream is not None and chunk.start >= stream.tail * size:
            if self.pools.layout.slots and chunk.end in sequence.checkpoint_at:
                assert self.scheduler.streaming is not None
                self.scheduler.streaming.keep_state(sequence, chunk.end)
            return  # it reaches the tree in a tier below
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
            node.gap_s = sequence.request.gap_s
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
