"""Runs prompts through a real engine and reports digests of what their first token was drawn from.

As a program it reads one JSON job from its standard input and writes one JSON list: each process has a history of its
own, so equal digests from two of them say that neither history nor block ids reach a byte.
"""

import hashlib
import json
import sys
import time
from array import array
from dataclasses import asdict, dataclass

import msgspec
import torch

from daemon.config import EngineConfig
from daemon.engine.engine import Engine
from daemon.engine.sampler import Drawn, Sampler
from daemon.engine.sequence import Sequence
from daemon.engine.start import start
from daemon.messages import Rejected, SamplingParams, Started, StepOutput, Submit, ToFront, Usage


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one prompt's first token came from. Digests are of bytes; `planes` covers every position of the prompt."""

    prompt_len: int
    cached_len: int
    from_host: int  # of them, tokens that the host tier had
    from_disk: int
    logits: str
    planes: str
    slots: str
    blocks: tuple[int, ...]
    answer: tuple[int, ...]


class Probe:
    """An engine in this process, with free blocks and slots full of NaN at every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine: Engine
        self.engine, self.info = start(config, send=self._receive, progress=lambda done, total: None)
        sampler = self.engine.sampler
        self.engine.sampler = _Watching(sampler.eos_token_ids, self)
        self._usage: dict[str, Usage] = {}
        self._answers: dict[str, list[int]] = {}
        self._first: dict[str, tuple[str, str, str, tuple[int, ...]]] = {}
        self._poisoned: dict[str, set[int]] = {"block": set(), "slot": set()}
        self._count = 0

    def run(self, prompt: list[int], max_tokens: int = 1) -> Snapshot:
        """Serves one prompt greedily, alone, to the end."""
        self._count += 1
        name = f"p{self._count}"
        self._answers[name] = []
        params = SamplingParams(seed=0, temperature=0.0)
        submit = Submit(name, array("i", prompt).tobytes(), 1, max_tokens, 0, (), params, "")
        self.engine.handle(submit)
        with torch.inference_mode():
            while not (self.engine.is_idle and self.engine.cache.is_settled):
                self._poison()
                self.engine.step()
                if self.engine.only_waits:
                    time.sleep(0.001)
        self.engine.check()
        logits, planes, slots, blocks = self._first[name]
        usage, answer = self._usage[name], tuple(self._answers[name])
        cached_len = usage.cached_device + usage.cached_host + usage.cached_disk
        return Snapshot(
            len(prompt), cached_len, usage.cached_host, usage.cached_disk, logits, planes, slots, blocks, answer
        )

    def begin(self, name: str) -> None:
        """A request that a test submits itself."""
        self._answers[name] = []

    def usage_of_last(self) -> Usage:
        """Counts and times of the prompt that `run` served last."""
        return self._usage[f"p{self._count}"]

    def forget(self) -> None:
        """Drops everything cached on the device; what became free is NaN before the next prompt's time begins."""
        self.engine.device.drop_cache()
        self._poison()

    def _receive(self, message: ToFront) -> None:
        match message:
            case Started():
                self._usage[message.request_id] = message.usage
            case StepOutput():
                for token in message.tokens:
                    self._answers[token.request_id].append(token.token_id)
            case Rejected():
                raise AssertionError(message)
            case _:
                pass

    def _poison(self) -> None:
        """Fills whatever became free since the last step with NaN."""
        for kind, pool, images in (
            ("block", self.engine.device.blocks, self.engine.pools.blocks),
            ("slot", self.engine.device.slots, self.engine.pools.slots),
        ):
            free = {id_ for id_ in range(pool.size) if pool.refs(id_) == 0}
            for id_ in free - self._poisoned[kind]:
                images[id_] = 0xFF
            self._poisoned[kind] = free

    def observe(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """Called with the row that the first token is drawn from, while the sequence still holds its state."""
        pools, size = self.engine.pools, self.engine.device.layout.block_size
        prompt_len = sequence.request.prompt_len
        table = torch.tensor(sequence.block_table[: -(-prompt_len // size)], device=pools.blocks.device)
        planes = hashlib.blake2b()
        for plane in pools.layout.planes:
            rows = pools.planes[plane.name].index_select(0, table).flatten(0, 1)[: prompt_len // plane.tokens_per_row]
            planes.update(_bytes(rows))
        slots = hashlib.blake2b()
        for slot in pools.layout.slots:
            slots.update(_bytes(pools.slot_tensors[slot.name][sequence.slot]))
        self._first[sequence.request.id] = (
            hashlib.blake2b(_bytes(logits)).hexdigest(),
            planes.hexdigest(),
            slots.hexdigest(),
            tuple(sequence.block_table),
        )


class _Watching(Sampler):
    def __init__(self, eos_token_ids: tuple[int, ...], probe: Probe) -> None:
        super().__init__(eos_token_ids)
        self.probe = probe

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Drawn]:
        for row, sequence in enumerate(sequences):
            if sequence.num_generated == 0:
                self.probe.observe(logits[row], sequence)
        return super().sample(logits, sequences)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def main() -> None:
    """Job: {"config": {...}, "steps": [{"prompt": [...], "max_tokens": 1} | {"forget": true}]}."""
    job = json.load(sys.stdin)
    probe = Probe(msgspec.convert(job["config"], EngineConfig))
    snapshots: list[Snapshot] = []
    began = time.monotonic()
    for step in job["steps"]:
        if "forget" in step:
            probe.forget()
        else:
            snapshots.append(probe.run(step["prompt"], step.get("max_tokens", 1)))
    probe.engine.close()
    print(f"{len(snapshots)} prompts in {time.monotonic() - began:.1f} s", file=sys.stderr)
    json.dump([asdict(snapshot) for snapshot in snapshots], sys.stdout)


if __name__ == "__main__":
    main()
