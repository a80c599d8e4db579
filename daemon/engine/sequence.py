"""A request and its sequences, as the engine holds them: token ids, positions, and what they have acquired."""

from dataclasses import dataclass, field
from enum import StrEnum

from daemon.cache_messages import Warm
from daemon.engine.grammar_builder import Grammar
from daemon.messages import StopReason, Submit, Usage
from daemon.meter_messages import Loaded
from tiers.residency import Stream
from tiers.resources import Resources
from tiers.restore import Restore
from tiers.swap import Swapped
from tiers.tree import Node


class SequenceState(StrEnum):
    """Where a sequence is. WAITING holds nothing; FINISHED holds nothing any more."""

    WAITING = "queued"
    RESTORING = "restoring"  # holds nothing, and waits for its prefix to come from a lower tier
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"  # moved to the host tier, or lost everything and waits to be replayed
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """What the sequences of one Submit share. Times are seconds of the engine's clock."""

    submit: Submit  # of a warm: what would compute its prefix and one row more
    prompt_ids: list[int]
    order: int  # of arrival; a lower one is never preempted for a higher one, but a warm for any answer
    arrived: float
    deadline: float | None
    max_len: int  # prompt and answer: no sequence grows past it
    admitted: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    cached_len: int = 0  # prompt tokens that were found when the prompt first came to them
    reached_len: int = 0  # the furthest that its prompt has come, also before a preemption
    restores: int = 0  # prefixes waited for
    restored_host: int = 0  # tokens that came from the host tier for this request, and are in cached_len
    restored_disk: int = 0
    loads: list[Loaded] = field(default_factory=list[Loaded])  # from lower tiers, waited for before it was admitted
    known: Node | None = None  # the last of what its prompt was found to run through
    lookup_s: float = 0.0  # what looking it up took, the last time
    preemptions: int = 0
    warm: Warm | None = None
    grammar: Grammar | None = None  # that each answer follows
    gap_s: float = 1.0  # usual time between prompts of its conversation
    unwanted: dict[int, StopReason] = field(default_factory=dict[int, StopReason])  # ended before the fork: end at it

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def is_ready(self) -> bool:
        """Its prompt may be computed: the grammar will not be missing at its end."""
        return self.grammar is None or self.grammar.is_ready

    def usage(self, now: float) -> Usage:
        """Counts and times once the prompt is computed, at its first token."""
        assert self.admitted is not None
        assert self.prefilled is not None
        cached = self.cached_by_tier()
        return Usage(
            prompt_tokens=self.prompt_len,
            cached_device=cached["device"],
            cached_host=cached["host"],
            cached_disk=cached["disk"],
            queue_s=self.admitted - self.arrived,
            prefill_s=self.prefilled - self.admitted,
            first_token_s=now - self.arrived,
            lookup_s=self.lookup_s,
            loads=tuple(self.loads),
        )

    def cached_by_tier(self) -> dict[str, int]:
        """Prompt tokens that were found, each in the tier that gave it."""
        disk = min(self.restored_disk, self.cached_len)
        host = min(self.restored_host, self.cached_len - disk)
        return {"device": self.cached_len - host - disk, "host": host, "disk": disk}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of a request. It catches up from `computed_len` to the length of `token_ids`, then draws a token.

    Until the prompt's last row is computed, choice 0 stands for all: `siblings` wait on it with their slots and tail
    blocks already acquired, and are forked from it then.
    """

    request: Request
    index: int
    token_ids: list[int]  # prompt and answer
    resources: Resources
    state: SequenceState = SequenceState.WAITING
    siblings: list["Sequence"] = field(default_factory=list["Sequence"])
    block_table: list[int] = field(default_factory=list[int])
    tail_blocks: list[int] = field(default_factory=list[int])  # a sibling's own, until it is forked
    nodes: list[Node] = field(default_factory=list[Node])  # of the canonical blocks at the table's head
    slot: int | None = None
    computed_len: int = 0
    checkpoint_at: frozenset[int] = frozenset()  # grid positions whose state is worth keeping
    restore: Restore | None = None  # what it waits for
    restore_until: float = 0.0  # and how long
    restore_since: float = 0.0
    swapped: Swapped | None = None  # its state in the host tier, while it is preempted
    stream: Stream | None = None  # what it has below the device, where it is larger than that

    num_losses: int = 0  # of blocks below the device, since it last came further than before
    lost_at: int = 0  # the furthest that it was at a loss

    @property
    def id(self) -> str:
        return f"{self.request.id}/{self.index}"

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Who comes first, the smallest: answers before warming, and among each the oldest."""
        return (self.request.warm is not None, self.request.order, self.index)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.request.prompt_len

    @property
    def is_running(self) -> bool:
        return self.state in (SequenceState.PREFILLING, SequenceState.DECODING)

    @property
    def in_prompt(self) -> bool:
        """Its next rows are a chunk of the prompt."""
        return self.computed_len < self.request.prompt_len

    def lost_blocks(self) -> int:
        """What it has below the device cannot be read. Returns: how often that was so without progress."""
        self.num_losses = 1 if self.computed_len > self.lost_at else self.num_losses + 1
        self.lost_at = max(self.lost_at, self.computed_len)
        return self.num_losses

    def forget(self) -> None:
        """Back to holding nothing on the device; the token ids stay, so that a replay can bring everything back."""
        self.block_table = []
        self.tail_blocks = []
        self.nodes = []
        self.slot = None
        self.computed_len = 0
        self.resources.release()
        self.stream = None
