"""bf16 logits beside transformers', in its own measure: how far its whole and its cached runs lie from each other.

Checkpoints are saved in bf16 as real ones are, so that both programs read the same numbers. Rounding may tip a choice
of experts or keys, in transformers' cached run as in ours, and then logits differ by what the choice is worth; the
smooth makers take all choices away (every expert, every key), and what is left is where values are rounded.

transformers has two forms of attention, which round scores and shares differently, and so has a whole run in one and
cached runs in both. Within one form, some families' cached runs have nearly the bits of its whole run, on some
processors every one: that says how alike its products are, not how far bf16 lets two right answers be apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from daemon.config import EngineConfig
from daemon.models.base import Model
from daemon.models.load import load_model
from tests.parity import checkpoints, hybrid_checkpoints, sparse_checkpoints
from tests.parity.driver import Driver

BLOCK_SIZE, GRID = 64, 1024  # those of the daemon
FORM, OTHER_FORM = "sdpa", "eager"  # of transformers' attention: its default, and the other
SMOOTH_MAKERS = checkpoints.SMOOTH_MAKERS | hybrid_checkpoints.SMOOTH_MAKERS | sparse_checkpoints.SMOOTH_MAKERS
MAKERS = checkpoints.MAKERS | hybrid_checkpoints.MAKERS | sparse_checkpoints.MAKERS
Maker = Callable[[], PreTrainedModel]


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest differences of logits from transformers' whole run, over all texts and ways of running."""

    theirs: float  # of its cached runs, in both of its forms of attention
    theirs_alike: float  # of those in the whole run's form alone
    ours: float  # of our runs, whole and cached
    equal: float  # share of our whole run's logits that have its very bits
    num_logits: int  # that ours were compared in

    def __or__(self, other: "Differences") -> "Differences":
        """Of both."""
        num_logits = self.num_logits + other.num_logits
        equal = (self.equal * self.num_logits + other.equal * other.num_logits) / num_logits
        return Differences(
            theirs=max(self.theirs, other.theirs),
            theirs_alike=max(self.theirs_alike, other.theirs_alike),
            ours=max(self.ours, other.ours),
            equal=equal,
            num_logits=num_logits,
        )


def save_narrow(maker: Maker, folder: Path, seed: int) -> PreTrainedModel:
    """A random model in bf16, but for what transformers keeps in float32, saved as such into `folder`."""
    torch.manual_seed(seed)
    wide = maker().eval()
    sparse_checkpoints.randomise(wide, seed)
    wide.save_pretrained(folder / "wide")
    narrow = type(wide).from_pretrained(folder / "wide", dtype=torch.bfloat16).eval()
    narrow.save_pretrained(folder)
    hybrid_checkpoints.name_dense_layers(folder)
    return narrow


def load_narrow(folder: Path) -> Model:
    """Ours, with the daemon's own block, grid and tile."""
    config = EngineConfig(str(folder), dtype="bfloat16", device="cpu", block_size=BLOCK_SIZE, grid=GRID)
    return load_model(config, lambda done_bytes, total_bytes: None).model


def ways_of(length: int) -> tuple[list[int], ...]:
    """Sizes of the forwards of a cached run: chunks; token by token, from the first and after a short prompt."""
    chunks, rest = divmod(length, 40)
    return [40] * chunks + ([rest] if rest else []), [1] * length, [16] + [1] * (length - 16)


def compare(theirs: PreTrainedModel, ours: Model, texts: list[list[int]]) -> Differences:
    """Runs all texts, of one length, at once, in every way."""
    assert theirs.config._attn_implementation == FORM  # pyright: ignore[reportPrivateUsage]
    length = len(texts[0])
    with torch.inference_mode():
        whole = theirs(input_ids=torch.tensor(texts), use_cache=False).logits.float()
    own = ours_of(ours, texts, [length])
    ways = ways_of(length)
    alike = [_cached(theirs, texts, sizes) - whole for sizes in ways]
    theirs.set_attn_implementation(OTHER_FORM)
    unlike = [_cached(theirs, texts, sizes) - whole for sizes in ways]
    theirs.set_attn_implementation(FORM)
    return Differences(
        theirs=_largest(alike + unlike),
        theirs_alike=_largest(alike),
        ours=_largest([own - whole] + [ours_of(ours, texts, sizes) - whole for sizes in ways]),
        equal=float((own == whole).float().mean()),
        num_logits=(1 + len(ways)) * whole.numel(),
    )


def ours_of(model: Model, texts: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Our logits [texts, tokens, vocab_size] by forwards of these sizes; single tokens go through one step for all."""
    num_blocks = len(texts) * -(-len(texts[0]) // BLOCK_SIZE)
    driver = Driver(model, block_size=BLOCK_SIZE, num_blocks=num_blocks, num_slots=len(texts) + 1)
    sequences = [driver.add() for _ in texts]
    logits: list[torch.Tensor] = []
    begin = 0
    for size in sizes:
        parts = [text[begin : begin + size] for text in texts]
        if size == 1:
            logits.append(driver.step(list(zip(sequences, parts, strict=True)))[:, None])
        else:
            chunks = [driver.chunk(sequence, part) for sequence, part in zip(sequences, parts, strict=True)]
            logits.append(torch.stack(chunks))
        begin += size
    return torch.cat(logits, 1)


def _cached(model: PreTrainedModel, texts: list[list[int]], sizes: list[int]) -> torch.Tensor:
    cache, logits, begin = None, [], 0
    with torch.inference_mode():
        for size in sizes:
            ids = torch.tensor([text[begin : begin + size] for text in texts])
            out = model(input_ids=ids, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits.float())
            begin += size
    return torch.cat(logits, 1)


def _largest(differences: list[torch.Tensor]) -> float:
    assert all(difference.isfinite().all() for difference in differences)
    return max(float(difference.abs().max()) for difference in differences)
