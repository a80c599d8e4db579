"""The replay: traces read as they are, policies in the order they must have, the same figures every time."""

import json
import random
from itertools import combinations
from pathlib import Path

import pytest

from ops.bench.clairvoyant import BELADY, ClairvoyantOrder, Future
from ops.bench.replay import HYBRID, Replay, Replayed, decision_times
from ops.bench.replay_trace import TraceError, read_traces
from ops.cli.errors import ExitCode
from ops.cli.main import run
from tiers.flops import ComputeCost
from tiers.history import Seen
from tiers.shadow import CacheShape, ShadowCache, Visit

TRACES = Path(__file__).parent / "traces"
SESSIONS = sorted(TRACES.glob("trace_*.json"))
SHAPE = CacheShape(4096, 4096 * 20_480, 64_900_000, HYBRID)


@pytest.fixture(scope="module")
def replayed() -> Replayed:
    return Replay(read_traces(SESSIONS), SHAPE).measure([0.2, 0.4])


def test_requests_of_sub_agents_are_read_and_all_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    entries = [
        {"t": 0.0, "type": "n", "in": 130, "out": 1, "hash_ids": [1, 2]},
        {"t": 4.0, "type": "nested", "requests": [{"t": 4.5, "in": 70, "out": 1, "hash_ids": [9]}]},
        {"t": 2.0, "type": "s", "in": 200, "out": 1, "hash_ids": [1, 2, 3]},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"block_size": 64, "requests": entries}))
    requests = read_traces([tmp_path])
    assert [request.time_s for request in requests] == [0.0, 2.0, 4.5]
    assert requests[1].grid_keys(128) == (("one", 2),)
    assert requests[1].grid_keys(64) == (("one", 1), ("one", 2), ("one", 3))
    assert requests[2].grid_keys(128) == ()


def test_the_same_hash_in_two_sessions_is_two_blocks(tmp_path: Path) -> None:
    for name in ("one", "two"):
        entry = {"t": 0.0, "in": 70, "hash_ids": [1]}
        (tmp_path / f"{name}.json").write_text(json.dumps({"block_size": 64, "requests": [entry]}))
    one, two = read_traces([tmp_path])
    assert one.grid_keys(64) != two.grid_keys(64)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"block_size": 64}', '{"block_size": 64, "requests": [{"t": 0}]}'])
def test_what_is_no_trace_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"bad\.json is not a trace"):
        read_traces([path])
    with pytest.raises(TraceError, match="no trace at"):
        read_traces([tmp_path / "missing.json"])


def test_the_policies_come_in_the_order_they_must(replayed: Replayed) -> None:
    assert replayed.num_requests > 90
    for budget in replayed.budgets:
        figures = {policy.policy: policy for policy in budget.policies}
        default = figures["alpha 1, patience 2"]
        clairvoyant = max(policy.saved_flops_part for name, policy in figures.items() if "clairvoyant" in name)
        assert default.num_evictions > 0
        assert default.token_hit_rate > 0
        assert figures["alpha 0, LRU"].saved_flops_part <= default.saved_flops_part <= clairvoyant
        assert clairvoyant <= replayed.unlimited_saved_part + 1e-12
        assert figures["LRU, checkpoint at every step"].vs_lru == 1.0
        assert figures["tuned"].vs_lru > 1.0
        assert default.vs_lru > 1.1
        belady = figures["clairvoyant: used again last (Belady)"]
        assert (belady.vs_belady, figures[f"clairvoyant: {budget.best_clairvoyant}"].vs_clairvoyant) == (1.0, 1.0)
        assert belady.vs_clairvoyant <= 1.0


def test_a_trace_replays_to_the_same_choices(replayed: Replayed) -> None:
    def digests(figures: Replayed) -> list[str]:
        return [policy.decisions_digest for budget in figures.budgets for policy in budget.policies]

    again = Replay(read_traces(SESSIONS), SHAPE).measure([0.2, 0.4])
    assert digests(again) == digests(replayed)
    assert len(set(digests(replayed))) > 12


def test_progress_is_told_for_every_visit() -> None:
    steps = 0

    def advance() -> None:
        nonlocal steps
        steps += 1

    replay = Replay(read_traces([TRACES / "conversation.jsonl"]), SHAPE, advance)
    replay.measure([0.1])
    assert steps == replay.num_steps(1)
    assert len(replay.visits) == 60


@pytest.mark.parametrize("seed", range(20))
def test_beladys_rule_is_optimal_where_all_things_are_equal(seed: int) -> None:
    """Prompts of one grid chunk are pages: the greedy rule must reach what an exhaustive search finds."""
    draw = random.Random(seed)
    shape = CacheShape(4, 10, 8, ComputeCost(1, 0))
    sequence = draw.choices("abcde", k=14)
    visits = [Visit(float(at), 5, (key,), Seen(0, False, 1.0)) for at, key in enumerate(sequence)]
    order = ClairvoyantOrder(Future(visits, 4), BELADY)
    cache = ShadowCache(shape, 2 * 18, order)
    for order.now, visit in enumerate(visits):
        cache.visit(visit)
        cache.check()

    best: dict[frozenset[str], int] = {frozenset(): 0}
    for key in sequence:
        after: dict[frozenset[str], int] = {}
        for held, hits in best.items():
            for kept in combinations(sorted(held | {key}), min(2, len(held | {key}))):
                after[frozenset(kept)] = max(after.get(frozenset(kept), 0), hits + (key in held))
        best = after
    assert cache.savings.num_hits == max(best.values()) > 0


def test_decisions_are_timed_among_as_many_items_as_asked() -> None:
    times = decision_times(2000)
    assert times.num_items == 2000
    assert 0 < times.pop_us_p50 <= times.pop_us_p99


def test_the_command_prints_json_and_leaves_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "replay", *(str(path) for path in SESSIONS), "--budget", "0.1", "--decisions", "0"]
    assert run([*arguments, "--results", str(tmp_path), "--name", "excerpt", "-o", "json"]) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("replay-excerpt-*.json")
    written = json.loads(path.read_text())
    assert written["replayed"] == printed["replayed"]
    assert len(printed["replayed"]["budgets"]) == 1
    assert run([*arguments, "--results", str(tmp_path)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "tuned" in out
    assert "clairvoyant, Belady" in out
    assert "clairvoyant, best of" in out
    assert "10% of the working set" in out


def test_the_command_refuses_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "replay", str(tmp_path)]) == ExitCode.FAILED
    assert "no trace at" in capsys.readouterr().err
    assert run(["bench", "replay", str(SESSIONS[0]), "--grid", "1000"]) == ExitCode.USAGE
    assert run(["bench", "replay"]) == ExitCode.USAGE
