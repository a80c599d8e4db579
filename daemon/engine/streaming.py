"""Who runs larger than the device, with what of it resident, and when its blocks move down.

A sequence whose longest length exceeds the device's blocks is streamed: its table is

    [first grid chunks: on the device, the tree's] [middle: below the device] [tail: on the device, its own]

The tail is two grid chunks. One is computed while the one before moves down, so the tail never waits for a free
block: what a move frees is taken again at once. A chunk that reaches the host tier becomes the tree's there, with its
checkpoint, as any prefix; decoded rows stay the sequence's own. What leaves the device of the first chunks leaves from
the deepest one up, so the tree on the device has no gaps. Knows no tensor and no clock.
"""

import logging
from collections.abc import Sequence as Many
from dataclasses import replace

from daemon.config import EngineConfig
from daemon.engine.sequence import Sequence
from tiers.cache import TieredCache
from tiers.copies import HostCopy
from tiers.host import HostTier
from tiers.keys import token_bytes
from tiers.landing import Landing
from tiers.match import Match
from tiers.recorder import ChunkBelow
from tiers.residency import Below, Lowering, Residency, Stream, StreamStats
from tiers.resources import Resources
from tiers.restore import Restore
from tiers.tree import Node

TAIL_CHUNKS = 2
LINK_MEMORY = 0.99  # of the best rate, at each new one

log = logging.getLogger("downcore.engine")


class Streaming:
    """Decides for the scheduler; `residency` moves the blocks."""

    def __init__(self, cache: TieredCache, residency: Residency, config: EngineConfig) -> None:
        self.cache = cache
        self.device = cache.device
        self.residency = residency
        self.growth_window = config.growth_window
        self.share = config.stream_share
        self.min_tokens_per_s = config.min_tokens_per_s
        self.chunk_blocks = residency.chunk_blocks
        self.bytes_per_s: float | None = None  # of late, from below the device
        self.link_bytes_per_s: float | None = None  # the best of late
        self._reserved: dict[Stream, int] = {}  # blocks below that each may come to need

    def wants(self, max_len: int) -> bool:
        """Whether a sequence that may become so long is larger than the device."""
        return self.device.blocks_for(max_len) > self.device.num_usable_blocks

    def capacity_error(self, max_len: int, n: int) -> str | None:
        """Why a sequence larger than the device could never run; None where it could."""
        total = self.device.blocks_for(max_len)
        tail = TAIL_CHUNKS * self.chunk_blocks + (n - 1) * (self.chunk_blocks + 1)
        usable, most = self.device.num_usable_blocks, self.residency.most_blocks
        if tail > usable:
            return f"a sequence larger than the device needs {tail} resident blocks at least; the device has {usable}"
        if total * n > most:
            needed = f"{total * n} blocks of {self._size} tokens; the device has {usable}, the tiers below it {most}"
            return f"{max_len} tokens with the answer and n = {n} need {needed}"
        return None

    def rate_error(self, max_len: int) -> str | None:
        """Why a sequence would be slower than the floor that the operator sets; None where it would not, or not yet
        known: the first one is how the link becomes known."""
        if not self.min_tokens_per_s or self.bytes_per_s is None or not self.wants(max_len):
            return None
        sharing = 1 + len(self._reserved)
        below = self.device.blocks_for(max_len) - self.device.num_usable_blocks
        streamed = max(0, below) * self.device.layout.block_bytes
        rate = self.bytes_per_s / max(1, streamed) / sharing
        if rate >= self.min_tokens_per_s:
            return None
        link = f"{self.bytes_per_s:.0f} bytes a second shared by {sharing}"
        floor = f"{rate:.2f} tokens a second, below the floor of {self.min_tokens_per_s}"
        return f"{max_len} tokens would stream {streamed} bytes a token at {link}: {floor}"

    def fetch(self, match: Match) -> Restore | None:
        """Begins to bring records that the match goes on with to the host tier, to be read in place."""
        lifter = self.cache.lifter
        if lifter is None or match.deeper is None or self._attachable(match).resume_len > match.resume_len:
            return None
        return lifter.start(match.deeper.nodes)

    def acquire(self, sequence: Sequence, match: Match, *, may_load: bool) -> Match | None:
        """Takes what a streamed sequence holds from the start, and attaches what is known of its prompt where it lies.

        Where it may load, what has records alone begins to come to the spill. Returns what the sequence resumes from,
        or None with nothing held. Siblings' slots and tails of `sibling_blocks` are the caller's to take.
        """
        whole, in_memory = self._attachable(match, with_records=may_load), self._attachable(match)
        acquired = self._acquire(sequence, whole)
        if acquired is None and whole.resume_len > in_memory.resume_len:
            return self._acquire(sequence, in_memory)  # the spill may be what had no room
        return acquired

    def _acquire(self, sequence: Sequence, match: Match) -> Match | None:
        request, device = sequence.request, self.device
        known = list(match.nodes)
        total = device.blocks_for(min(request.max_len, len(sequence.token_ids) + self.growth_window))
        tail = min(TAIL_CHUNKS * self.chunk_blocks, total - len(known))
        siblings = len(sequence.siblings) * self.sibling_blocks(sequence)
        available = device.num_available_blocks - sum(node.is_cached for node in known)
        need = device.blocks_for(request.max_len) * (1 + len(sequence.siblings))
        room = self.residency.most_blocks - sum(self._reserved.values())
        if tail + siblings > available or need > room:
            return None
        landing = self._land(known)
        if landing is None and self._on_disk(known):
            return None
        resident = 0
        if all(node.block_id is not None for node in known):
            spare = int(self.share * (available - tail - siblings)) // self.chunk_blocks * self.chunk_blocks
            resident = max(0, min(spare, (total - len(known) - tail) // self.chunk_blocks * self.chunk_blocks))
        stream = Stream(len(known) + resident, landing=landing)
        sequence.stream = stream
        self._reserved[stream] = need
        sequence.resources.hold("stream", id(stream), lambda: self._ended(stream))
        self._attach(sequence, stream, known)
        sequence.nodes = known
        if known:
            device.tree.use(known[-1])
        sequence.block_table += device.take_blocks(sequence.resources, resident + tail)
        if known and known[-1].checkpoint is not None:
            device.hold_state(sequence.resources, known[-1])
        sequence.slot = device.take_slot(sequence.resources)
        sequence.computed_len = match.resume_len
        if device.layout.slots and known and known[-1].checkpoint is None:
            if known[-1].host_state is not None:
                self.residency.load_state(known[-1], sequence.slot)
            stream.has_state = True  # or it comes with the landing
        if request.admitted is None:
            num_landing = 0 if landing is None else len(landing.extents) * self.chunk_blocks
            request.restored_disk += num_landing * self._size
            request.restored_host += sum(isinstance(below, HostCopy) for below in stream.below) * self._size
        return match

    def sibling_blocks(self, sequence: Sequence) -> int:
        """Blocks that each choice beside the first needs of its own at the fork; `settle` gives it more as it grows."""
        request = sequence.request
        longest = min(request.max_len, request.prompt_len + self.growth_window)
        return min(self.device.blocks_for(longest) - request.prompt_len // self._size, self.chunk_blocks + 1)

    def settle(self, running: list[Sequence], in_flight: Sequence | None) -> None:
        """Takes in what has moved, and begins what is to move, of all but the one whose forward is in flight."""
        for sequence in running:
            if sequence.stream is not None and sequence is not in_flight:
                self._settle(sequence, sequence.stream)

    def expire(self, running: list[Sequence], now: float) -> None:
        """What has not landed in time is computed instead."""
        for sequence in running:
            stream = sequence.stream
            if stream is not None and stream.landing is not None and now >= sequence.restore_until:
                stream.has_lost = True

    def lost(self, running: list[Sequence]) -> list[Sequence]:
        """Those whose prefix did not land: nothing of it counts as cached."""
        lost = [sequence for sequence in running if sequence.stream is not None and sequence.stream.has_lost]
        for request in (sequence.request for sequence in lost):
            request.restores += 1
            if request.prefilled is None:
                request.cached_len = request.restored_host = request.restored_disk = 0
        return lost

    def _settle(self, sequence: Sequence, stream: Stream) -> None:
        if stream.landing is not None and stream.landing.is_done:
            self._landed(sequence, stream, stream.landing)
        if stream.lowering is not None:
            if not stream.lowering.is_done:
                return
            self._take_in(sequence, stream, stream.lowering)
        per_chunk, table = self.chunk_blocks, sequence.block_table
        whole_len = (stream.tail + per_chunk) * self._size
        if sequence.computed_len >= whole_len and not stream.has_failed:
            stream.lowering = self.residency.begin(sequence.id, table, sequence.nodes, stream.tail)
            stream.is_stuck = stream.lowering is None
        longest = min(sequence.request.max_len, len(sequence.token_ids) + self.growth_window)
        end = min(self.device.blocks_for(longest), stream.tail + TAIL_CHUNKS * per_chunk)
        missing = min(end - len(table), self.device.num_available_blocks)
        if missing > 0:
            table += self.device.take_blocks(sequence.resources, missing)

    def can_run(self, sequence: Sequence) -> bool:
        """Whether the sequence's next rows have their blocks."""
        if sequence.stream is not None and sequence.stream.landing is not None:
            return False
        end = sequence.computed_len + 1
        if sequence.in_prompt:
            end = min(sequence.computed_len + self.device.grid, sequence.request.prompt_len)
        return len(sequence.block_table) * self._size >= end

    def make_room(self, running: list[Sequence]) -> bool:
        """Begins to move resident chunks of a streamed sequence down; whether any is on its way."""
        for sequence in running:
            stream = sequence.stream
            if stream is None:
                continue
            if stream.lowering is not None:
                return True
            first = self._deepest_resident(sequence, stream)
            if first is not None and not stream.has_failed and sequence.computed_len >= stream.tail * self._size:
                stream.lowering = self.residency.begin(sequence.id, sequence.block_table, sequence.nodes, first)
                if stream.lowering is not None:
                    return True
        return False

    def keep_state(self, sequence: Sequence, position: int) -> None:
        """A chunk of the tail has been computed, and the state after it, now in the slot, is worth keeping."""
        assert sequence.stream is not None
        assert sequence.slot is not None
        sequence.stream.states[position] = self.residency.save_state(sequence.resources, sequence.slot)

    def fork(self, lead: Sequence, sibling: Sequence) -> None:
        """A sibling has below it what its lead has; it holds the same."""
        assert lead.stream is not None
        stream = Stream(lead.stream.tail, list(lead.stream.below))
        sibling.stream = stream
        self._reserved[stream] = 0  # the lead's admission counted all choices
        sibling.resources.hold("stream", id(stream), lambda: self._ended(stream))
        for below in stream.below:
            self.residency.hold(sibling.resources, below)

    def saw(self, stream: Stream, read: StreamStats) -> None:
        """A forward has read so much from below."""
        stream.last_row = read
        stream.stats.add(read)
        meters = self.cache.meters
        if "host" in meters:
            meters["host"].streamed_bytes += read.host_bytes
        if "disk" in meters:
            meters["disk"].streamed_bytes += read.disk_bytes
            meters["disk"].picked += read.picked
            meters["disk"].picked_hits += read.picked_hits
        rate = read.bytes_per_s
        if rate is not None:
            self.link_bytes_per_s = max(rate, LINK_MEMORY * (self.link_bytes_per_s or 0.0))
            self.bytes_per_s = rate if self.bytes_per_s is None else 0.7 * self.bytes_per_s + 0.3 * rate

    @property
    def _size(self) -> int:
        return self.device.layout.block_size

    def _attachable(self, match: Match, *, with_records: bool = False) -> Match:
        """The match with its deeper part, where all of that can be read in place: on the device or in the host tier.

        With records, also where those on disk can come to the spill, which takes whole grid chunks.
        """
        deeper, lands = match.deeper, with_records and self.cache.lander is not None
        if deeper is None:
            return match
        nodes, last = (*match.nodes, *deeper.nodes), deeper.nodes[-1]
        below = last.host_state is not None or (lands and last.disk_state is not None)
        has_state = not self.device.layout.slots or last.checkpoint is not None or below
        chunks = [nodes[first : first + self.chunk_blocks] for first in range(0, len(nodes), self.chunk_blocks)]
        if not has_state or not all(_is_in_memory(chunk) or (lands and _is_on_disk(chunk)) for chunk in chunks):
            return replace(match, deeper=None)
        return Match(nodes, deeper.resume_len, match.known_len, match.end, None)

    def _on_disk(self, known: list[Node]) -> dict[int, Many[Node]]:
        """Of a path that is attached, the grid chunks that have records alone, by position."""
        firsts = range(0, len(known), self.chunk_blocks)
        chunks = {first: known[first : first + self.chunk_blocks] for first in firsts}
        return {first: chunk for first, chunk in chunks.items() if not _is_in_memory(chunk)}

    def _land(self, known: list[Node]) -> Landing | None:
        """Begins to bring what has records alone to the spill; None where there is nothing, or no room."""
        chunks = self._on_disk(known)
        last = known[-1] if known else None
        is_state_below = self.device.layout.slots and last is not None and last.checkpoint is None
        state_of = last if is_state_below and last is not None and last.host_state is None else None
        if self.cache.lander is None or not (chunks or state_of):
            return None
        return self.cache.lander.start(chunks, state_of)

    def _landed(self, sequence: Sequence, stream: Stream, landing: Landing) -> None:
        """All of it has come and is the sequence's, or is lost to it."""
        assert self.cache.lander is not None
        stream.has_lost = not landing.is_whole
        if stream.has_lost:
            log.warning("%s cannot have its prefix from disk: %s", sequence.id, landing.error or landing.failed[0][2])
        elif landing.state is not None and sequence.slot is not None:
            self.residency.put_state(landing.state, sequence.slot)
        stream.landing = None
        self.cache.lander.end(landing)

    def _attach(self, sequence: Sequence, stream: Stream, known: list[Node]) -> None:
        """The sequence's table begins with a known path, each block where it is, or where it will land."""
        extents = {} if stream.landing is None else stream.landing.extents
        for position, node in enumerate(known):
            below: Below | None = extents.get(position - position % self.chunk_blocks)
            if below is not None and position % self.chunk_blocks:
                continue  # it came with the first of its chunk
            if below is None and node.block_id is not None:
                self.device.share_block(sequence.resources, node.block_id, node)
                sequence.block_table.append(node.block_id)
                continue
            below = below or node.host_block
            assert below is not None
            self.residency.hold(sequence.resources, below)
            stream.below.append(below)
            sequence.block_table += self.residency.ids(below)

    def _deepest_resident(self, sequence: Sequence, stream: Stream) -> int | None:
        """Position of the last grid chunk before the tail that is on the device."""
        first_host, per_chunk = self.residency.space.first_host, self.chunk_blocks
        for first in range(stream.tail - per_chunk, -1, -per_chunk):
            if sequence.block_table[first + per_chunk - 1] < first_host:
                return first
        return None

    def _take_in(self, sequence: Sequence, stream: Stream, lowering: Lowering) -> None:
        stream.lowering = None
        if lowering.error is not None:
            log.warning("blocks of %s could not move down: %s", sequence.id, lowering.error)
            self.residency.end(lowering)
            stream.is_stuck = stream.has_failed = True
            return
        self.residency.apply(lowering, sequence.resources, sequence.block_table)
        stream.below += lowering.below
        host = self.residency.host
        if lowering.first == stream.tail:
            stream.tail += self.chunk_blocks
            if host is not None and stream.trail is None and isinstance(lowering.below[0], HostCopy):
                self._publish(sequence, stream, lowering, host)
            else:
                self._record(sequence, stream, lowering)
        elif host is not None:
            self._keep_blocks(sequence.nodes[lowering.first :], lowering, host)
        self.residency.end(lowering)

    def _keep_blocks(self, nodes: list[Node], lowering: Lowering, host: HostTier) -> None:
        """The copies of blocks that the tree knows are the tree's."""
        for node, copy in zip(nodes, lowering.below, strict=False):
            if isinstance(copy, HostCopy) and node.parent is not None and node.host_block is None:
                host.keep_block(node, copy)

    def _publish(self, sequence: Sequence, stream: Stream, lowering: Lowering, host: HostTier) -> None:
        """A grid chunk of the prompt that went to the host tier becomes the tree's there, with its checkpoint."""
        nodes, size, first = sequence.nodes, self._size, lowering.first
        end = (first + self.chunk_blocks) * size
        is_whole = len(nodes) == first and not (nodes and nodes[-1].parent is None)
        if end > sequence.request.prompt_len or not is_whole:
            return
        tree, namespace = self.device.tree, sequence.request.submit.namespace
        parent = nodes[-1] if nodes else self.device.root(namespace)
        for offset, copy in enumerate(lowering.below):
            assert isinstance(copy, HostCopy)
            start = (first + offset) * size
            tokens = token_bytes(sequence.token_ids[start : start + size])
            node = tree.child(parent, tokens) or tree.add(parent, tokens)
            if node is None:
                return
            if node.host_block is None:
                host.keep_block(node, copy)
            node.gap_s = sequence.request.gap_s
            nodes.append(node)
            parent = node
        state = stream.states.pop(end, None)
        if isinstance(state, HostCopy):
            if parent.host_state is None:
                host.keep_state(parent, state)
            sequence.resources.drop("host copy", state.chunks)
        if state is not None or not self.device.layout.slots:
            self.cache.offer(parent)

    def _record(self, sequence: Sequence, stream: Stream, lowering: Lowering) -> None:
        """A grid chunk of the prompt that no tier of the tree has is to become a record."""
        recorder, nodes, size, first = self.cache.recorder, sequence.nodes, self._size, lowering.first
        end = (first + self.chunk_blocks) * size
        if recorder is None or end > min(sequence.request.prompt_len, max(self.cache.longest_lens, default=0)):
            return
        if stream.trail is None:
            if len(nodes) != first or (nodes and nodes[-1].parent is None):
                return  # what is above it is not the tree's
            above = nodes[-1] if nodes else self.device.root(sequence.request.submit.namespace)
            stream.trail = recorder.begin(above, sequence.request.gap_s)
        resources = Resources(f"record:{sequence.id}:{first}")
        for below in lowering.below:
            self.residency.hold(resources, below)
        state = stream.states.pop(end, None)
        if isinstance(state, HostCopy):
            self.residency.hold(resources, state)
            sequence.resources.drop("host copy", state.chunks)
        ids = sequence.token_ids
        chunk = ChunkBelow(
            resources,
            tuple(token_bytes(ids[start : start + size]) for start in range(first * size, end, size)),
            tuple(read for below in lowering.below for read in self.residency.readers(below)),
            None if state is None else self.residency.state_reader(state),
        )
        recorder.add(stream.trail, chunk)

    def _ended(self, stream: Stream) -> None:
        del self._reserved[stream]
        if stream.trail is not None:
            stream.trail.is_over = True
        if stream.landing is not None and self.cache.lander is not None:
            self.cache.lander.end(stream.landing)
            stream.landing = None
        if stream.lowering is not None:
            self.residency.abandon(stream.lowering)
            stream.lowering = None


def _is_in_memory(nodes: Many[Node]) -> bool:
    """All on the device or in the host tier, where a forward reads them in place."""
    return all(node.block_id is not None or node.host_block is not None for node in nodes)


def _is_on_disk(nodes: Many[Node]) -> bool:
    return all(node.disk_block is not None for node in nodes)
