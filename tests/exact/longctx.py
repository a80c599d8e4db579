"""A probe that serves one prompt with few blocks on the device, and reads its state wherever it lies."""

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from daemon.config import EngineConfig
from daemon.engine.sampler import Drawn, Sampler
from daemon.engine.sequence import Sequence
from daemon.messages import SamplingParams, Submit
from tests.exact.families import BLOCK, GRID, config_of, prompt_of
from tests.exact.probe import Probe
from tiers.device_transfer import DeviceTransfer
from tiers.layout import StateLayout
from tiers.residency import Tier


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a token was drawn from: digests of the logits, of every written row of all planes, and of the slot."""

    computed_len: int
    logits: str
    planes: str
    slots: str


@dataclass(frozen=True, slots=True)
class Residence:
    """Blocks of a sequence by tier, at one draw."""

    device: int
    host: int
    spill: int


class LongProbe(Probe):
    """Records every draw of the one request that it serves."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.draws: list[Drawing] = []
        self.residences: list[Residence] = []
        self.most_read_bytes = 0
        self.flip_after: int | None = None  # draws, before a bit of a block below is another
        self.engine.sampler = _Tracing(self.engine.sampler.eos_token_ids, self)

    def serve(self, prompt: list[int], max_tokens: int) -> list[Drawing]:
        """Serves one prompt greedily, alone, to the end."""
        self.draws, self.residences = [], []
        self._count += 1
        name = f"p{self._count}"
        self._answers[name] = []
        params = SamplingParams(seed=0, temperature=0.0)
        self.engine.handle(Submit(name, array("i", prompt).tobytes(), 1, max_tokens, 0, (), params, ""))
        with torch.inference_mode():
            self.run_until_idle()
        self.engine.check()
        return self.draws

    def answer(self) -> list[int]:
        """Tokens of the request that was served last."""
        return self._answers[f"p{self._count}"]

    def run_until_idle(self) -> None:
        """Steps until nothing is left, with free blocks and slots full of NaN and the books checked all the time."""
        while not (self.engine.is_idle and self.engine.cache.is_settled):
            self._poison()
            self.engine.step()
            self.engine.scheduler.check()

    def saw(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Called with each row that a token is drawn from."""
        engine, layout = self.engine, self.engine.device.layout
        length = sequence.computed_len
        table = sequence.block_table[: -(-length // layout.block_size)]
        planes, slots = hashlib.blake2b(), hashlib.blake2b()
        # Every byte of the planes at some draws; the logits of the others say the rest.
        images = [self._image(block).cpu() for block in table] if len(self.draws) % 5 == 0 else []
        for part, plane in zip(layout.block_parts, layout.planes, strict=True):
            if not images:
                break
            rows = torch.cat([image[part.offset : part.offset + part.num_bytes] for image in images])
            planes.update(rows.view(-1, part.num_bytes // part.shape[0])[: length // plane.tokens_per_row].numpy().data)
        for slot in layout.slots:
            state = engine.pools.slot_tensors[slot.name][sequence.slot]
            slots.update(state.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        digest = hashlib.blake2b(logits.contiguous().cpu().numpy().tobytes()).hexdigest()
        self.draws.append(Drawing(length, digest, planes.hexdigest(), slots.hexdigest()))
        space = engine.cache.residency.space if engine.cache.residency is not None else None
        tiers = [Tier.DEVICE if space is None else space.tier_of(block) for block in table]
        self.residences.append(Residence(*(tiers.count(tier) for tier in Tier)))
        if self.flip_after == len(self.draws):
            first = next(block for block in table if space is not None and space.tier_of(block) is Tier.HOST)
            self._image(first)[1] ^= 0x40
        if sequence.stream is not None:
            self.most_read_bytes = max(self.most_read_bytes, sequence.stream.last_row.num_bytes)

    def _image(self, block: int) -> torch.Tensor:
        """A block's bytes, from its tier, by another way than forwards read them."""
        engine = self.engine
        if block < engine.device.blocks.size:
            return engine.pools.blocks[block]
        residency = engine.cache.residency
        assert residency is not None
        assert isinstance(residency.transfer, DeviceTransfer)
        if residency.space.tier_of(block) is Tier.HOST:
            assert residency.transfer.arena is not None
            return residency.transfer.arena.chunks[block - residency.space.first_host]
        assert residency.spill is not None
        image = torch.zeros(engine.device.layout.block_bytes, dtype=torch.uint8)
        for part in engine.device.layout.block_parts:
            target = image[part.offset : part.offset + part.num_bytes].numpy().data
            residency.spill.read(block - residency.space.first_spill, part, target)
        return image


class _Tracing(Sampler):
    def __init__(self, eos_token_ids: tuple[int, ...], probe: LongProbe) -> None:
        super().__init__(eos_token_ids)
        self.probe = probe

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Drawn]:
        for row, sequence in enumerate(sequences):
            self.probe.saw(sequence, logits[row])
        return super().sample(logits, sequences)


def small_device(
    family: str, models: Path, dtype: str, share: float, *, tier: str, folder: Path, **more: object
) -> EngineConfig:
    """An engine whose device holds little more than a sequence's tail, and the rest below it.

    Args:
        share: of what is free, kept resident.
        tier: "host" or "spill".
        folder: of the disk tier.
    """
    layout = _layout(family, models, dtype)
    num_blocks = 2 * GRID // BLOCK + 6 + int(share * 40)
    pool_bytes = 6 * layout.slot_bytes + num_blocks * layout.block_bytes
    room = 40 * GRID // BLOCK * layout.block_bytes
    below = {"host_bytes": room + 8 * layout.slot_bytes} if tier == "host" else {"spill_bytes": room}
    if tier == "spill":
        below["disk_path"] = str(folder / f"{family} {dtype}")  # type: ignore[assignment]  # one value is a text
    settings = {"pool_bytes": pool_bytes, "max_sequences": 1, "stream_share": share, **below, **more}
    return config_of(family, models, dtype, **settings)


TIERS = ("host", "spill")
SELECTS = ("deepseek_v32", "glm_moe_dsa", "glm5_next", "qwen4_exp")  # attend to what an indexer picks


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison; `share` is the stream_share of the small device."""

    family: str
    dtype: str
    length: int
    share: float


def compare_with_resident(cases: list[Case], tiers: tuple[str, ...], folder: Path) -> Counter[str]:
    """Serves one prompt with everything resident, and with most of it in a lower tier; counts the draws by tier.

    The cases differ in their shares alone, so that what is resident is computed once.
    """
    family, dtype, length = cases[0].family, cases[0].dtype, cases[0].length
    assert {(case.family, case.dtype, case.length) for case in cases} == {(family, dtype, length)}
    seen: Counter[str] = Counter()
    models, max_tokens = folder / f"models {dtype}", GRID + 3
    prompt = prompt_of(length, length)
    resident = LongProbe(config_of(family, models, dtype))
    draws = resident.serve(prompt, max_tokens)
    resident.engine.close()
    assert len(draws) == max_tokens
    assert len({draw.logits for draw in draws}) > max_tokens // 2, "the logits say nothing"
    for case in cases:
        for tier in tiers:
            below = folder / f"{tier} {case.share}"
            probe = LongProbe(small_device(family, models, dtype, case.share, tier=tier, folder=below))
            found = probe.serve(prompt, max_tokens)
            _compare(probe, found, draws, f"{case}, {tier}")
            seen[tier] += len(found)
            probe.engine.close()
    return seen


def _compare(probe: LongProbe, found: list[Drawing], draws: list[Drawing], where: str) -> None:
    """Equal draws, and it was streamed: of one that was served with little on the device."""
    for number, (streamed, whole) in enumerate(zip(found, draws, strict=True)):
        assert streamed == whole, f"{where}: draw {number}"
    has_spill = probe.engine.config.spill_bytes is not None
    below = [residence.spill if has_spill else residence.host for residence in probe.residences]
    assert min(below) > 0, f"{where}: everything was resident"
    assert probe.most_read_bytes > 0, f"{where}: nothing was streamed"
    meters = probe.engine.cache.meters["disk" if has_spill else "host"]
    assert meters.streamed_bytes > probe.most_read_bytes, where
    if has_spill and Path(probe.engine.config.model_path).name in SELECTS:
        assert 0 < meters.picked_hits < meters.picked, f"{where}: selection had no use of the cache"


@cache
def _layout(family: str, models: Path, dtype: str) -> StateLayout:
    probe = LongProbe(config_of(family, models, dtype))
    probe.engine.close()
    return probe.engine.device.layout
