"""What the engine counts beside its tiers: plain numbers, touched by its one thread, read when somebody asks."""

from dataclasses import dataclass, field

from daemon.engine.sequence import Request
from tiers.meters import AGE_BOUNDS_S, Histogram, TierMeters

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
ROW_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(slots=True)
class EngineMeters:
    """Counters since start-up. None of them ever goes down."""

    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))  # of steps with something to compute
    decode_rows: Histogram = field(default_factory=lambda: Histogram(ROW_BOUNDS))  # of steps that decode
    computed_tokens: int = 0  # of prompts, those that no tier had
    lost_gap_s: Histogram = field(
        default_factory=lambda: Histogram(AGE_BOUNDS_S)
    )  # of prompts that are gone
    moved_preemptions: int = 0  # to the host tier, and back
    replayed_preemptions: int = 0  # computed again
    unbalanced_proofs: int = 0  # idle proofs that found something astray

    def asked_again(self, request: Request, gap_s: float, tiers: dict[str, TierMeters]) -> None:
        """A prompt was admitted whose beginning was asked for `gap_s` ago: the slowest tier that gave of it counts."""
        if request.restored_disk:
            gaps = tiers["disk"].reuse_gap_s
        elif request.restored_host:
            gaps = tiers["host"].reuse_gap_s
        else:
            gaps = tiers["device"].reuse_gap_s if request.cached_len else self.lost_gap_s
        gaps.observe(gap_s)

    def prompt_computed(self, request: Request, tiers: dict[str, TierMeters]) -> None:
        """A prompt is whole for the first time: where each of its tokens came from."""
        for name, num_tokens in request.cached_by_tier().items():
            if num_tokens:
                tiers[name].hit_tokens += num_tokens
        self.computed_tokens += request.prompt_len - request.cached_len
