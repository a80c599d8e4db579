"""The engine serves an invented model exactly: cold, cached, forked, preempted, cancelled."""

import pytest

from daemon.batch import Batch
from daemon.errors import ErrorReason
from daemon.layers.steps import HostStageError
from daemon.messages import Abort, Answer, Query, QueryKind, StopReason, StopSequence
from daemon.models.base import Steps
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import VOCAB, Invented, Oracle
from tiers.pools import DevicePools


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (i * i * 7 + i * 5 + salt * 11) % (VOCAB - 3) for i in range(length)]


def test_a_model_with_invented_planes_and_slots_is_served_exactly() -> None:
    harness = Harness()
    oracle = Oracle(INVENTED, BLOCK)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, GRID - 1, GRID, GRID + 1, 3 * GRID, 3 * GRID + 5]
    for length in lengths:
        harness.submit(f"r{length}", prompt_of(length, length), 10)
    harness.run()
    for length in lengths:
        assert harness.tokens[(f"r{length}", 0)] == oracle.answer(prompt_of(length, length), 10), length
    harness.assert_idle_books()


@pytest.mark.parametrize("length", [2 * GRID - 1, 2 * GRID, 2 * GRID + 1, 5 * GRID, 5 * GRID + 3])
def test_a_hit_resumes_at_the_largest_grid_position_below_the_end_and_gives_the_same_tokens(length: int) -> None:
    harness = Harness()
    for name in ("cold", "hit"):
        harness.submit(name, prompt_of(length), 6)
        harness.run()
    assert harness.usage["cold"].cached_device == 0
    assert harness.usage["hit"].cached_device == (length - 1) // GRID * GRID > 0
    assert harness.tokens[("hit", 0)] == harness.tokens[("cold", 0)]
    assert harness.tokens[("hit", 0)] == Oracle(INVENTED, BLOCK).answer(prompt_of(length), 6)


def test_the_next_turn_of_a_conversation_finds_the_published_floor() -> None:
    harness = Harness()
    first = prompt_of(3 * GRID + 2)
    harness.submit("turn-1", first, 9)
    harness.run()
    second = first + harness.tokens[("turn-1", 0)] + prompt_of(5, 9)
    harness.submit("turn-2", second, 9)
    harness.run()
    assert harness.usage["turn-2"].cached_device == 3 * GRID
    assert harness.tokens[("turn-2", 0)] == Oracle(INVENTED, BLOCK).answer(second, 9)


def test_a_branch_off_a_known_path_leaves_a_checkpoint_for_the_third_request() -> None:
    harness = Harness()
    shared = prompt_of(3 * GRID)
    for name, salt in (("a", 1), ("b", 2), ("c", 3)):
        harness.submit(name, shared + prompt_of(2 * GRID, salt), 4)
        harness.run()
    assert harness.usage["b"].cached_device == 0, "blocks were known, but no state at the branch point"
    assert harness.usage["c"].cached_device == 3 * GRID


def test_a_state_that_one_is_about_to_resume_from_makes_no_room_for_who_is_admitted_with_it() -> None:
    harness = Harness(num_slots=5)  # three for sequences and checkpoints
    prompt = prompt_of(GRID + 3)
    harness.submit("cold", prompt, 2, ignore_eos=True)
    harness.run()
    assert (harness.device.tree.num_checkpoints, harness.device.slots.num_free) == (1, 2)
    for name, asked in (("hit", prompt), ("b", prompt_of(5, 7)), ("c", prompt_of(5, 8))):
        harness.submit(name, asked, 4, ignore_eos=True)
    harness.run()
    assert harness.usage["hit"].cached_device == GRID
    assert harness.tokens[("hit", 0)] == Oracle(INVENTED, BLOCK).answer(prompt, 4, stop_at_eos=False)
    assert len(harness.tokens[("c", 0)]) == 4
    harness.assert_idle_books()


def test_namespaces_never_share() -> None:
    harness = Harness()
    for namespace in ("one", "two", "one"):
        harness.submit(f"{namespace}-{len(harness.usage)}", prompt_of(4 * GRID + 1), 3, namespace=namespace)
        harness.run()
    assert [usage.cached_device for usage in harness.usage.values()] == [0, 0, 4 * GRID]


def test_a_prompt_in_flight_is_adopted_by_those_that_come_after_it() -> None:
    harness = Harness()
    for i in range(4):
        harness.submit(f"r{i}", prompt_of(4 * GRID + 3), 5)
    harness.run()
    expected = Oracle(INVENTED, BLOCK).answer(prompt_of(4 * GRID + 3), 5)
    assert all(harness.tokens[(f"r{i}", 0)] == expected for i in range(4))
    assert all(harness.usage[f"r{i}"].cached_device == 4 * GRID for i in range(1, 4))
    harness.assert_idle_books()


@pytest.mark.parametrize("length", [BLOCK * 4 - 1, BLOCK * 4, BLOCK * 4 + 1, GRID * 2 - 1, GRID * 2, GRID * 2 + 1])
def test_each_fork_equals_its_own_seed_alone(length: int) -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(length), 12, n=8, temperature=1.5, seed=100)
    harness.run()
    oracle = Oracle(INVENTED, BLOCK)
    answers = [harness.tokens[("r", i)] for i in range(8)]
    assert answers == [oracle.answer(prompt_of(length), 12, seed=100 + i, temperature=1.5) for i in range(8)]
    assert len({tuple(answer) for answer in answers}) > 1
    harness.assert_idle_books()


def test_other_traffic_never_shifts_a_seed() -> None:
    harness = Harness()
    harness.submit("alone", prompt_of(9), 10, temperature=1.0, seed=5)
    harness.run()
    for i in range(6):
        harness.submit(f"noise{i}", prompt_of(3 + i, i), 20, temperature=1.0, seed=i)
    harness.step(5)
    harness.submit("crowded", prompt_of(9), 10, temperature=1.0, seed=5)
    harness.run()
    assert harness.tokens[("crowded", 0)] == harness.tokens[("alone", 0)]


def test_preempted_sequences_are_replayed_to_the_same_tokens() -> None:
    harness = Harness(num_blocks=14)
    prompts = [prompt_of(6 + i, i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        harness.submit(f"r{i}", prompt, 30, temperature=1.0, seed=i, ignore_eos=True)
    preempted = 0
    while not harness.engine.is_idle:
        harness.step()
        preempted = max(preempted, *(s.request.preemptions for s in harness.engine.scheduler.sequences()), 0)
    assert preempted > 0, "the pool was large enough: nothing was preempted"
    oracle = Oracle(INVENTED, BLOCK)
    for i, prompt in enumerate(prompts):
        assert harness.tokens[(f"r{i}", 0)] == oracle.answer(prompt, 30, seed=i, temperature=1.0, stop_at_eos=False), i
    harness.assert_idle_books()


def test_decoding_goes_on_between_the_slices_of_a_long_prompt() -> None:
    harness = Harness(num_blocks=200)
    harness.submit("running", prompt_of(3), 60, temperature=1.0, min_tokens=60)
    harness.step(3)
    before = len(harness.tokens[("running", 0)])
    harness.submit("long", prompt_of(20 * GRID), 2)
    while ("long") not in harness.usage:
        harness.step()
    assert len(harness.tokens[("running", 0)]) - before >= 20


def test_the_context_limit_is_exact() -> None:
    harness = Harness(num_blocks=64, max_context_tokens=40)
    harness.submit("fits", prompt_of(39), 100)
    harness.submit("full", prompt_of(40), 100)
    harness.run()
    assert len(harness.tokens[("fits", 0)]) == 1
    assert harness.finished[("fits", 0)].reason in (StopReason.LENGTH, StopReason.STOP_TOKEN)
    assert harness.rejected["full"].reason is ErrorReason.CONTEXT_TOO_LONG


def test_what_can_never_fit_is_refused_before_any_work() -> None:
    harness = Harness(num_blocks=9)
    harness.submit("largest", prompt_of(8 * BLOCK - 8), 8)
    harness.submit("too-long", prompt_of(8 * BLOCK - 8), 9)
    harness.submit("too-many", prompt_of(4), 4, n=17)
    harness.run()
    assert ("largest", 0) in harness.finished
    assert harness.rejected["too-long"].reason is ErrorReason.CONTEXT_TOO_LONG
    assert harness.rejected["too-many"].reason is ErrorReason.CONTEXT_TOO_LONG
    harness.assert_idle_books()


def test_the_queue_is_bounded_and_a_duplicate_id_is_refused() -> None:
    harness = Harness(max_queue=2, max_sequences=1)
    harness.submit("a", prompt_of(5), 50, min_tokens=50)
    harness.step()
    harness.submit("a", prompt_of(5))
    harness.submit("b", prompt_of(5))
    harness.submit("c", prompt_of(5))
    harness.submit("d", prompt_of(5))
    assert harness.rejected["a"].reason is ErrorReason.DUPLICATE_REQUEST_ID
    assert harness.rejected["d"].reason is ErrorReason.QUEUE_FULL
    assert harness.rejected["d"].retry_after_s
    harness.run()
    assert ("c", 0) in harness.finished


def test_the_queue_is_bounded_also_while_its_requests_stand_aside_for_one_prefix() -> None:
    harness = Harness(num_chunks=40, max_queue=3)
    prompt = prompt_of(4 * GRID + 3)
    harness.submit("cold", prompt, 2)
    harness.run()
    harness.device.drop_cache()
    harness.mover.is_stalled = True
    for i in range(8):
        harness.submit(f"r{i}", prompt, 2)
        harness.step()
    assert len(harness.engine.scheduler.restoring) == 3
    assert [harness.rejected[f"r{i}"].reason for i in range(3, 8)] == [ErrorReason.QUEUE_FULL] * 5
    harness.mover.is_stalled = False
    harness.run()
    assert all(harness.usage[f"r{i}"].cached_host == 4 * GRID for i in range(3))
    harness.assert_idle_books()


def test_a_deadline_ends_a_request_in_the_queue_and_while_running() -> None:
    harness = Harness(max_sequences=1)
    harness.submit("running", prompt_of(5), 200, min_tokens=200, deadline_s=0.5)
    harness.submit("queued", prompt_of(5), 4, deadline_s=0.2)
    harness.submit("after", prompt_of(5), 4)
    harness.run()
    assert harness.rejected["running"].reason is ErrorReason.DEADLINE_EXCEEDED
    assert harness.rejected["queued"].reason is ErrorReason.DEADLINE_EXCEEDED
    assert ("queued", 0) not in harness.tokens
    assert ("after", 0) in harness.finished
    harness.assert_idle_books()


def test_abort_before_anything_ran_returns_everything() -> None:
    harness = Harness()
    harness.submit("a", prompt_of(30), n=4)
    harness.engine.handle(Abort("a"))
    harness.engine.handle(Abort("a"))
    harness.engine.handle(Abort("never"))
    assert [harness.finished[("a", i)].reason for i in range(4)] == [StopReason.ABORTED] * 4
    harness.assert_idle_books()


def test_one_choice_can_be_aborted_before_and_after_the_fork() -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(3 * GRID), 12, n=4, temperature=1.0, min_tokens=12)
    harness.step()
    assert harness.engine.prefill.chunk is not None
    harness.engine.handle(Abort("r", 0))
    while "r" not in harness.usage:
        harness.step()
    harness.step()
    harness.engine.handle(Abort("r", 2))
    harness.run()
    reasons = [harness.finished[("r", i)].reason for i in range(4)]
    assert reasons == [StopReason.ABORTED, StopReason.LENGTH, StopReason.ABORTED, StopReason.LENGTH]
    oracle = Oracle(INVENTED, BLOCK)
    expected = oracle.answer(prompt_of(3 * GRID), 12, seed=3, temperature=1.0, stop_at_eos=False)
    assert len(harness.tokens[("r", 3)]) == len(expected) == 12
    harness.assert_idle_books()


def test_a_stop_string_seen_by_the_front_ends_one_choice() -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(6), 20, n=2, temperature=1.0, min_tokens=20)
    harness.step(4)
    harness.engine.handle(StopSequence("r", 1, 2))
    harness.run()
    assert harness.finished[("r", 1)].reason is StopReason.STOP_STRING
    assert harness.finished[("r", 1)].num_tokens == 2
    assert harness.finished[("r", 0)].reason is StopReason.LENGTH
    harness.assert_idle_books()


def test_logits_that_are_not_finite_end_their_own_request_alone() -> None:
    harness = Harness()
    harness.submit("bad", prompt_of(6), 50, min_tokens=50)
    harness.submit("good", prompt_of(7, 1), 20)
    harness.step(4)
    (bad,) = [s for s in harness.engine.scheduler.running if s.request.id == "bad"]
    harness.pools.slot_tensors["decayed"][bad.slot] = float("nan")
    harness.run()
    assert harness.rejected["bad"].reason is ErrorReason.INTERNAL
    assert harness.tokens[("good", 0)] == Oracle(INVENTED, BLOCK).answer(prompt_of(7, 1), 20)
    harness.assert_idle_books()


def test_tables_agree_with_the_pools() -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(3 * GRID + 1), 20, n=3, temperature=1.0, min_tokens=20)
    harness.submit("waits", prompt_of(3))
    while "r" not in harness.usage:
        harness.step()
    for query_id, kind in enumerate(QueryKind):
        harness.engine.handle(Query(query_id, kind))
    tiers, sequences, ledger, meters = (message for message in harness.other)
    assert isinstance(meters, Answer)
    assert meters.meters is not None
    assert meters.meters.computed_tokens == sum(usage.prompt_tokens for usage in harness.usage.values())
    assert isinstance(tiers, Answer)
    assert meters.tiers == tiers.tiers
    (tier,) = tiers.tiers
    assert tier.held_bytes + tier.cached_bytes + tier.free_bytes == tier.capacity_bytes == harness.pools.num_bytes
    rows = {(row.request_id, row.index): row for row in sequences.sequences}  # type: ignore[union-attr]
    assert rows[("r", 2)].shared_blocks == 3 * GRID // BLOCK
    assert ledger.balanced  # type: ignore[union-attr]
    assert sum(row.bytes for row in ledger.ledger if row.kind != "weights") == harness.pools.num_bytes  # type: ignore[union-attr]
    leaked = harness.device.blocks.take(1)
    harness.engine.handle(Query(9, QueryKind.LEDGER))
    assert f"block {leaked[0]}" in harness.other[-1].findings[0]  # type: ignore[union-attr]


def test_stopping_every_choice_before_the_fork_ends_the_request_at_once() -> None:
    harness = Harness(num_blocks=128)
    harness.submit("r", prompt_of(6 * GRID), 12, n=3)
    harness.step()
    assert harness.engine.prefill.chunk is not None
    for index in (2, 0, 1):
        harness.engine.handle(StopSequence("r", index, 0))
    assert len(harness.finished) == 3
    harness.assert_idle_books()


def test_a_deadline_that_the_prompt_alone_would_miss_is_refused_before_it_costs_prefill() -> None:
    harness = Harness(num_blocks=128)
    harness.engine.rate.tokens_per_s = 100.0
    harness.submit("hopeless", prompt_of(20 * GRID), 4, deadline_s=1.0)
    harness.submit("possible", prompt_of(20 * GRID), 4, deadline_s=30.0)
    harness.step()
    assert harness.rejected["hopeless"].reason is ErrorReason.DEADLINE_EXCEEDED
    assert harness.engine.prefill.chunk is None or harness.engine.prefill.chunk.sequence.request.id == "possible"
    harness.run()
    assert ("possible", 0) in harness.finished
    assert harness.engine.rate.tokens_per_s > 100.0, "whole chunks were measured"
    harness.assert_idle_books()


class Unreadable(Invented):
    """Cannot fetch what one token needs, when that token is decoded."""

    token = -1

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        if batch.is_decode and self.token in batch.token_ids.tolist():
            raise HostStageError("gone")
        return (yield from super().forward(batch, pools))


def test_a_row_whose_host_stage_fails_ends_its_own_request_alone() -> None:
    model = Unreadable()
    oracle = Oracle(INVENTED, BLOCK)
    answers = {f"r{i}": oracle.answer(prompt_of(5 + i, i), 12, seed=i, temperature=1.0) for i in range(12)}
    decoded = {name: set(answer[:-1]) for name, answer in answers.items()}
    model.token = next(t for t in range(VOCAB) if 0 < sum(t in tokens for tokens in decoded.values()) < 6)
    meets = {name for name, tokens in decoded.items() if model.token in tokens}
    harness = Harness(model=model, num_blocks=200)
    for i in range(12):
        harness.submit(f"r{i}", prompt_of(5 + i, i), 12, seed=i, temperature=1.0)
    harness.run()
    assert set(harness.rejected) == meets
    for name in set(answers) - meets:
        assert harness.tokens[(name, 0)] == answers[name]
    harness.assert_idle_books()
