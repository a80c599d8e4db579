"""The books without bytes: look-up, what is kept, what goes, what it saves."""

import random

import pytest

from tiers.eviction import LRU, Decision, EvictionOrder, Weights
from tiers.flops import ComputeCost
from tiers.history import PASSED_GAP_S, History
from tiers.shadow import Admission, CacheShape, Chunk, ShadowCache, Visit
from tiers.tuner import Tuner, WeightsChange

GRID = 4
COST = ComputeCost(matmul_params=100, pair_flops=2)
HYBRID = CacheShape(GRID, chunk_bytes=10, checkpoint_bytes=8, cost=COST)
ATTENTION = CacheShape(GRID, chunk_bytes=10, checkpoint_bytes=0, cost=COST)


class Player:
    """Shows prompts, a letter a grid chunk, to one cache."""

    def __init__(
        self, shape: CacheShape, budget: int | None, weights: Weights = LRU, admission: Admission = Admission.WORTHWHILE
    ) -> None:
        self.decisions: list[Decision[Chunk]] = []
        self.cache = ShadowCache(shape, budget, EvictionOrder(weights, self.decisions.append), admission)
        self.history = History()
        self.now_s = 0.0

    def show(self, path: str, rest: int = 1) -> int:
        """The tokens of a hit on a prompt of these chunks and `rest` tokens more."""
        self.now_s += 1.0
        before = self.cache.savings.hit_tokens
        self.cache.visit(visit_of(self.history, path, rest, self.now_s))
        self.cache.check()
        return self.cache.savings.hit_tokens - before


def visit_of(history: History, path: str, rest: int, now_s: float) -> Visit:
    keys = tuple(path[: end + 1] for end in range(len(path)))
    return Visit(now_s, len(path) * GRID + rest, keys, history.visit(keys, now_s))


def test_a_prompt_resumes_at_the_end_of_what_it_extends() -> None:
    player = Player(HYBRID, None)
    assert player.show("abc") == 0
    assert player.show("abcd") == 3 * GRID
    assert player.cache.savings.saved_flops == COST.flops(0, 3 * GRID)
    assert player.cache.num_bytes == 4 * 10 + 2 * 8


def test_a_prompt_that_ends_on_the_grid_resumes_a_chunk_earlier() -> None:
    player = Player(HYBRID, None, admission=Admission.EVERY_STEP)
    player.show("abc", rest=0)
    assert player.show("abc", rest=0) == 2 * GRID


def test_attention_without_state_is_a_miss_and_the_branch_point_gets_one() -> None:
    player = Player(HYBRID, None)
    player.show("abcd")
    assert player.show("abxy") == 0
    assert player.show("abz") == 2 * GRID


def test_attention_alone_resumes_anywhere() -> None:
    player = Player(ATTENTION, None)
    player.show("abcd")
    assert player.show("abx") == 2 * GRID


def test_a_leaf_goes_with_its_chain_down_to_what_others_need() -> None:
    player = Player(HYBRID, 7 * 10 + 3 * 8)
    player.show("abcd")
    player.show("abxy")
    assert player.cache.num_bytes == 6 * 10 + 3 * 8
    player.show("p")  # evicts the oldest leaf: c and d with the state after d
    assert player.cache.num_bytes == 5 * 10 + 3 * 8
    assert player.show("abxyz") == 4 * GRID
    assert player.show("abcd") == 2 * GRID


def test_a_state_in_the_middle_goes_alone() -> None:
    player = Player(HYBRID, 4 * 10 + 2 * 8)
    player.show("ab")
    player.show("abc")
    player.show("abcd")  # three states and four chunks are too much: the oldest state goes, no chunk does
    assert player.cache.num_bytes == 4 * 10 + 2 * 8
    assert player.show("abcde") == 4 * GRID


def test_attention_alone_is_shortened_from_its_end() -> None:
    player = Player(ATTENTION, 5 * 10)
    player.show("abcd")
    player.show("xy")
    assert player.show("abcd") == 3 * GRID


def test_what_exceeds_the_tier_pushes_nothing_out() -> None:
    player = Player(HYBRID, 5 * 10 + 2 * 8)
    player.show("ab")
    player.show("vwxyz" * 2)
    assert player.show("abc") == 2 * GRID


def test_a_prompt_longer_than_the_tier_resumes_at_the_longest_part_that_fits() -> None:
    player = Player(HYBRID, 5 * 10 + 8, Weights())
    assert [player.show("abcdefgh"), player.show("abcdefgh")] == [0, 0]
    assert player.show("abcdefghi") == 5 * GRID
    assert player.show("x") == 0
    assert player.show("abcdefghij") == 5 * GRID, "its conversation comes back to what is kept of it"


def test_a_conversation_that_outgrows_the_tier_keeps_what_it_had() -> None:
    player = Player(HYBRID, 5 * 10 + 8, Weights())
    player.show("abcde")
    assert [player.show("abcde" + "fghijk"[:turn]) for turn in range(1, 6)] == [5 * GRID] * 5
    (stop,) = (chunk for chunk in player.cache.chunks() if chunk.has_state)
    assert (stop.depth, stop.gap_s < PASSED_GAP_S) == (5, True)


def test_a_conversation_that_went_on_gives_up_its_old_state_first() -> None:
    player = Player(HYBRID, 4 * 10 + 3 * 8, Weights())
    player.show("ab")
    player.show("abc")
    player.show("x")
    player.show("abc")
    player.show("y")
    gone = player.decisions[0].item
    assert (gone.key, gone.depth) == ("ab", 2)
    assert player.show("abcd") == 3 * GRID


def test_a_look_up_compares_matched_chunks_and_one_more_however_much_is_cached() -> None:
    player = Player(HYBRID, None)
    for first in "abcdefghijklmnopqrstuvwxyz":
        for second in "abcdefghijklmnopqrstuvwxyz":
            player.cache.visit(visit_of(player.history, first + second + "123", 1, player.now_s))
    before = player.cache.savings.num_walked
    player.show("kl9999999")
    assert player.cache.savings.num_walked - before == 2 + 1
    before = player.cache.savings.num_walked
    assert player.show("kl123") == 5 * GRID
    assert player.cache.savings.num_walked - before == 5


@pytest.mark.parametrize("shape", [HYBRID, ATTENTION])
@pytest.mark.parametrize("admission", Admission)
def test_books_hold_and_repeat_on_random_trees(shape: CacheShape, admission: Admission) -> None:
    def play() -> tuple[Player, list[tuple[object, float]]]:
        draw = random.Random(7)
        player = Player(shape, 400, Weights(), admission)
        paths = ["".join(draw.choices("abc", k=draw.randint(1, 5)))]
        for _ in range(400):
            stem = draw.choice(paths[-30:])
            paths.append(stem[: draw.randint(0, len(stem))] + "".join(draw.choices("abcd", k=draw.randint(0, 4))))
            player.show(paths[-1], rest=draw.randint(0, GRID - 1))
            player.cache.order.check()  # pyright: ignore[reportAttributeAccessIssue]
        return player, [(decision.item.key, decision.now_s) for decision in player.decisions]

    player, decisions = play()
    assert player.cache.savings.hit_tokens > 0
    assert len(decisions) > 50
    assert decisions == play()[1]


def conversations(seed: int, num_visits: int) -> list[Visit]:
    """Long conversations that come back every few seconds, between many short ones that never do."""
    draw = random.Random(seed)
    history = History()
    paths = {number: f"{number}:" for number in range(4)}
    visits: list[Visit] = []
    for step in range(num_visits):
        if draw.random() < 0.3:
            number = draw.randrange(4)
            paths[number] += "abcdefgh"[step % 8] if len(paths[number]) < 40 else ""
            path = paths[number]
        else:
            path = f"<{step}>"
        visits.append(visit_of(history, path, 1, step * 5.0))
    return visits


def test_the_tuner_leaves_lru_where_that_is_bad_and_says_so() -> None:
    tuner = Tuner(HYBRID, 1500, LRU)
    assert tuner.weights == LRU
    changes: list[WeightsChange] = []
    for visit in conversations(1, 1500):
        tuner.note(visit)
        change = tuner.advance()
        changes += [change] if change is not None else []
    assert changes
    assert tuner.weights == changes[-1].new
    assert tuner.weights.alpha > 0
    assert changes[0].old == LRU
    assert changes[0].gain > 0.01
    assert "alpha 0 to" in str(changes[0])


def test_the_tuner_keeps_weights_that_nothing_beats() -> None:
    tuner = Tuner(HYBRID, 10**9, Weights())
    for visit in conversations(2, 300):
        tuner.note(visit)
    assert tuner.advance(300) is None
    assert tuner.weights == Weights()


def test_the_tuner_does_as_much_as_it_is_told_and_forgets_what_nobody_had_time_for() -> None:
    tuner = Tuner(HYBRID, 1500, Weights())
    for visit in conversations(3, 5000):
        tuner.note(visit)
    assert (tuner.num_waiting, tuner.num_dropped) == (4096, 904)
    tuner.advance(10)
    assert tuner.num_waiting == 4086
