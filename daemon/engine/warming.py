"""Warming jobs: a prefix is computed like any prompt's, then followed down to the tier that was asked for.

A warm is a request with one row more than its prefix and no answer, so that admission, restores, preemption and the
grid are those of every request. When its last row is computed the sequence gives everything back, and the job waits,
holding nothing, until the tier has the prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass

from daemon.cache_messages import BytesByTier, TierName, Warm, WarmDone, WarmProgress, WarmStage
from daemon.engine.sequence import Sequence
from daemon.errors import ErrorReason
from daemon.messages import Rejected, SamplingParams, Submit, ToFront
from tiers.cache import TieredCache
from tiers.prefixes import Prefixes
from tiers.tree import Node

WRITE_TIMEOUT_S = 120.0  # for a tier to take a computed prefix
NOTHING_PINS = "a pin binds what is in the host tier or on disk, and this daemon has neither"
NO_TOKEN = (0).to_bytes(4, "little")  # of the row past the prefix, whose state and logits nobody reads


@dataclass(slots=True)
class Writing:
    """A computed prefix on its way down."""

    warm: Warm
    node: Node
    cached_tokens: int
    until: float
    expires: float | None = None
    is_set: bool = False  # its pin, or its time to live
    was_pinned: bool = False  # before
    until_before: float | None = None  # its time to live
    is_kept: bool | None = None  # what was set, by the disk; None: not known yet

    def told(self, is_kept: bool) -> None:
        self.is_kept = is_kept


class Warming:
    """Owns the jobs whose prefix is computed; the scheduler has the others."""

    def __init__(
        self,
        cache: TieredCache,
        prefixes: Prefixes,
        pin_refusal: Callable[[Node], str | None],
        send: Callable[[ToFront], None],
    ) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.pin_refusal = pin_refusal
        self.send = send
        self.writing: dict[str, Writing] = {}

    def submit_for(self, warm: Warm) -> Submit:
        """The request that computes a warm's prefix: all whole chunks of its prompt, and one row."""
        grid_bytes = self.cache.device.grid * len(NO_TOKEN)
        prefix = warm.prompt_ids[: len(warm.prompt_ids) // grid_bytes * grid_bytes]
        assert prefix, "a prompt without a prefix to share"
        sampling = SamplingParams(seed=0, temperature=0.0)
        return Submit(
            request_id=warm.request_id,
            prompt_ids=prefix + NO_TOKEN,
            n=1,
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=(),
            sampling=sampling,
            namespace=warm.namespace,
        )

    def refusal(self, warm: Warm) -> Rejected | None:
        """Why a warm cannot be done here, whatever its prompt."""
        has = {TierName.DEVICE: True, TierName.HOST: self.cache.host, TierName.DISK: self.cache.disk}
        if not has[warm.tier]:
            return Rejected(warm.request_id, ErrorReason.TIER_UNAVAILABLE, f"there is no {warm.tier} tier")
        if warm.pin and not self.prefixes.can_pin:
            return Rejected(warm.request_id, ErrorReason.TIER_UNAVAILABLE, NOTHING_PINS)
        return None

    def progressed(self, sequence: Sequence) -> None:
        """A warm was admitted, or has computed a chunk more."""
        warm = sequence.request.warm
        assert warm is not None
        total = sequence.request.prompt_len - 1
        self.send(WarmProgress(warm.request_id, WarmStage.COMPUTING, min(sequence.computed_len, total), total))

    def computed(self, sequence: Sequence, now: float) -> None:
        """The prefix is in the tree. The caller ends the sequence."""
        request = sequence.request
        warm = request.warm
        assert warm is not None
        total = request.prompt_len - 1
        node = self.prefixes.by_prompt(warm.namespace, request.prompt_ids[:total])
        is_whole = node is not None and node.depth * self.cache.device.layout.block_size == total
        if node is None or not is_whole or not self.prefixes.can_resume(node):
            reason = "the prefix is computed, but there was no room to keep its state"
            self.send(Rejected(warm.request_id, ErrorReason.NO_CAPACITY, reason, retry_after_s=5.0))
            return
        self.cache.offer(node)
        self.writing[warm.request_id] = Writing(warm, node, request.cached_len, now + WRITE_TIMEOUT_S)
        if warm.tier is not TierName.DEVICE:
            self.send(WarmProgress(warm.request_id, WarmStage.WRITING, 0, total))

    def abort(self, request_id: str) -> bool:
        """Ends a job that is being written down; what is there stays as any prompt's would."""
        job = self.writing.pop(request_id, None)
        if job is not None:
            self._give_up_pin(job)
        return job is not None

    def poll(self, now: float, unix_s: float) -> None:
        """Sends the receipts of those that are where they should be."""
        for request_id, job in list(self.writing.items()):
            if job.node.parent is None:
                self._reject(job, ErrorReason.NO_CAPACITY, "the prefix was evicted before it could be written")
            elif job.is_set or self._is_in(job.node, job.warm.tier):
                if not self._finish(job, now, unix_s):
                    continue
            elif now >= job.until or self.cache.writedown.is_idle:
                self._reject(job, ErrorReason.TIER_UNAVAILABLE, f"the {job.warm.tier} tier did not take the prefix")
            else:
                continue
            del self.writing[request_id]

    def _is_in(self, node: Node, tier: TierName) -> bool:
        """The path down to the node, and the checkpoint there if it has one, are in the tier."""
        match tier:
            case TierName.DEVICE:
                return True  # it was computed there this moment
            case TierName.HOST:
                has_state = not node.has_state or node.host_state is not None
                return has_state and all(above.host_block is not None for above in node.path())
            case TierName.DISK:
                return self.cache.disk is not None and self.cache.writedown.is_written(node)

    def _finish(self, job: Writing, now: float, unix_s: float) -> bool:
        """Whether all is done. A receipt that says durable waits for the record of its pin or its time, too."""
        warm, node = job.warm, job.node
        if not job.is_set:
            refusal = self.pin_refusal(node) if warm.pin else None
            if refusal is not None:
                self._reject(job, ErrorReason.QUOTA_EXCEEDED, refusal)
                return True
            job.expires = None if warm.ttl_s is None else unix_s + warm.ttl_s
            job.is_set, job.was_pinned = True, node in self.prefixes.pins
            job.until_before = self.prefixes.times_to_live.get(node)
            if warm.pin:
                self.prefixes.pin(node, job.expires, job.told)
            else:
                self.prefixes.keep_until(node, job.expires, job.told)
        if warm.durable and not job.is_kept:
            if job.is_kept is None and now < job.until:
                return False
            self._give_up_pin(job)
            what = "pin" if warm.pin else "time to live"
            self._reject(job, ErrorReason.TIER_UNAVAILABLE, f"the disk has the prefix, but did not take its {what}")
            return True
        size = self.prefixes.bytes_of(node.path())
        self.send(
            WarmDone(
                request_id=warm.request_id,
                key=node.key.hex(),
                tokens=node.depth * self.cache.device.layout.block_size,
                cached_tokens=job.cached_tokens,
                bytes=BytesByTier(size.device, size.host, size.disk),
                durable=self._is_in(node, TierName.DISK),
                pinned=warm.pin,
                expires_time_s=job.expires,
            )
        )
        return True

    def _give_up_pin(self, job: Writing) -> None:
        if job.warm.pin and job.is_set and not job.was_pinned:
            self.prefixes.unpin(job.node)
            if job.until_before is not None and job.node.parent is not None:
                self.prefixes.keep_until(job.node, job.until_before)

    def _reject(self, job: Writing, reason: ErrorReason, message: str) -> None:
        self.send(Rejected(job.warm.request_id, reason, message, retry_after_s=5.0))
