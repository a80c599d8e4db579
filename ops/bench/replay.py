"""Policies of the prefix cache on recorded requests: what each saves, in the trace's order, without a model.

The caches are tiers/shadow.py, with the admission, eviction and tuning code of the daemon; only the clairvoyant evictor
is the bench's own. Budgets are parts of the working set: the bytes of everything that the trace ever makes reusable,
which is each distinct grid chunk of blocks and a checkpoint after it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from ops.bench.clairvoyant import BELADY, FORESIGHTS, ClairvoyantOrder, Foresight, Future
from ops.bench.replay_trace import TracedRequest
from tiers.eviction import LRU, EvictionOrder, Weights, Worth
from tiers.flops import ComputeCost
from tiers.history import History
from tiers.shadow import Admission, CacheShape, Chunk, Order, ShadowCache, Visit
from tiers.tuner import Tuner, WeightsChange

# Qwen3.5-35B-A3B in bf16, from its configuration: hidden size 2,048; 30 gated-delta layers of 32 heads with states
# [128, 128] in fp32, 10 attention layers of 16 heads of 256 with 2 key heads; 8 of 256 experts of 512 and a shared one.
# The head is left out: prefill computes it for one row. A state costs 7 FLOPs an element and token.
HYBRID = ComputeCost(matmul_params=2_436_710_400, pair_flops=163_840, state_flops=110_100_480)
HYBRID_BYTES_PER_TOKEN = 20_480
HYBRID_CHECKPOINT_BYTES = 64_900_000
CLAIRVOYANT = "clairvoyant: "  # before the name of a rule
DECISIONS_TIMED = 20_000
DECISIONS_TOGETHER = 1000


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy at one budget; `vs_` are ratios of FLOPs saved."""

    policy: str
    token_hit_rate: float
    saved_flops_part: float  # of the FLOPs of all prompts computed from nothing
    vs_lru: float
    vs_belady: float  # the clairvoyant that evicts what is used again last
    vs_clairvoyant: float  # the best of seven clairvoyant rules, at this budget
    vs_unlimited: float
    num_evictions: int
    decision_us_p50: float | None  # CPU time; None where nothing was evicted
    decision_us_p99: float | None
    decisions_digest: str  # equal where every eviction was the same
    changes: tuple[str, ...] = ()  # of the weights, with the trace's time


@dataclass(frozen=True, slots=True)
class BudgetFigures:
    """All policies at one budget."""

    part: float  # of the working set
    budget_bytes: int
    best_clairvoyant: str  # the rule that saved most
    policies: tuple[PolicyFigures, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace's figures."""

    num_requests: int
    num_tokens: int
    grid: int
    bytes_per_token: int
    checkpoint_bytes: int
    cost: ComputeCost
    working_set_bytes: int  # a checkpoint at every grid step
    admitted_bytes: int  # what an unlimited cache holds with checkpoints where they are worth keeping
    unlimited_hit_rate: float
    unlimited_saved_part: float
    budgets: tuple[BudgetFigures, ...]


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """One decision among many items: `pop` of the eviction order, then an offer in its place; CPU time."""

    num_items: int
    num_classes: int
    pop_us_p50: float
    pop_us_p95: float
    pop_us_p99: float
    quiet_pop_us_p99: float  # in the quietest of all runs of DECISIONS_TOGETHER: other programs disturb the caches
    offer_us_p99: float
    reweigh_us: float


@dataclass(slots=True)
class Run:
    """One cache with all that was learnt while it ran."""

    policy: str
    cache: ShadowCache
    digest: str = ""
    pop_s: list[float] = field(default_factory=list[float])
    changes: list[WeightsChange] = field(default_factory=list[WeightsChange])


@dataclass(frozen=True, slots=True)
class _Against:
    """FLOPs that others saved at the same budget, and without one."""

    lru: int
    belady: int
    clairvoyant: int
    unlimited: int


class _Timed:
    """An order whose decisions are timed and remembered as a digest."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.pop_s: list[float] = []
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def offer(self, item: Chunk, worth: Worth) -> None:
        self.order.offer(item, worth)

    def discard(self, item: Chunk) -> None:
        self.order.discard(item)

    def pop(self, now_s: float) -> Chunk | None:
        before = time.thread_time()
        item = self.order.pop(now_s)
        self.pop_s.append(time.thread_time() - before)
        if item is not None:
            self._digest.update(f"{now_s} {item.key} {item.depth}\n".encode())
        return item


class Replay:
    """A trace, ready to be shown to caches.

    Args:
        advance: called after every visit that a cache has been shown; `num_steps` times in all by `measure`.
    """

    def __init__(
        self, requests: Sequence[TracedRequest], shape: CacheShape, advance: Callable[[], None] = lambda: None
    ) -> None:
        history = History()
        self.shape = shape
        self.visits: list[Visit] = []
        for request in requests:
            keys = request.grid_keys(shape.grid)
            seen = history.visit(keys, request.time_s)
            self.visits.append(Visit(request.time_s, request.num_tokens, keys, seen))
        self._future = Future(self.visits, shape.grid)
        self._advance = advance

    def num_steps(self, num_budgets: int) -> int:
        """Visits shown by `measure` in all."""
        return (2 + num_budgets * (5 + len(FORESIGHTS))) * len(self.visits)

    def measure(self, parts: Sequence[float]) -> Replayed:
        """Every policy at budgets of these parts of the working set."""
        every = self.run("", None, LRU, Admission.EVERY_STEP).cache
        unlimited = self.run("", None, LRU).cache
        shape, savings = self.shape, unlimited.savings
        return Replayed(
            num_requests=savings.num_visits,
            num_tokens=savings.tokens,
            grid=shape.grid,
            bytes_per_token=shape.chunk_bytes // shape.grid,
            checkpoint_bytes=shape.checkpoint_bytes,
            cost=shape.cost,
            working_set_bytes=every.num_bytes,
            admitted_bytes=unlimited.num_bytes,
            unlimited_hit_rate=savings.hit_tokens / max(savings.tokens, 1),
            unlimited_saved_part=savings.saved_flops / max(savings.flops, 1),
            budgets=tuple(self._at_budget(part, int(part * every.num_bytes), savings.saved_flops) for part in parts),
        )

    def run(
        self,
        policy: str,
        budget_bytes: int | None,
        weights: Weights,
        admission: Admission = Admission.WORTHWHILE,
    ) -> Run:
        """One cache with fixed weights."""
        order = _Timed(EvictionOrder[Chunk](weights))
        cache = ShadowCache(self.shape, budget_bytes, order, admission)
        for visit in self.visits:
            cache.visit(visit)
            self._advance()
        return Run(policy, cache, order.digest, order.pop_s)

    def tuned(self, policy: str, budget_bytes: int) -> Run:
        """One cache whose weights the tuner changes while it runs, a visit behind it."""
        weights = Weights()
        ranked = EvictionOrder[Chunk](weights)
        order = _Timed(ranked)
        run = Run(policy, ShadowCache(self.shape, budget_bytes, order), pop_s=order.pop_s)
        tuner = Tuner(self.shape, budget_bytes, weights)
        for visit in self.visits:
            run.cache.visit(visit)
            tuner.note(visit)
            change = tuner.advance()
            if change is not None:
                ranked.reweigh(change.new)
                run.changes.append(change)
            self._advance()
        run.digest = order.digest
        return run

    def clairvoyant(self, budget_bytes: int, foresight: Foresight) -> Run:
        """One cache that knows the trace."""
        clairvoyant = ClairvoyantOrder(self._future, foresight)
        order = _Timed(clairvoyant)
        cache = ShadowCache(self.shape, budget_bytes, order)
        for clairvoyant.now, visit in enumerate(self.visits):
            cache.visit(visit)
            self._advance()
        return Run(CLAIRVOYANT + foresight.name, cache, order.digest, order.pop_s)

    def _at_budget(self, part: float, budget_bytes: int, unlimited_flops: int) -> BudgetFigures:
        default = Weights()
        lru = self.run("LRU, checkpoint at every step", budget_bytes, LRU, Admission.EVERY_STEP)
        runs = [
            lru,
            self.run("alpha 0, LRU", budget_bytes, LRU),
            self.run(f"alpha 0, patience {default.patience:g}", budget_bytes, Weights(0.0, default.patience)),
            self.run(f"alpha {default.alpha:g}, patience {default.patience:g}", budget_bytes, default),
            self.tuned("tuned", budget_bytes),
            *(self.clairvoyant(budget_bytes, foresight) for foresight in FORESIGHTS),
        ]
        clairvoyants = dict(zip(FORESIGHTS, runs[-len(FORESIGHTS) :], strict=True))
        best = max(clairvoyants, key=lambda foresight: _saved(clairvoyants[foresight]))
        against = _Against(
            lru=_saved(lru),
            belady=_saved(clairvoyants[BELADY]),
            clairvoyant=_saved(clairvoyants[best]),
            unlimited=unlimited_flops,
        )
        return BudgetFigures(part, budget_bytes, best.name, tuple(_figures(run, against) for run in runs))


def decision_times(num_items: int, seed: int = 0) -> DecisionTimes:
    """Times of the eviction order with so many items, of random worths over more classes than a model has."""
    draw = np.random.default_rng(seed)
    count = num_items + DECISIONS_TIMED
    gaps, efficiencies = draw.lognormal(3.4, 1.5, count).tolist(), draw.lognormal(-1.2, 1.0, count).tolist()
    worths = [
        Worth(index * 0.01, gap_s, int(efficiency * 1e14), 100_000_000)
        for index, (gap_s, efficiency) in enumerate(zip(gaps, efficiencies, strict=True))
    ]
    order = EvictionOrder[int](Weights())
    for item in range(num_items):
        order.offer(item, worths[item])
    clock = time.thread_time  # whatever else the machine does
    pop_s: list[float] = []
    offer_s: list[float] = []
    for item in range(num_items, count):
        before = clock()
        order.pop(item * 0.01)
        between = clock()
        order.offer(item, worths[item])
        offer_s.append(clock() - between)
        pop_s.append(between - before)
    before = clock()
    order.reweigh(LRU)
    reweigh_s = clock() - before
    rounds = [pop_s[first : first + DECISIONS_TOGETHER] for first in range(0, DECISIONS_TIMED, DECISIONS_TOGETHER)]
    return DecisionTimes(
        num_items=num_items,
        num_classes=order.num_classes,
        pop_us_p50=_us(pop_s, 50),
        pop_us_p95=_us(pop_s, 95),
        pop_us_p99=_us(pop_s, 99),
        quiet_pop_us_p99=min(_us(part, 99) for part in rounds),
        offer_us_p99=_us(offer_s, 99),
        reweigh_us=reweigh_s * 1e6,
    )


def _saved(run: Run) -> int:
    return run.cache.savings.saved_flops


def _figures(run: Run, against: _Against) -> PolicyFigures:
    savings = run.cache.savings
    return PolicyFigures(
        policy=run.policy,
        token_hit_rate=savings.hit_tokens / max(savings.tokens, 1),
        saved_flops_part=savings.saved_flops / max(savings.flops, 1),
        vs_lru=savings.saved_flops / max(against.lru, 1),
        vs_belady=savings.saved_flops / max(against.belady, 1),
        vs_clairvoyant=savings.saved_flops / max(against.clairvoyant, 1),
        vs_unlimited=savings.saved_flops / max(against.unlimited, 1),
        num_evictions=savings.num_evictions,
        decision_us_p50=_us(run.pop_s, 50) if run.pop_s else None,
        decision_us_p99=_us(run.pop_s, 99) if run.pop_s else None,
        decisions_digest=run.digest,
        changes=tuple(f"{change.now_s:.0f} s: {change}" for change in run.changes),
    )


def _us(seconds: Sequence[float], percentile: float) -> float:
    return float(np.percentile(np.asarray(seconds), percentile)) * 1e6
