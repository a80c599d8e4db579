"""Who runs next: admission, growth, preemption, and the choice of chunk and decode rows.

There is no prefill phase. Every running sequence catches up from what is computed to what is known: by grid chunks
while inside its prompt, by single rows after it (which is also how a preempted one replays its answer). Blocks and
slots are acquired all at once or not at all; a waiting sequence holds nothing. Warming gives way to answers, in the
queue, in the choice of chunks and on the device. Knows no tensor and no clock.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from math import inf

from daemon.cache_messages import TierName
from daemon.config import EngineConfig
from daemon.engine.meters import EngineMeters
from daemon.engine.room import Room
from daemon.engine.sequence import Request, Sequence, SequenceState
from daemon.engine.streaming import Streaming
from daemon.engine.turns import Turns
from daemon.meter_messages import Loaded
from tiers.cache import TieredCache
from tiers.match import Match
from tiers.resources import Resources, release_all

MAX_RESTORES = 2  # waited for by one request: what is evicted before it can be used twice is computed instead


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: rows to decode, and the sequence whose prompt gets the rest of the time."""

    decode: tuple[Sequence, ...]
    prefill: Sequence | None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that has just acquired all it needs, with what was found of its prompt; None: it came back whole."""

    sequence: Sequence
    match: Match | None


class Scheduler:
    """Owns the waiting and the running sequences. Choices of a request not yet forked count as running.

    Args:
        streams: the model can attend to history below the device, and may.
    """

    def __init__(self, cache: TieredCache, config: EngineConfig, *, streams: bool) -> None:
        self.cache = cache
        self.device = device = cache.device
        self.restore_timeout_s = config.restore_timeout_s
        self.growth_window = config.growth_window
        self.max_queue = config.max_queue
        self.max_sequences = min(config.max_sequences, device.slots.size - len(device.reserved_slots) - 1)
        self.waiting: list[Sequence] = []  # by rank: answers by order of arrival, then warming
        self.restoring: list[Sequence] = []  # their turn came, and their prefix is on its way to the device
        self.running: list[Sequence] = []  # by order of admission
        self.meters = EngineMeters()
        self.streaming: Streaming | None = None
        if cache.residency is not None and streams:
            self.streaming = Streaming(cache, cache.residency, config)
        self.turns = Turns()
        self._refused_at: Room | None = None  # when the head of the queue last did not fit

    @property
    def num_running(self) -> int:
        return sum(1 + len(sequence.siblings) for sequence in self.running)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.restoring and not self.running

    def sequences(self) -> list[Sequence]:
        """Every sequence alive, siblings included."""
        alive = self.waiting + self.restoring + self.running
        return alive + [sibling for sequence in alive for sibling in sequence.siblings]

    def num_by_state(self) -> dict[str, int]:
        """Sequences alive in each state."""
        return dict(Counter(sequence.state.value for sequence in self.sequences()))

    def swapped(self) -> list[Resources]:
        """What preempted sequences hold in the host tier."""
        return [sequence.swapped.resources for sequence in self.waiting if sequence.swapped is not None]

    def is_full(self, *, is_warm: bool) -> bool:
        """Whether as many wait as may, for room or for their prefix. What is to be warmed takes no answer's place."""
        if len(self.waiting) + len(self.restoring) < self.max_queue:
            return False
        num_answers = sum(sequence.request.warm is None for sequence in self.waiting + self.restoring)
        return is_warm or num_answers >= self.max_queue

    def enqueue(self, request: Request) -> Sequence:
        """A new request at its place in the queue. The caller has checked what refusals.py refuses."""
        choices = [
            Sequence(request, index, list(request.prompt_ids), Resources(f"{request.id}/{index}"))
            for index in range(request.submit.n)
        ]
        choices[0].siblings = choices[1:]
        self._wait(choices[0])
        return choices[0]

    def admit(self, now: float) -> list[Admitted]:
        """Lets waiting sequences in, oldest first, until one does not fit: nobody overtakes it, and warming goes.

        One whose prefix is worth bringing from a lower tier waits aside until that has come, and others go on.
        """
        self._end_restores(now)
        admitted: list[Admitted] = []
        while self.waiting and self._room().may_fit_after(self._refused_at):
            sequence = self.waiting[0]
            acquired = self._return(sequence) if sequence.swapped is not None else self._acquire(sequence, now)
            if acquired is None:
                if self._make_way(sequence):
                    continue
                self._refused_at = self._room()
                break
            self.waiting.pop(0)
            if sequence.restore is not None:
                sequence.state = SequenceState.RESTORING
                self.restoring.append(sequence)
                continue
            for choice in [sequence, *sequence.siblings]:
                # At least the prompt's last row is always computed, but by who comes back from beyond it.
                choice.state = SequenceState.PREFILLING if choice.in_prompt else SequenceState.DECODING
            self.running.append(sequence)
            admitted.append(acquired)
        if self.waiting and self.streaming is not None:
            self.streaming.make_room(self.running)
        return admitted

    def stuck(self) -> Sequence | None:
        """A sequence that waits although nothing else runs and nothing is on its way: it will never have room. Or one
        that is larger than the device, and finds no room below it."""
        if self.restoring or self.cache.holds_device:
            return None
        if self.running or not self.waiting:
            return next((s for s in self.running if s.stream and s.stream.is_stuck and not self._can_run(s)), None)
        return self.waiting[0]

    def decoding(self) -> list[Sequence]:
        """Those past their prompt whose rows are computed together, oldest first."""
        past = (s for s in self.running if s.is_running and not s.in_prompt and s.stream is None)
        return sorted(past, key=lambda s: s.rank)

    def plan(self, in_flight: Sequence | None, *, decodes: bool = True) -> tuple[Plan, list[Sequence]]:
        """The next step, and the sequences preempted to make room for it.

        The sequence `in_flight`, whose chunk is paused between layers, keeps its turn. No rows where not `decodes`.
        """
        preempted: list[Sequence] = []
        decode: list[Sequence] = []
        if self.streaming is not None:
            self.streaming.settle(self.running, in_flight)
            for sequence in self.streaming.lost(self.running):
                self.preempt(sequence)
                preempted.append(sequence)
        for sequence in self.decoding() if decodes else ():
            if sequence.is_running and self._has_room(sequence, preempted):  # not if an older one took its room
                decode.append(sequence)
        if in_flight is None or not in_flight.is_running:
            in_flight = self.turns.next([sequence for sequence in self.running if self._can_run(sequence)])
        if decode:
            self.meters.decode_rows.observe(len(decode))
        return Plan(tuple(decode), in_flight), preempted

    def start_chunk(self, sequence: Sequence) -> tuple[int, int]:
        """Positions [start, end) of the next chunk; past the prompt, of the one row that runs by itself."""
        self.turns.started(sequence)
        start = sequence.computed_len
        if not sequence.in_prompt:
            return start, start + 1
        assert start % self.device.grid == 0
        return start, min(start + self.device.grid, sequence.request.prompt_len)

    def fork(self, lead: Sequence) -> list[Sequence]:
        """Turns the siblings of a sequence whose prompt is computed into sequences of their own.

        Full blocks become shared; the unfinished one and the slot are the caller's to copy, from the lead's to the
        sibling's first tail block and slot.
        """
        size = self.device.layout.block_size
        num_full = lead.request.prompt_len // size
        forked, lead.siblings = lead.siblings, []
        for sibling in forked:
            if lead.stream is not None and self.streaming is not None:
                self.streaming.fork(lead, sibling)
            for position, block_id in enumerate(lead.block_table[:num_full]):
                if block_id >= self.device.blocks.size:
                    continue  # below the device
                node = lead.nodes[position] if position < len(lead.nodes) else None
                self.device.share_block(sibling.resources, block_id, node)
            sibling.block_table = lead.block_table[:num_full] + sibling.tail_blocks
            sibling.tail_blocks = []
            sibling.nodes = list(lead.nodes)
            sibling.computed_len = lead.computed_len
            sibling.state = SequenceState.DECODING
            self.running.append(sibling)
        return forked

    def preempt(self, sequence: Sequence) -> None:
        """Its state moves to the host tier, or is lost where that has no room; it waits in the order of arrival."""
        self.running.remove(sequence)
        if sequence.computed_len and sequence.stream is None:
            assert sequence.slot is not None
            blocks = sequence.block_table[: self.device.blocks_for(sequence.computed_len)]
            sequence.swapped = self.cache.swap_out(
                sequence.id, blocks, sequence.nodes, sequence.slot, sequence.computed_len
            )
        if sequence.swapped is not None:
            self.meters.moved_preemptions += 1
        else:
            self.meters.replayed_preemptions += 1
        for choice in [sequence, *sequence.siblings]:
            choice.forget()
            choice.state = SequenceState.PREEMPTED
        sequence.request.preemptions += 1
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A choice has ended, wherever it was: all it holds goes back, and what its siblings hold to be forked."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.restoring:
            self.restoring.remove(sequence)
        choices = [*sequence.siblings, sequence]
        moved = [] if sequence.swapped is None else [sequence.swapped.resources]
        sequence.state, sequence.siblings, sequence.swapped = SequenceState.FINISHED, [], None
        try:
            release_all([*moved, *(choice.resources for choice in choices)])
        finally:
            for choice in choices:
                choice.forget()

    def check(self) -> None:
        """Raises AssertionError where a sequence holds what its state does not allow."""
        for sequence in self.waiting + self.restoring:
            for choice in [sequence, *sequence.siblings]:
                assert choice.resources.is_empty, f"{choice.id} waits and holds something"
        for sequence in self.running:
            assert sequence.slot is not None, f"{sequence.id} runs without a slot"
            assert len(sequence.block_table) * self.device.layout.block_size >= sequence.computed_len
            on_device = {id_ for id_ in sequence.block_table if id_ < self.device.blocks.size}
            assert on_device == set(sequence.resources.ids("block")), f"{sequence.id}: table and blocks"
            assert sequence.stream is not None or len(on_device) == len(sequence.block_table)
            for position, node in enumerate(sequence.nodes):
                is_below = sequence.block_table[position] not in on_device
                assert is_below or node.block_id == sequence.block_table[position], (
                    f"{sequence.id}: node and table disagree"
                )

    def _make_way(self, sequence: Sequence) -> bool:
        """Preempts the youngest warming for an answer that does not fit; False where none is left."""
        warming = [running for running in self.running if running.request.warm is not None]
        if sequence.request.warm is not None or not warming:
            return False
        self.preempt(max(warming, key=lambda s: s.rank))
        return True

    def _room(self) -> Room:
        head, device = self.waiting[0].rank, self.device
        num_blocks, num_slots = device.num_available_blocks, device.num_available_slots
        return Room(head, self.num_running, device.tree.num_gains, num_blocks, num_slots)

    def _end_restores(self, now: float) -> None:
        """Those whose prefix has come, or has not come in time, wait for admission again."""
        if self.streaming is not None:
            self.streaming.expire(self.running, now)
        for sequence in [s for s in self.restoring if s.restore is not None]:
            restore, request = sequence.restore, sequence.request
            assert restore is not None
            if not restore.is_done and now < sequence.restore_until:
                continue
            if restore.is_done and request.admitted is None:
                request.restored_host += restore.host_tokens
                request.restored_disk += restore.disk_tokens
            request.restores += 1 if restore.is_done else MAX_RESTORES
            self._count_stall(sequence, now)
            sequence.restore = None
            sequence.state = SequenceState.WAITING if request.admitted is None else SequenceState.PREEMPTED
            self.restoring.remove(sequence)
            self._wait(sequence)

    def _count_stall(self, sequence: Sequence, now: float) -> None:
        """It has stood aside for a restore, which has ended or is not waited for any more."""
        restore, request = sequence.restore, sequence.request
        assert restore is not None
        waited_on = self.cache.meters[restore.slowest_tier]
        waited_on.stall_s.observe(now - sequence.restore_since)
        waited_on.late_loads += not restore.is_done
        if request.admitted is None:
            begin_s, end_s = sequence.restore_since - request.arrived, now - request.arrived
            came = {TierName.HOST: restore.host_tokens, TierName.DISK: restore.disk_tokens}
            found = {tier: tokens for tier, tokens in came.items() if tokens} or {TierName(restore.slowest_tier): 0}
            request.loads += [Loaded(tier, begin_s, end_s, tokens) for tier, tokens in found.items()]

    def _return(self, sequence: Sequence) -> Admitted | None:
        """Brings a preempted sequence's state back from the host tier, or None with nothing changed."""
        swapped, device, request = sequence.swapped, self.device, sequence.request
        assert swapped is not None
        assert self.cache.swapper is not None
        needed, newly_held = self.cache.swapper.needs(swapped)
        reserve = device.blocks_for(min(request.max_len, len(sequence.token_ids) + self.growth_window))
        more = max(0, reserve - len(swapped.block_chunks))
        tail = reserve - request.prompt_len // device.layout.block_size
        choices = 1 + len(sequence.siblings)
        blocks = device.num_available_blocks - newly_held
        is_room = needed + more + tail * (choices - 1) <= blocks and choices <= device.num_available_slots
        if self.num_running + choices > self.max_sequences or not is_room:
            return None
        returned = self.cache.swapper.back(swapped, sequence.resources)
        sequence.swapped = None
        sequence.block_table = returned.block_table + device.take_blocks(sequence.resources, more)
        sequence.nodes = list(swapped.nodes)
        sequence.slot = returned.slot
        sequence.computed_len = swapped.computed_len
        self._take_tails(sequence, tail)
        return Admitted(sequence, None)

    def _take_tails(self, sequence: Sequence, tail: int) -> None:
        for sibling in sequence.siblings:
            sibling.tail_blocks = self.device.take_blocks(sibling.resources, tail)
            sibling.slot = self.device.take_slot(sibling.resources)

    def _acquire(self, sequence: Sequence, now: float) -> Admitted | None:
        """All a waiting sequence and its siblings need to start, or None with nothing held.

        Where a lower tier has more of the prompt, its way up is begun instead, once there is room for everything.
        """
        request, device = sequence.request, self.device
        match = self.cache.look_up(request.prompt_ids, request.submit.namespace, request.known)
        request.known, request.lookup_s = match.last, self.cache.last_lookup_s
        if self.streaming is not None and self.streaming.wants(request.max_len):
            return self._acquire_streamed(sequence, match, now)
        verdict = self.cache.weigh(match)
        restores = verdict is not None and verdict.is_load and request.restores < MAX_RESTORES
        known = match.nodes
        if restores and match.deeper is not None:
            known = (*known, *(node for node in match.deeper.nodes if node.block_id is not None))
        reserve_len = min(request.max_len, len(sequence.token_ids) + self.growth_window)
        own = device.blocks_for(reserve_len) - len(known)
        first_tail = request.prompt_len // device.layout.block_size
        tail = device.blocks_for(reserve_len) - first_tail
        choices = 1 + len(sequence.siblings)
        newly_held = sum(node.is_cached for node in known)  # these stop being available
        blocks = device.num_available_blocks - newly_held
        slots = device.num_available_slots - (restores or match.checkpoint is not None)
        if self.num_running + choices > self.max_sequences or own + tail * (choices - 1) > blocks or choices > slots:
            return None
        if verdict is not None and restores:
            sequence.restore = self.cache.fetch(match)
            sequence.restore_since = now
            sequence.restore_until = now + min(self.restore_timeout_s, verdict.deadline_s or inf)
            return Admitted(sequence, match)
        if verdict is not None and not verdict.is_load:
            self.cache.refused(match)
        sequence.block_table = device.hold_prefix(sequence.resources, match)
        sequence.nodes = list(match.nodes)
        sequence.block_table += device.take_blocks(sequence.resources, own)
        sequence.slot = device.take_slot(sequence.resources)
        sequence.computed_len = match.resume_len
        self._take_tails(sequence, tail)
        return Admitted(sequence, match)

    def _acquire_streamed(self, sequence: Sequence, match: Match, now: float) -> Admitted | None:
        """The same for one that is larger than the device: what is known of its prompt stays below it."""
        assert self.streaming is not None
        choices, device, request = 1 + len(sequence.siblings), self.device, sequence.request
        slots = device.num_available_slots - (match.checkpoint is not None)
        if self.num_running + choices > self.max_sequences or choices > slots:
            return None
        sequence.restore_until = now + self.restore_timeout_s
        may_load = request.restores < MAX_RESTORES
        lift = self.streaming.fetch(match) if may_load else None
        if lift is not None:
            sequence.restore, sequence.restore_since = lift, now
            return Admitted(sequence, match)
        resumed = self.streaming.acquire(sequence, match, may_load=may_load)
        if resumed is None:
            return None
        self._take_tails(sequence, self.streaming.sibling_blocks(sequence))
        return Admitted(sequence, resumed)

    def _has_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Makes sure the sequence's next row has a block, preempting younger ones; False where it had to go itself."""
        if sequence.computed_len < len(sequence.block_table) * self.device.layout.block_size:
            return True
        while self.device.num_available_blocks == 0:
            if self.streaming is not None and self.streaming.make_room(self.running):
                return False  # not now: a larger one gives way
            victim = max(self.running, key=lambda s: s.rank)
            self.preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.block_table += self.device.take_blocks(sequence.resources, 1)
        return True

    @property
    def only_waits(self) -> bool:
        """Nobody has rows to compute before something has moved, or a grammar is built."""
        return not any(self._can_run(sequence) for sequence in self.running)

    @property
    def awaits_grammar(self) -> bool:
        """Somebody is admitted, and would compute if its grammar were built."""
        return any(not sequence.request.is_ready for sequence in self.running)

    def _can_run(self, sequence: Sequence) -> bool:
        has_come = sequence.stream is None or (self.streaming is not None and self.streaming.can_run(sequence))
        return has_come and sequence.request.is_ready

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.rank)
