"""A tier's books without its bytes: what admission and eviction would have kept of a trace, and what that saved.

The tuner lets several of these run behind the real cache to learn which weights are best, and `downcore bench replay`
measures policies with it. It makes its decisions with tiers/admission.py, tiers/history.py and tiers/eviction.py, as
the daemon does. A node is one grid chunk of blocks, not one block: nothing is resumed, kept or evicted in between.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tiers.admission import checkpoint_positions
from tiers.eviction import Worth
from tiers.flops import ComputeCost
from tiers.history import PASSED_GAP_S, Seen

UNBOUNDED_LEN = 1 << 62  # tokens


class Admission(StrEnum):
    """Which states are kept."""

    WORTHWHILE = "at branch points, at a prompt's last grid position, and at the last that the tier can hold"
    EVERY_STEP = "at every grid position"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one tier holds of a model."""

    grid: int  # tokens
    chunk_bytes: int  # blocks of one grid chunk
    checkpoint_bytes: int  # one state; 0 for attention alone
    cost: ComputeCost


@dataclass(frozen=True, slots=True)
class Visit:
    """A prompt that arrived: its length and the keys of its whole grid positions, and what history said of it."""

    now_s: float
    num_tokens: int
    keys: tuple[Hashable, ...]
    seen: Seen


@dataclass(slots=True, eq=False)
class Chunk:
    """One grid chunk of blocks under its parent; with `has_state` a look-up can resume after it."""

    key: Hashable
    parent: "Chunk | None"  # None only in the root
    depth: int  # chunks from the root to the end of this one
    children: dict[Hashable, "Chunk"]
    has_state: bool = False
    last_use_s: float = 0.0
    gap_s: float = 0.0


class Order(Protocol):
    """What ranks stops; tiers/eviction.py says when each is called."""

    def offer(self, item: Chunk, worth: Worth) -> None: ...
    def discard(self, item: Chunk) -> None: ...
    def pop(self, now_s: float) -> Chunk | None: ...


@dataclass(slots=True)
class Savings:
    """Sums over all visits."""

    num_visits: int = 0
    num_hits: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    flops: int = 0
    saved_flops: int = 0
    num_evictions: int = 0
    num_walked: int = 0  # chunks compared by look-ups


class ShadowCache:
    """One tier of `budget_bytes`; None is without bound. Between visits its bytes are within the budget."""

    def __init__(
        self, shape: CacheShape, budget_bytes: int | None, order: Order, admission: Admission = Admission.WORTHWHILE
    ) -> None:
        self.shape = shape
        self.budget_bytes = budget_bytes
        self.order = order
        self.admission = admission
        self.longest_len = longest_len(shape, budget_bytes)
        self.root = Chunk(None, None, 0, {})
        self.num_bytes = 0
        self.savings = Savings()

    def visit(self, visit: Visit) -> int:
        """Looks a prompt up, keeps what admission says, evicts what is too much; returns the FLOPs that a hit saved."""
        shape, savings = self.shape, self.savings
        path = self._walk(visit.keys)
        resume = min(len(path), max(visit.num_tokens - 1, 0) // shape.grid)
        while resume and not path[resume - 1].has_state:
            resume -= 1
        saved = shape.cost.flops(0, resume * shape.grid)
        savings.num_visits += 1
        savings.num_hits += resume > 0
        savings.tokens += visit.num_tokens
        savings.hit_tokens += resume * shape.grid
        savings.flops += shape.cost.flops(0, visit.num_tokens)
        savings.saved_flops += saved
        for chunk in self._keep(visit, path, resume):
            self._offer(chunk)
        self._make_room(visit.now_s)
        return saved

    def chunks(self) -> Iterator[Chunk]:
        """All but the root, parents before children."""
        stack = [self.root]
        while stack:
            chunk = stack.pop()
            if chunk is not self.root:
                yield chunk
            stack.extend(chunk.children.values())

    def check(self) -> None:
        """Raises AssertionError where bytes or links are broken."""
        num_bytes = 0
        for chunk in self.chunks():
            assert chunk.parent is not None
            assert chunk.parent.children[chunk.key] is chunk
            assert chunk.depth == chunk.parent.depth + 1
            assert chunk.children or chunk.has_state, "blocks that no look-up can reach"
            num_bytes += shape_bytes(self.shape, 1, states=chunk.has_state)
        assert num_bytes == self.num_bytes
        assert self.budget_bytes is None or num_bytes <= self.budget_bytes

    def _walk(self, keys: tuple[Hashable, ...]) -> list[Chunk]:
        path: list[Chunk] = []
        node = self.root
        for key in keys:
            found = node.children.get(key)
            self.savings.num_walked += 1
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def _keep(self, visit: Visit, path: list[Chunk], resume: int) -> list[Chunk]:
        """Publishes the prompt's chunks and states; the stops whose worth may have changed."""
        shape, keys = self.shape, visit.keys
        positions = self._positions(visit, resume)
        changed: list[Chunk] = []
        if resume:
            used = path[resume - 1]
            used.last_use_s = visit.now_s
            goes_on = not used.children and any(position <= self.longest_len for position in positions)
            used.gap_s = PASSED_GAP_S if goes_on else visit.seen.gap_s
            changed.append(used)
        if len(path) < len(keys) and path and len(path[-1].children) == 1:
            changed += self._stop_below(path[-1])  # its chain ends here from now on
        node = path[-1] if path else self.root
        for key in keys[len(path) :]:
            child = Chunk(key, node, node.depth + 1, {})
            node.children[key] = child
            self.num_bytes += shape.chunk_bytes
            path.append(child)
            node = child
        for position in positions:
            chunk = path[position // shape.grid - 1]
            if not chunk.has_state:
                chunk.has_state = True
                self.num_bytes += shape.checkpoint_bytes
                changed += self._stop_below(chunk)
            chunk.last_use_s = visit.now_s
            chunk.gap_s = visit.seen.gap_s
            changed.append(chunk)
            above = self._stop_above(chunk)
            if above is not None:
                changed.append(above)
        return changed

    def _positions(self, visit: Visit, resume: int) -> tuple[int, ...]:
        """Where states are kept that the tier does not have yet, in order. Blocks alone: every stop is one."""
        shape, seen = self.shape, visit.seen
        if self.admission is Admission.EVERY_STEP or not shape.checkpoint_bytes:
            return tuple(range((resume + 1) * shape.grid, len(visit.keys) * shape.grid + 1, shape.grid))
        return checkpoint_positions(
            visit.num_tokens,
            grid=shape.grid,
            resume_len=resume * shape.grid,
            branch_len=seen.num_known * shape.grid if seen.leaves_path else None,
            asked=(self.longest_len,) if seen.num_known else (),
        )

    def _make_room(self, now_s: float) -> None:
        while self.budget_bytes is not None and self.num_bytes > self.budget_bytes:
            chunk = self.order.pop(now_s)
            assert chunk is not None, "what is too much can always be evicted"
            self.savings.num_evictions += 1
            self._evict(chunk)

    def _evict(self, chunk: Chunk) -> None:
        above = self._stop_above(chunk)
        chunk.has_state = False
        self.num_bytes -= self.shape.checkpoint_bytes
        node = chunk
        while node.parent is not None and not node.children and not node.has_state:
            del node.parent.children[node.key]
            self.num_bytes -= self.shape.chunk_bytes
            node = node.parent
        if not node.has_state:
            for below in self._stop_below(node):  # its chain is longer now
                self._offer(below)
        if above is not None:
            self._offer(above)

    def _offer(self, chunk: Chunk) -> None:
        if chunk.has_state and (self.shape.checkpoint_bytes or not chunk.children):
            self.order.offer(chunk, self._worth(chunk))
        else:
            self.order.discard(chunk)

    def _worth(self, chunk: Chunk) -> Worth:
        """As `offer` of tiers/eviction.py wants it."""
        shape = self.shape
        num_chunks, node = 0, chunk
        while not chunk.children and node.parent is not None:
            num_chunks, node = num_chunks + 1, node.parent
            if node.has_state or len(node.children) > 1:
                break
        above = self._stop_above(chunk)
        return Worth(
            last_use_s=chunk.last_use_s,
            gap_s=chunk.gap_s,
            flops=shape.cost.flops((above.depth if above else 0) * shape.grid, chunk.depth * shape.grid),
            num_bytes=shape_bytes(shape, num_chunks, states=1),
            fits=chunk.depth * shape.grid <= self.longest_len,
        )

    def _stop_above(self, chunk: Chunk) -> Chunk | None:
        node = chunk.parent
        while node is not None and not node.has_state:
            node = node.parent
        return node

    def _stop_below(self, chunk: Chunk) -> list[Chunk]:
        """The next stop down a chain that does not part; none where it parts first."""
        while len(chunk.children) == 1:
            (chunk,) = chunk.children.values()
            if chunk.has_state:
                return [chunk]
        return []


def longest_len(shape: CacheShape, budget_bytes: int | None) -> int:
    """Tokens of the longest prefix that a tier can hold with its state, on the grid."""
    if budget_bytes is None:
        return UNBOUNDED_LEN // shape.grid * shape.grid
    return max(budget_bytes - shape.checkpoint_bytes, 0) // shape.chunk_bytes * shape.grid


def shape_bytes(shape: CacheShape, num_chunks: int, *, states: int) -> int:
    """Bytes of so many chunks of blocks and so many states."""
    return num_chunks * shape.chunk_bytes + states * shape.checkpoint_bytes
