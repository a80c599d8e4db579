"""llama, qwen3 and qwen3_moe against transformers, in every way of running; and equality of bytes where it is owed."""

import random

import pytest
import torch

from tests.parity.checkpoints import BLOCK_SIZE, GRID, MAKERS, Pair, load, make_pair, tokens
from tests.parity.driver import Driver

TOLERANCE = 2e-4
FAMILIES = ("llama", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by name, each made once."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = make_pair(name, tmp_path_factory.mktemp("model"))
        return made[name]

    return get


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= TOLERANCE
    assert expected.abs().max() > 0.5, "logits this small would prove nothing"


@pytest.mark.parametrize("sizes", [[37], [20, 17], [1, 1, 2, 33], [16, 16, 5]], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_a_prompt_in_any_chunks_gives_their_logits(pairs, name, sizes):
    pair = pairs(name)
    prompt = tokens(37)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    assert_close(driver.chunks(driver.add(), prompt, sizes), pair.expected(prompt))


@pytest.mark.parametrize("name", MAKERS)
def test_forty_decoded_tokens_give_their_logits(pairs, name):
    pair = pairs(name)
    text = tokens(61, seed=1)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence = driver.add()
    logits = [driver.prefill(sequence, text[:21], GRID)]
    logits += [driver.step([(sequence, [token])]) for token in text[21:]]
    assert len(logits) == 1 + 40
    assert_close(torch.cat(logits), pair.expected(text))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_with_joins_and_leaves_gives_their_logits(pairs, name):
    pair = pairs(name)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    lengths = [3, 30, 17, 45, 9]
    texts = [tokens(60, seed=10 + i) for i in range(len(lengths))]
    logits = [[] for _ in lengths]
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
    for i, text in enumerate(texts):
        computed = torch.cat(logits[i])
        assert len(computed) > lengths[i]
        assert_close(computed, pair.expected(text)[: len(computed)])


@pytest.mark.parametrize("name", FAMILIES)
def test_several_rows_of_several_sequences_give_their_logits(pairs, name):
    pair = pairs(name)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    texts = [tokens(40, seed=20 + i) for i in range(3)]
    sequences = [driver.add() for _ in texts]
    for sequence, text, length in zip(sequences, texts, (5, 31, 16), strict=True):
        driver.prefill(sequence, text[:length], GRID)
    rows = [(s, text[s.computed_len :][:k]) for s, text, k in zip(sequences, texts, (4, 1, 12), strict=True)]
    starts = [s.computed_len for s in sequences]
    out = driver.step(rows)
    begin = 0
    for (_, part), text, start in zip(rows, texts, starts, strict=True):
        assert_close(out[begin : begin + len(part)], pair.expected(text)[start : start + len(part)])
        begin += len(part)


@pytest.mark.parametrize("name", FAMILIES)
def test_reused_poisoned_blocks_change_no_byte(pairs, name):
    driver = Driver(pairs(name).ours, block_size=BLOCK_SIZE, num_blocks=14)
    longer, text = tokens(50, seed=4), tokens(45, seed=5)

    def run():
        sequence = driver.add()
        logits = [driver.prefill(sequence, text[:40], GRID)]
        logits += [driver.step([(sequence, [token])]) for token in text[40:]]
        return sequence, torch.cat(logits)

    first, expected = run()
    blocks = set(first.block_table)
    driver.free(first)
    other = driver.add()
    driver.prefill(other, longer, GRID)
    assert blocks & set(other.block_table)
    driver.free(other)
    again, logits = run()
    assert again.block_table != first.block_table
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_block_ids_change_no_byte(pairs, name, dtype):
    model = load(pairs(name).folder, dtype)
    texts = [tokens(37, seed=6), tokens(22, seed=7)]
    results = []
    for seed in (0, 1):
        driver = Driver(model, block_size=BLOCK_SIZE, seed=seed)
        sequences = [driver.add() for _ in texts]
        logits = [driver.prefill(s, text[:20], GRID) for s, text in zip(sequences, texts, strict=True)]
        rows = [(s, [text[20]]) for s, text in zip(sequences, texts, strict=True)]
        results.append((torch.cat([*logits, driver.step(rows)]), sequences[0].block_table))
    assert results[0][1] != results[1][1]
    assert torch.isfinite(results[0][0]).all()
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefill_resumed_on_the_grid_gives_the_bytes_of_a_cold_one(pairs, name, dtype):
    model = load(pairs(name).folder, dtype)
    resumed = 0
    for length in (17, 31, 32, 33, 48, 50):
        text = tokens(length, seed=length)
        cold = Driver(model, block_size=BLOCK_SIZE, num_blocks=96, seed=1)
        whole = cold.add()
        expected = cold.prefill(whole, text, GRID)
        for position in range(GRID, length, GRID):
            child = cold.fork(whole, position)
            logits = cold.prefill(child, text[position:], GRID)
            assert torch.equal(logits, expected[position:])
            for part, bytes_of_part in cold.state(child).items():
                assert torch.equal(bytes_of_part, cold.state(whole)[part]), part
            cold.free(child)
            resumed += 1
    assert resumed == 1 + 1 + 1 + 2 + 2 + 3


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_rows_changes_nothing(pairs, name):
    pair = pairs(name)
    texts = [tokens(30, seed=30 + i) for i in range(4)]
    results = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        driver = Driver(pair.ours, block_size=BLOCK_SIZE)
        sequences = [driver.add() for _ in texts]
        for sequence, text in zip(sequences, texts, strict=True):
            driver.prefill(sequence, text[:25], GRID)
        out = driver.step([(sequences[i], [texts[i][25]]) for i in order])
        results.append(out[[order.index(i) for i in range(4)]])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_dropped_at_any_pause_harms_nobody(pairs, name):
    pair = pairs(name)
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
    assert pauses > 4 * len(pair.ours.layout(BLOCK_SIZE).planes) // 2
    expected = pair.expected(text[: 2 * GRID])[GRID:]
    assert_close(driver.chunk(sequence, text[GRID : 2 * GRID]), expected)
