"""One request, moved to the host tier and back in the middle of things: what it holds and computes is watched."""

import hashlib
import time
from array import array
from dataclasses import dataclass, field

import torch

from daemon.config import EngineConfig
from daemon.engine.sampler import Drawn, Sampler
from daemon.engine.sequence import Sequence
from daemon.messages import SamplingParams, Submit
from tests.exact.probe import Probe


@dataclass(frozen=True, slots=True)
class Draw:
    """What a token was drawn from: digests of the logits, of every written row of all planes, and of the slot."""

    computed_len: int
    logits: str
    planes: str
    slots: str


@dataclass(slots=True)
class Trace:
    """One request from beginning to end, alone in every batch."""

    draws: list[Draw] = field(default_factory=list[Draw])
    preempted_at: list[int] = field(default_factory=list[int])  # computed rows at the time


class PreemptingProbe(Probe):
    """A probe that preempts its request at chosen positions, while nothing else runs."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.trace = Trace()
        self.engine.sampler = _Tracing(self.engine.sampler.eos_token_ids, self)

    def serve(self, prompt: list[int], max_tokens: int, preempt_at: list[int]) -> Trace:
        """Serves one prompt greedily. At each position of `preempt_at` it is moved away, everything that this leaves
        unheld on the device is dropped and filled with NaN, and it comes back: to the byte as it was.

        A position inside the prompt is reached in the middle of the chunk that begins there.
        """
        self.trace = trace = Trace()
        left = sorted(preempt_at)
        params = SamplingParams(seed=0, temperature=0.0)
        self._count += 1
        name = f"p{self._count}"
        self._answers[name] = []
        self.engine.handle(Submit(name, array("i", prompt).tobytes(), 1, max_tokens, 0, (), params, ""))
        with torch.inference_mode():
            while not (self.engine.is_idle and self.engine.cache.is_settled):
                running = self.engine.scheduler.running
                if left and running and self._is_due(running[0], left[0]):
                    self._preempt(running[0])
                    trace.preempted_at.append(left.pop(0))
                self._poison()
                self.engine.step()
                if self.engine.only_waits:
                    time.sleep(0.001)
        self.engine.check()
        assert not left, f"never came to position {left[0]}"
        return trace

    def _is_due(self, sequence: Sequence, position: int) -> bool:
        is_in_chunk = self.engine.prefill.chunk is not None
        return sequence.computed_len == position and is_in_chunk is sequence.in_prompt

    def _preempt(self, sequence: Sequence) -> None:
        engine, host = self.engine, self.engine.cache.host
        assert host is not None
        while not engine.cache.is_settled:  # what is being written down would stay on the device
            time.sleep(0.001)
            engine.cache.poll(engine.clock(), engine.unix_clock(), is_busy=False)
        before = self.draw_of(sequence, None)
        num_free = host.chunks.num_free
        engine.scheduler.preempt(sequence)
        assert sequence.swapped is not None, "the host tier had no room"
        assert host.chunks.num_free < num_free or sequence.swapped.nodes, "nothing went to the host tier"
        assert not sequence.block_table
        engine.device.drop_cache()
        assert engine.device.tree.num_on_device == 0
        self._poison()
        engine.scheduler.admit(engine.clock())
        assert sequence.is_running
        assert sequence.computed_len == before.computed_len, "something is computed twice"
        assert self.draw_of(sequence, None) == before, "it came back with other bytes"
        engine.check()

    def draw_of(self, sequence: Sequence, logits: torch.Tensor | None) -> Draw:
        """The sequence's state now."""
        pools, layout, length = self.engine.pools, self.engine.device.layout, sequence.computed_len
        table = torch.tensor(sequence.block_table[: -(-length // layout.block_size)])
        planes, slots = hashlib.blake2b(), hashlib.blake2b()
        for plane in layout.planes:
            rows = pools.planes[plane.name].index_select(0, table).flatten(0, 1)[: length // plane.tokens_per_row]
            planes.update(_bytes(rows))
        for slot in layout.slots:
            slots.update(_bytes(pools.slot_tensors[slot.name][sequence.slot]))
        drawn_from = "" if logits is None else hashlib.blake2b(_bytes(logits)).hexdigest()
        return Draw(length, drawn_from, planes.hexdigest(), slots.hexdigest())


class _Tracing(Sampler):
    def __init__(self, eos_token_ids: tuple[int, ...], probe: PreemptingProbe) -> None:
        super().__init__(eos_token_ids)
        self.probe = probe

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Drawn]:
        assert len(sequences) == 1, "the batch is not what it is compared with"
        self.probe.trace.draws.append(self.probe.draw_of(sequences[0], logits[0]))
        return super().sample(logits, sequences)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
