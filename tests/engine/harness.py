"""An engine with the invented model, a clock of its own and no process: tests drive it step by step."""

import random
import threading
from array import array
from collections import defaultdict
from collections.abc import Sequence

import torch

from daemon.config import EngineConfig
from daemon.engine.decode_step import DecodeStep
from daemon.engine.engine import Engine
from daemon.engine.sequence import Sequence as EngineSequence
from daemon.engine.tiers import make_cache, make_device
from daemon.engine.turns import Turns
from daemon.messages import (
    Finished,
    Rejected,
    SamplingParams,
    Started,
    StepOutput,
    Submit,
    ToFront,
    Usage,
)
from daemon.models.base import Model
from daemon.sizing import Division
from tests.engine.invented import Invented
from tests.engine.memory_store import MemoryStore
from tiers.device_transfer import DeviceTransfer
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import Job
from tiers.pools import DevicePools, HostArena

BLOCK, GRID = 4, 8
MOST_STEPS_AT_REST = 10_000  # a loop that steps until something comes must not outlive the engine's work for ever
INVENTED = Invented()


class ManualMover:
    """Runs each job's work at the next poll, and tells of it there; or when a test lets it.

    Args:
        slow: draws how long things take: a poll runs, and tells of, only some of what there is.
    """

    def __init__(self, slow: random.Random | None = None) -> None:
        self.slow = slow
        self.is_stalled = self.is_closed = False
        self.woken = threading.Event()
        self.waiting: list[Job] = []
        self.ended: list[tuple[Job, Exception | None]] = []

    @property
    def num_pending(self) -> int:
        return len(self.waiting) + len(self.ended)

    def submit(self, job: Job) -> None:
        assert not self.is_closed
        self.waiting.append(job)

    def fileno(self) -> int:
        raise AssertionError("nobody waits for this")

    def wake(self) -> None:
        self.woken.set()

    def run_next(self) -> None:
        job = min(self.waiting, key=lambda job: job.priority)
        self.waiting.remove(job)
        error: Exception | None = None
        try:
            job.work()
        except Exception as caught:
            error = caught
        self.ended.append((job, error))

    def poll(self) -> None:
        while self.waiting and not self.is_stalled and (self.slow is None or self.slow.random() < 0.4):
            self.run_next()
        if self.slow is not None and self.slow.random() < 0.5:
            return
        ended, self.ended = self.ended, []
        for job, error in ended:
            job.done(error)

    def close(self) -> None:
        self.is_stalled, self.slow, self.is_closed = False, None, True
        self.poll()


class EqualTurns(Turns):
    """Each chunk and each row counts as much as any other, so that whose turn it is does not depend on this machine."""

    def spent(self, sequence: EngineSequence, elapsed_s: float) -> None:
        super().spent(sequence, 1.0)


class Harness:
    """Runs the real engine; after every step checks the books, poisons what is free and guards what is shared.

    Where it `flies`, decode steps are those of an accelerator, one ahead of the host.
    """

    flies = False

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_slots: int = 24,
        model: Model | None = None,
        block_size: int = BLOCK,
        grid: int = GRID,
        slice_ms: float = 0.1,
        num_chunks: int = 0,
        store: MemoryStore | None = None,
        slow: random.Random | None = None,
        model_path: str = "invented",
        **config: object,
    ) -> None:
        self.model = model or INVENTED
        self.now = 0.0
        self._steps_at_rest = 0
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.finished: dict[tuple[str, int], Finished] = {}
        self.rejected: dict[str, Rejected] = {}
        self.usage: dict[str, Usage] = {}
        self.other: list[ToFront] = []
        layout = self.model.layout(block_size)
        host_bytes = num_chunks * layout.block_bytes
        settings = {
            "max_sequences": 16,
            "growth_window": 8,
            "host_bytes": host_bytes,
            "break_even": False,
            "write_bytes_per_s": 1 << 40,
            **config,
        }
        self.config = EngineConfig(model_path, block_size=block_size, grid=grid, slice_ms=slice_ms, **settings)  # type: ignore[arg-type]
        self.pools = DevicePools(layout, num_blocks, num_slots, torch.device("cpu"))
        self.mover = ManualMover(slow)
        self.device = make_device(
            self.config,
            layout,
            Division(num_blocks, num_slots),
            grid=grid,
            fingerprint=b"f" * 32,
            compute=self.model.compute,
        )
        self.engine = Engine(
            config=self.config,
            model=self.model,
            pools=self.pools,
            cache=make_cache(self.config, self.device, self.pools, self.mover, compute=self.model.compute, store=store),
            send=self._receive,
            clock=lambda: self.now,
            unix_clock=lambda: 1e9 + self.now,
        )
        if self.flies:
            self.engine.runner.step = DecodeStep(self.model, self.pools, captures=False)
        self.engine.scheduler.turns = EqualTurns()
        self._shared: dict[bytes, tuple[int, bytes]] = {}  # key of a published block: its id and bytes then

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        namespace: str = "",
        deadline_s: float | None = None,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        grammar: str | None = None,
        **sampling: object,
    ) -> None:
        params = SamplingParams(**{"seed": 0, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        self.engine.handle(
            Submit(
                request_id=request_id,
                prompt_ids=array("i", prompt).tobytes(),
                n=n,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=() if ignore_eos else self.model.facts.eos_token_ids,
                sampling=params,
                namespace=namespace,
                deadline_s=deadline_s,
                grammar=grammar,
            )
        )

    @property
    def is_at_rest(self) -> bool:
        """Nothing is open and nothing moves: no step changes anything any more."""
        return self.engine.is_idle and self.engine.cache.is_settled

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._steps_at_rest = self._steps_at_rest + 1 if self.is_at_rest else 0
            assert self._steps_at_rest < MOST_STEPS_AT_REST, "the test waits for what cannot come any more"
            self.now += 0.01
            with torch.inference_mode():
                self.engine.step()
            self.engine.check()
            self._guard()

    def run(self, limit: int = 20_000) -> int:
        """Steps until idle; how many it took."""
        for count in range(limit):
            if self.is_at_rest:
                return count
            self.step()
        raise AssertionError(f"no end after {limit} steps: no progress")

    @property
    def host(self) -> HostTier:
        """The host tier, of a harness that has one."""
        assert self.engine.cache.host is not None
        return self.engine.cache.host

    @property
    def arena(self) -> HostArena | None:
        """Memory of the host tier."""
        residency = self.engine.cache.residency
        return residency.transfer.arena if residency and isinstance(residency.transfer, DeviceTransfer) else None

    @property
    def disk(self) -> DiskTier:
        """The disk tier, of a harness that has one."""
        assert self.engine.cache.disk is not None
        return self.engine.cache.disk

    def assert_idle_books(self) -> None:
        """Nothing is held, and free + cached + reserved = pool for blocks and slots."""
        device = self.device
        self.engine.check()
        assert self.engine.is_idle
        assert not self.engine.requests
        assert self.engine.prefill.chunk is None
        assert device.blocks.num_free + device.tree.num_cached + 1 == device.blocks.size
        assert device.slots.num_free + device.tree.num_checkpoints + 2 == device.slots.size
        cache = self.engine.cache
        assert cache.is_settled
        assert not cache.owners()
        assert cache.writedown.dirty_bytes == 0
        if cache.host is not None:
            assert cache.host.chunks.num_free + cache.host.num_cached_chunks == cache.host.chunks.size
        if cache.disk is not None:
            assert cache.disk.cached_bytes == cache.disk.store.usage_bytes

    def _receive(self, message: ToFront) -> None:
        match message:
            case StepOutput():
                for token in message.tokens:
                    self.tokens[(token.request_id, token.index)].append(token.token_id)
                    if token.chosen is not None:
                        self.logprobs[(token.request_id, token.index)].append(token.chosen)
                for end in message.finished:
                    assert (end.request_id, end.index) not in self.finished, "a choice ended twice"
                    self.finished[(end.request_id, end.index)] = end
            case Rejected():
                assert message.request_id not in self.rejected, "a request failed twice"
                self.rejected[message.request_id] = message
            case Started():
                self.usage[message.request_id] = message.usage
            case _:
                self.other.append(message)

    def _guard(self) -> None:
        """What is free becomes NaN, on the device and in the host tier; published blocks must keep their bytes."""
        pools, device = self.pools, self.device
        for id_ in range(device.blocks.size):
            if device.blocks.refs(id_) == 0 or id_ == 0:
                pools.blocks[id_] = 0xFF
        for id_ in range(device.slots.size):
            if device.slots.refs(id_) == 0 or id_ == 0:
                pools.slots[id_] = 0xFF
        if self.arena is not None:
            for id_ in range(self.host.chunks.size):
                if self.host.chunks.refs(id_) == 0:
                    self.arena.chunks[id_] = 0xFF
        published: dict[bytes, tuple[int, bytes]] = {}
        for node in device.tree.nodes():
            if node.block_id is None:
                continue
            image = pools.blocks[node.block_id].numpy().tobytes()
            known = self._shared.get(node.key)
            assert known is None or known[0] != node.block_id or known[1] == image, "a shared block was written"
            published[node.key] = (node.block_id, image)
        self._shared = published
