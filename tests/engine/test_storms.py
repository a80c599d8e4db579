"""Random traffic on small pools: it always makes progress, never writes a shared block, and returns everything."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engine.sequence import Sequence, SequenceState
from daemon.messages import Abort, StopReason
from tests.campaigns.budget import seeds
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import VOCAB, Oracle
from tests.engine.memory_store import MemoryStore
from tiers.tree import Node


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts of a few families, so that prefixes are shared."""
    family = rng.randrange(3)
    return [3 + (i * (5 + family) + family) % (VOCAB - 3) for i in range(rng.randint(1, longest))]


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(24, 40), slots=st.integers(11, 14), is_tiered=st.booleans())
@settings(max_examples=20, deadline=None)
def test_small_pools_with_pins_and_eight_choices_always_make_progress(
    seed: int, num_blocks: int, slots: int, is_tiered: bool
) -> None:
    rng = random.Random(seed)
    lower = {"num_chunks": rng.randint(8, 60), "store": MemoryStore(), "slow": rng} if is_tiered else {}
    harness = Harness(num_blocks=num_blocks, num_slots=slots, max_sequences=8, growth_window=4, **lower)  # type: ignore[arg-type]
    device, prefixes = harness.device, harness.engine.prefixes
    expected: dict[tuple[str, int], list[int]] = {}
    oracle = Oracle(INVENTED, BLOCK)
    pinned: list[Node] = []
    for i in range(12):
        prompt = random_prompt(rng, 3 * GRID)
        n, max_tokens = rng.choice([1, 1, 2, 8]), rng.randint(1, 10)
        harness.submit(f"r{i}", prompt, max_tokens, n=n, temperature=1.0, seed=i)
        for choice in range(n):
            expected[(f"r{i}", choice)] = oracle.answer(prompt, max_tokens, seed=i + choice, temperature=1.0)
        harness.step(rng.randint(0, 12))
        nodes = device.lookup(prompt, "").nodes
        if nodes and all(node.has_lower_block for node in nodes):
            prefixes.pin(nodes[-1], None)
            pinned += nodes
    harness.run()
    assert all(node.has_block for node in pinned)
    for node in list(prefixes.pins):
        prefixes.unpin(node)
    harness.run()
    refused = {request_id for request_id, rejected in harness.rejected.items() if "needs" in rejected.message}
    assert set(harness.rejected) == refused
    for (request_id, index), answer in expected.items():
        if request_id not in refused:
            assert harness.tokens[(request_id, index)] == answer, (request_id, index)
    harness.assert_idle_books()


@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize("seed", seeds(fraction=4, full=40))
def test_cancelling_in_every_state_returns_every_count(seed: int, is_tiered: bool) -> None:
    """Half of the requests are cancelled, each in a state picked for it; with all tiers the disk is slow."""
    rng = random.Random(seed)
    lower = {"num_chunks": rng.randint(20, 80), "store": MemoryStore(), "slow": rng} if is_tiered else {}
    harness = Harness(num_blocks=40, max_sequences=8, **lower)  # type: ignore[arg-type]
    states = ["queued", "prefilling", "decoding", "forked", "preempted", *(["restoring"] if is_tiered else [])]
    wanted = {f"r{i}": states[i // 2 % len(states)] for i in range(60)}
    cancelled: Counter[str] = Counter()
    waiting = list(wanted)
    while waiting or not harness.is_at_rest:
        if is_tiered and rng.random() < 0.02:
            harness.device.drop_cache()
        if waiting and rng.random() < 0.4:
            name = waiting.pop(0)
            n = rng.choice([2, 4]) if wanted[name] == "forked" else rng.choice([1, 1, 2])
            harness.submit(
                name, random_prompt(rng, 6 * GRID), rng.randint(4, 24), n=n, temperature=1.0, ignore_eos=True
            )
        harness.step()
        for request_id, choices in list(harness.engine.requests.items()):
            state = state_of(choices)
            if state == wanted[request_id] and int(request_id[1:]) % 2 and rng.random() < 0.6:
                harness.engine.handle(Abort(request_id))
                cancelled[state] += 1
                harness.engine.check()
    aborted = {key for key, end in harness.finished.items() if end.reason is StopReason.ABORTED}
    assert aborted
    assert sum(cancelled.values()) >= 10
    assert len(cancelled) >= 4, cancelled
    assert not is_tiered or harness.disk.stats.hit_tokens + harness.host.stats.hit_tokens
    harness.assert_idle_books()


def state_of(choices: list[Sequence]) -> str:
    if any(choice.state is SequenceState.PREEMPTED for choice in choices):
        return "preempted"
    if len(choices) > 1 and all(choice.num_generated for choice in choices):
        return "forked"
    return choices[0].state.value
