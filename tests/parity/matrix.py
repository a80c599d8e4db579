"""The ways of running that every family is held to, as functions of a pair of models; and what makes a comparison fair.

transformers' own top-k breaks ties by chance; here both sides take the lowest index first, and where scores nearly tie
without being equal, a comparison proves nothing: `SelectionGaps` tells how near any selection came.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

import kernels.indexer
from daemon.models.base import Model
from tests.parity.checkpoints import BLOCK_SIZE, GRID, Pair, tokens
from tests.parity.driver import Driver

TOLERANCE = 2e-4
CHUNKS = ([37], [20, 17], [1, 1, 2, 33], [16, 16, 5])


@contextmanager
def stable_topk() -> Generator[None]:
    """`Tensor.topk` and `torch.topk` with the lowest index first on ties."""

    def topk(scores, k, dim=-1, largest=True, sorted=True):
        values, indices = torch.sort(scores, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with mock.patch.object(torch.Tensor, "topk", topk), mock.patch.object(torch, "topk", topk):
        yield


@dataclass(slots=True)
class SelectionGaps:
    """Distances of the worst key kept from the best one left, over all selections that left one; ties apart."""

    gaps: list[float] = field(default_factory=list)
    num_ties: int = 0

    @contextmanager
    def watch(self) -> Generator[None]:
        """Records every selection that a model of ours makes."""
        plain = kernels.indexer.top_keys

        def watched(scores, visible, count):
            for row, num_keys in zip(scores, visible.tolist(), strict=True):
                if num_keys > count:
                    ordered = row[:num_keys].sort(descending=True).values
                    gap = float(ordered[count - 1] - ordered[count])
                    self.num_ties += gap == 0
                    if gap != 0:
                        self.gaps.append(gap)
            return plain(scores, visible, count)

        with mock.patch.object(kernels.indexer, "top_keys", watched):
            yield


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> float:
    """Returns the largest difference."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    difference = float((actual - expected).abs().max())
    assert difference <= tolerance
    assert expected.abs().max() > 0.5, "values this small would prove nothing"
    return difference


def check_chunks(pair: Pair, sizes: list[int]) -> float:
    """A prompt in these chunks gives their logits."""
    prompt = tokens(sum(sizes))
    driver = Driver(pair.ours, block_size=BLOCK_SIZE, num_blocks=80)
    return assert_close(driver.chunks(driver.add(), prompt, sizes), pair.expected(prompt))


def check_decode(pair: Pair) -> float:
    """Forty decoded tokens after a prefill on the grid give their logits."""
    text = tokens(61, seed=1)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence = driver.add()
    logits = [driver.prefill(sequence, text[:21], GRID)]
    logits += [driver.step([(sequence, [token])]) for token in text[21:]]
    return assert_close(torch.cat(logits), pair.expected(text))


def check_ragged(pair: Pair) -> float:
    """Five sequences that join and leave a batch, in changing row order, on reused blocks, give their logits."""
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    lengths = [3, 30, 17, 45, 9]
    texts = [tokens(60, seed=10 + i) for i in range(len(lengths))]
    logits: list[list[torch.Tensor]] = [[] for _ in lengths]
    sequences = {}
    joins, leaves = [0, 0, 2, 5, 7], [9, 14, 14, 12, 14]
    order = random.Random(3)
    most = 0
    for step in range(14):
        for i, join in enumerate(joins):
            if step == join:
                sequences[i] = driver.add()
                logits[i].append(driver.prefill(sequences[i], texts[i][: lengths[i]], GRID))
            if step == leaves[i]:
                driver.free(sequences.pop(i))
        rows = list(sequences)
        order.shuffle(rows)
        most = max(most, len(rows))
        out = driver.step([(sequences[i], [texts[i][sequences[i].computed_len]]) for i in rows])
        for row, i in enumerate(rows):
            logits[i].append(out[row : row + 1])
    assert most == 5
    worst = 0.0
    for i, text in enumerate(texts):
        computed = torch.cat(logits[i])
        assert len(computed) > lengths[i]
        worst = max(worst, assert_close(computed, pair.expected(text)[: len(computed)]))
    return worst


def check_verify_rows(pair: Pair) -> float:
    """Several rows of several sequences in one forward give their logits."""
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    texts = [tokens(40, seed=20 + i) for i in range(3)]
    sequences = [driver.add() for _ in texts]
    for sequence, text, length in zip(sequences, texts, (5, 31, 16), strict=True):
        driver.prefill(sequence, text[:length], GRID)
    starts = [s.computed_len for s in sequences]
    parts = [text[start:][:k] for start, text, k in zip(starts, texts, (4, 1, 12), strict=True)]
    out = driver.step(list(zip(sequences, parts, strict=True)))
    begin, worst = 0, 0.0
    for part, text, start in zip(parts, texts, starts, strict=True):
        expected = pair.expected(text)[start : start + len(part)]
        worst = max(worst, assert_close(out[begin : begin + len(part)], expected))
        begin += len(part)
    return worst


def check_verified_states(pair: Pair) -> None:
    """k rows of several sequences leave a state after each row; any of them can be the one that is kept."""
    driver = Driver(pair.ours, block_size=BLOCK_SIZE, num_blocks=96, num_slots=24)
    texts = [tokens(40, seed=60 + i) for i in range(3)]
    lengths, sizes, kept = (5, 16, 19), (4, 1, 5), (2, 1, 5)
    sequences, twins = [driver.add() for _ in texts], [driver.add() for _ in texts]
    for pool in (sequences, twins):
        for sequence, text, length in zip(pool, texts, lengths, strict=True):
            driver.prefill(sequence, text[:length], GRID)
    drafts = [text[length : length + size] for text, length, size in zip(texts, lengths, sizes, strict=True)]
    before = [driver.pools.slots[sequence.slot].clone() for sequence in sequences]
    logits, slots = driver.verify(list(zip(sequences, drafts, strict=True)))
    for sequence, image in zip(sequences, before, strict=True):
        assert torch.equal(driver.pools.slots[sequence.slot], image), "the state before the rows was written"
    begin = 0
    for sequence, twin, draft, own, keep in zip(sequences, twins, drafts, slots, kept, strict=True):
        for row, token in enumerate(draft[:keep]):
            _assert_near(logits[begin + row : begin + row + 1], driver.step([(twin, [token])]))
        driver.keep(sequence, own, keep)
        begin += len(draft)
        for name, held in driver.state(sequence).items():
            _assert_near(held, driver.state(twin)[name])
    following = [text[sequence.computed_len] for sequence, text in zip(sequences, texts, strict=True)]
    for sequence, twin, token in zip(sequences, twins, following, strict=True):
        _assert_near(driver.step([(sequence, [token])]), driver.step([(twin, [token])]))


def _assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual.double() - expected.double()).abs().max()) <= TOLERANCE


def check_resumed_bytes(model: Model) -> int:
    """Prefill resumed at any grid position gives the bytes of a cold one, logits and state; returns how often."""
    resumed = 0
    for length in (17, 31, 32, 33, 48, 50):
        text = tokens(length, seed=length)
        driver = Driver(model, block_size=BLOCK_SIZE, num_blocks=96, seed=1)
        whole = driver.add()
        saved = {}
        logits: list[torch.Tensor] = []
        for position in range(0, length, GRID):
            saved[position] = driver.fork(whole, position)
            logits.append(driver.prefill(whole, text[position : position + GRID], GRID))
        expected, state = torch.cat(logits), driver.state(whole)
        assert torch.isfinite(expected).all()
        for position in range(GRID, length, GRID):
            child = saved[position]
            assert torch.equal(driver.prefill(child, text[position:], GRID), expected[position:])
            for part, held in driver.state(child).items():
                assert torch.equal(held, state[part]), part
            driver.free(child)
            resumed += 1
    return resumed


def check_members_alone(model: Model) -> float:
    """A batch's rows equal its members alone, in any order."""
    texts = [tokens(30, seed=30 + i) for i in range(5)]
    results = []
    for groups in ([[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4]], [[3, 1, 4, 0, 2]]):
        driver = Driver(model, block_size=BLOCK_SIZE)
        sequences = [driver.add() for _ in texts]
        for i, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            driver.prefill(sequence, text[: 20 + i], GRID)
        rows: dict[int, torch.Tensor] = {}
        for group in groups:
            out = driver.step([(sequences[i], [texts[i][20 + i]]) for i in group])
            rows.update({i: out[row] for row, i in enumerate(group)})
        results.append(torch.stack([rows[i] for i in range(5)]))
    difference = max(float((result - results[0]).abs().max()) for result in results[1:])
    assert difference <= 1e-5
    return difference


def check_poisoned_reuse(model: Model) -> None:
    """A slot and blocks used by a longer sequence and poisoned give the bytes of fresh ones."""
    driver = Driver(model, block_size=BLOCK_SIZE, num_blocks=16, num_slots=2)
    text = tokens(45, seed=5)

    def run():
        sequence = driver.add()
        logits = [driver.prefill(sequence, text[:40], GRID)]
        logits += [driver.step([(sequence, [token])]) for token in text[40:]]
        return sequence, torch.cat(logits)

    first, expected = run()
    blocks = set(first.block_table)
    driver.free(first)
    longer = driver.add()
    driver.prefill(longer, tokens(50, seed=4), GRID)
    assert blocks & set(longer.block_table)
    driver.free(longer)
    again, logits = run()
    assert again.block_table != first.block_table
    assert torch.equal(logits, expected)


def check_dropped_forwards(pair: Pair) -> int:
    """A forward dropped at any pause harms nobody; returns how many pauses there were."""
    text, other_text = tokens(40, seed=8), tokens(30, seed=9)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence, other = driver.add(), driver.add()
    driver.prefill(sequence, text[:GRID], GRID)
    driver.prefill(other, other_text[:29], GRID)
    kept = driver.state(other), driver.state(sequence)
    pauses = 0
    while driver.drop_after(sequence, text[GRID : 2 * GRID], pauses):
        pauses += 1
        for before, now in zip(kept, (driver.state(other), driver.state(sequence)), strict=True):
            assert all(torch.equal(before[part], now[part]) for part in before)
    expected = pair.expected(text[: 2 * GRID])[GRID:]
    assert_close(driver.chunk(sequence, text[GRID : 2 * GRID]), expected)
    return pauses


def check_bfloat16(pair: Pair, ours: Model) -> tuple[float, float]:
    """On average bf16 strays from fp32 at most twice as far as transformers' does; returns both distances."""
    text = tokens(37, seed=2)
    theirs = type(pair.theirs).from_pretrained(pair.folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        whole = theirs(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
    expected = pair.expected(text)
    driver = Driver(ours, block_size=BLOCK_SIZE)
    mine = driver.prefill(driver.add(), text, GRID)
    distances = float((mine - expected).abs().mean()), float((whole - expected).abs().mean())
    assert torch.isfinite(mine).all()
    assert distances[0] <= 2 * distances[1]
    return distances


def their_cache(pair: Pair, text: list[int]):
    """transformers' cache after a whole prompt."""
    with torch.inference_mode():
        return pair.theirs(input_ids=torch.tensor([text]), use_cache=True).cache


def our_state(pair: Pair, text: list[int], sizes: list[int]) -> dict[str, torch.Tensor]:
    """Planes and slots after a prompt in these chunks."""
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence = driver.add()
    driver.chunks(sequence, text, sizes)
    return driver.state(sequence)


def assert_same_state(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every part, within the tolerance."""
    assert held.keys() == expected.keys()
    for part, values in expected.items():
        torch.testing.assert_close(held[part], values.to(held[part].dtype), atol=TOLERANCE, rtol=0, msg=part)
