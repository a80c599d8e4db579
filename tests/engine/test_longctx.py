"""Sequences larger than the device among others: cancelled at random, losing blocks, refused, forked."""

import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.cache_messages import TierName, Warm
from daemon.engine.leaving import write_down
from daemon.engine.sequence import Sequence
from daemon.errors import ErrorReason
from daemon.messages import Abort, Answer, Query, QueryKind
from tests.campaigns.budget import seeds
from tests.engine.harness import BLOCK, GRID, INVENTED, Harness
from tests.engine.invented import Invented, Oracle
from tests.engine.memory_store import MemoryStore
from tests.engine.test_tiers import prompt_of
from tiers.records import RecordHead, RecordKind
from tiers.spill import SpillError

ORACLE = Oracle(INVENTED, BLOCK)
LONG = 20 * GRID  # tokens; the device of these tests has some five grid chunks


def small(num_chunks: int = 0, folder: Path | None = None, **more: object) -> Harness:
    """Ten blocks' worth of device; a host tier of so many chunks, a spill where there is a folder."""
    layout = INVENTED.layout(BLOCK)
    settings: dict[str, object] = {"num_blocks": 11, "max_sequences": 4, "num_chunks": num_chunks, **more}
    if folder is not None:
        settings = {"disk_path": str(folder), "spill_bytes": 400 * layout.block_bytes} | settings
    return Harness(**settings)  # type: ignore[arg-type]


def sequence_of(harness: Harness, request_id: str) -> Sequence:
    return harness.engine.requests[request_id][0]


def below(harness: Harness, request_id: str) -> int:
    """Blocks of a request that are not on the device."""
    return sum(block >= harness.device.blocks.size for block in sequence_of(harness, request_id).block_table)


@pytest.mark.parametrize("tier", ["host", "spill", "both"])
def test_a_sequence_larger_than_the_device_is_served(tier: str, tmp_path: Path) -> None:
    chunks = {"host": 200, "spill": 0, "both": 20}[tier]
    harness = small(chunks, None if tier == "host" else tmp_path)
    for length in (LONG - 1, LONG, LONG + 1, LONG + BLOCK + 1):
        prompt = prompt_of(length, length)
        harness.submit(f"r{length}", prompt, 3 * GRID, ignore_eos=True)
        while not harness.tokens[(f"r{length}", 0)]:
            harness.step()
        assert below(harness, f"r{length}") > LONG // BLOCK // 2
        harness.run()
        assert harness.tokens[(f"r{length}", 0)] == ORACLE.answer(prompt, 3 * GRID, stop_at_eos=False)
        harness.assert_idle_books()


def test_the_tables_say_where_its_blocks_are_and_every_byte_has_an_owner(tmp_path: Path) -> None:
    harness = small(20, tmp_path)
    harness.submit("r", prompt_of(LONG, 1), 3 * GRID, ignore_eos=True)
    while len(harness.tokens[("r", 0)]) < 2 * GRID + 2:
        harness.step()
    for query_id, kind in enumerate((QueryKind.SEQUENCES, QueryKind.LEDGER)):
        harness.engine.handle(Query(query_id, kind))
    sequences, ledger = (message for message in harness.other if isinstance(message, Answer))
    (row,) = sequences.sequences
    assert row.stream is not None
    table = sequence_of(harness, "r").block_table
    layout, stream = harness.device.layout, row.stream
    assert stream.device_blocks + stream.host_blocks + stream.disk_blocks == len(table)
    assert stream.host_blocks > 0
    assert stream.disk_blocks > 0
    read_blocks = stream.host_blocks + stream.disk_blocks
    assert 0 < stream.streamed_bytes <= read_blocks * layout.block_bytes
    assert stream.bytes_per_s is not None
    assert stream.link_bytes_per_s is not None
    assert stream.bytes_per_s <= stream.link_bytes_per_s
    assert ledger.balanced, ledger.findings
    by_owner = {(entry.tier, entry.kind, entry.owner): entry.count for entry in ledger.ledger}
    assert not any(owner == "astray" for _, _, owner in by_owner)
    assert by_owner["disk", "spill", "r/0"] * GRID // BLOCK == stream.disk_blocks
    private = sum(block >= harness.device.blocks.size for block in table[LONG // BLOCK :])
    assert private > 0
    harness.run()
    harness.assert_idle_books()


def test_choices_of_a_sequence_larger_than_the_device_share_what_is_below(tmp_path: Path) -> None:
    harness = small(400, tmp_path, num_blocks=24, num_slots=24)
    prompt = prompt_of(LONG + 3, 5)
    harness.submit("r", prompt, 2 * GRID, n=3, temperature=1.0, seed=7, ignore_eos=True)
    while len(harness.tokens[("r", 2)]) < 2:
        harness.step()
    tables = [[b for b in s.block_table if b >= harness.device.blocks.size] for s in harness.engine.requests["r"]]
    assert len(set(tables[0]) & set(tables[1]) & set(tables[2])) > 10
    harness.run()
    for choice in range(3):
        answer = ORACLE.answer(prompt, 2 * GRID, seed=7 + choice, temperature=1.0, stop_at_eos=False)
        assert harness.tokens[("r", choice)] == answer
    harness.assert_idle_books()


@pytest.mark.parametrize(("share", "window"), [(1.0, GRID), (0.5, 3 * GRID)])
def test_what_stays_resident_leaves_each_choice_its_blocks(share: float, window: int, tmp_path: Path) -> None:
    more = {"stream_share": share, "growth_window": window}
    harness = small(400, tmp_path, num_blocks=24, num_slots=24, **more)
    prompt = prompt_of(LONG + 3, 5)
    harness.submit("r", prompt, 4 * GRID, n=4, temperature=1.0, seed=7, ignore_eos=True)
    harness.run()
    for choice in range(4):
        answer = ORACLE.answer(prompt, 4 * GRID, seed=7 + choice, temperature=1.0, stop_at_eos=False)
        assert harness.tokens[("r", choice)] == answer
    harness.assert_idle_books()


def test_a_prompt_that_went_below_is_a_prefix_for_the_next(tmp_path: Path) -> None:
    harness = small(200)
    prompt = prompt_of(LONG + 3, 5)
    for name in ("cold", "hit"):
        harness.submit(name, prompt, 4, ignore_eos=True)
        harness.run()
        assert harness.tokens[(name, 0)] == ORACLE.answer(prompt, 4, stop_at_eos=False)
    assert harness.usage["cold"].cached_host == 0
    last = harness.device.walk(prompt, "")[LONG // BLOCK - 1]
    assert last.hits == 1, "what is used is not what goes first"
    usage = harness.usage["hit"]
    assert usage.cached_host + usage.cached_device == LONG
    assert usage.cached_host > LONG // 2
    harness.assert_idle_books()


def test_what_went_below_is_written_to_disk_and_serves_after_a_restart() -> None:
    store = MemoryStore()
    harness = small(200, store=store)
    prompt = prompt_of(LONG + 3, 5)
    harness.submit("cold", prompt, 4, ignore_eos=True)
    harness.run()
    assert len(store.records) > LONG // BLOCK // 2
    again = small(200, store=store)
    again.submit("hit", prompt, 4, ignore_eos=True)
    again.run()
    assert again.usage["hit"].cached_host == LONG or again.usage["hit"].cached_disk == LONG
    assert again.tokens[("hit", 0)] == harness.tokens[("cold", 0)]
    again.assert_idle_books()
    large = Harness(store=store)
    large.submit("hit", prompt, 4, ignore_eos=True)
    large.run()
    assert large.usage["hit"].cached_disk == LONG
    assert large.tokens[("hit", 0)] == harness.tokens[("cold", 0)]


def written_store(prompt: list[int]) -> MemoryStore:
    """Records of a prompt's whole chunks, as an engine with a host tier leaves them."""
    store = MemoryStore()
    harness = small(200, store=store)
    harness.submit("cold", prompt, 4, ignore_eos=True)
    harness.run()
    assert len(store.records) > LONG // BLOCK
    return store


@pytest.mark.parametrize("chunks", [0, 20])
def test_records_of_a_prefix_that_no_tier_in_memory_holds_are_read_into_the_spill(chunks: int, tmp_path: Path) -> None:
    prompt = prompt_of(LONG + 3, 5)
    store = written_store(prompt)
    harness = small(chunks, tmp_path, store=store)
    harness.submit("hit", prompt, 3 * GRID, ignore_eos=True)
    while not harness.tokens[("hit", 0)]:
        harness.step()
    assert harness.usage["hit"].cached_disk == LONG
    assert below(harness, "hit") >= LONG // BLOCK
    harness.run()
    assert harness.tokens[("hit", 0)] == ORACLE.answer(prompt, 3 * GRID, stop_at_eos=False)
    assert harness.engine.scheduler.meters.replayed_preemptions == 0
    harness.assert_idle_books()


@pytest.mark.parametrize("chunks", [0, 20, 30])
def test_a_prompt_that_went_to_the_spill_is_a_prefix_for_the_next(chunks: int, tmp_path: Path) -> None:
    """With the records that its chunks became: for one as large, and after a restart for one with room for all."""
    store, prompt = MemoryStore(), prompt_of(LONG + 3, 5)
    harness = small(chunks, tmp_path, store=store)
    for name in ("cold", "hit"):
        harness.submit(name, prompt, 2 * GRID, ignore_eos=True)
        while not harness.tokens[(name, 0)]:
            harness.step()
        assert below(harness, name) > LONG // BLOCK // 2
        harness.run()
        assert harness.tokens[(name, 0)] == ORACLE.answer(prompt, 2 * GRID, stop_at_eos=False)
        harness.assert_idle_books()
    usage = harness.usage["hit"]
    assert usage.cached_disk + usage.cached_host + usage.cached_device == LONG
    assert usage.cached_disk > 0
    assert harness.usage["cold"].cached_disk == 0
    num_states = sum(head.kind is RecordKind.CHECKPOINT for head, _, _ in store.records.values())
    assert (num_states, len(store.records)) == (1, LONG // BLOCK + 1), "each block once, and the last state"
    large = Harness(store=store)
    large.submit("hit", prompt, 4, ignore_eos=True)
    large.run()
    assert large.usage["hit"].cached_disk == LONG
    assert large.tokens[("hit", 0)] == harness.tokens[("cold", 0)][:4]


def test_what_waits_to_be_recorded_gives_way_to_who_needs_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = (LONG // BLOCK + 3 * GRID // BLOCK) * INVENTED.layout(BLOCK).block_bytes
    harness = small(0, tmp_path, store=MemoryStore(), spill_bytes=room)
    monkeypatch.setattr(harness.engine.cache.writedown, "begin", lambda places: False)  # type: ignore[reportUnknownLambdaType]
    for number in range(2):
        prompt = prompt_of(LONG + 3, number)
        harness.submit(f"r{number}", prompt, GRID, ignore_eos=True)
        while (f"r{number}", 0) not in harness.finished:
            harness.step()
        assert harness.tokens[(f"r{number}", 0)] == ORACLE.answer(prompt, GRID, stop_at_eos=False)
        recorder = harness.engine.cache.recorder
        assert recorder is not None
        assert not recorder.is_idle, "nothing waits to be recorded"
        harness.engine.check()
    assert not harness.rejected


def test_what_waits_to_be_recorded_is_written_before_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    harness = small(0, tmp_path, store=store)
    with monkeypatch.context() as held:
        held.setattr(harness.engine.cache.writedown, "begin", lambda places: False)  # type: ignore[reportUnknownLambdaType]
        harness.submit("r", prompt_of(LONG + 3, 1), GRID, ignore_eos=True)
        while ("r", 0) not in harness.finished:
            harness.step()
    assert len(store.records) < LONG // BLOCK
    write_down(harness.engine, lambda: None)
    assert len(store.records) == LONG // BLOCK + 1
    harness.assert_idle_books()


@pytest.mark.parametrize("lost", ["a block", "the state", "all but the first", "the spill"])
def test_a_prefix_that_does_not_land_is_computed(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(LONG + 3, 5)
    store = written_store(prompt)
    wanted = {"a block": 40, "the state": 80, "all but the first": 2, "the spill": 0}[lost]

    def fails(what: str, head: RecordHead) -> Exception | None:
        is_state = head.kind is RecordKind.CHECKPOINT
        is_it = is_state if lost == "the state" else head.depth == wanted or (wanted == 2 and head.depth > 1)
        return OSError("damaged") if what == "read" and is_it else None

    store.fails = fails
    harness = small(0, tmp_path, store=store)
    residency = harness.engine.cache.residency
    assert residency is not None
    assert residency.spill is not None
    write, failures = residency.spill.write, [SpillError("write: no space left")] if lost == "the spill" else []

    def writing(extent: object, images: object) -> None:
        if failures:
            raise failures.pop()
        write(extent, images)  # type: ignore[arg-type]

    monkeypatch.setattr(residency.spill, "write", writing)
    harness.submit("r", prompt, 3 * GRID, ignore_eos=True)
    harness.run()
    assert harness.tokens[("r", 0)] == ORACLE.answer(prompt, 3 * GRID, stop_at_eos=False)
    assert harness.usage["r"].cached_disk == 0
    assert not harness.rejected
    disk = harness.engine.cache.disk
    assert disk is not None
    assert (disk.stats.verify_failures > 0) is (lost != "the spill")
    harness.assert_idle_books()


def test_who_leaves_while_its_prefix_lands_leaves_nothing(tmp_path: Path) -> None:
    prompt = prompt_of(LONG + 3, 5)
    harness = small(0, tmp_path, store=written_store(prompt), slow=random.Random(1))
    lander, num_landing = harness.engine.cache.lander, 0
    assert lander is not None
    for number in range(20):
        harness.submit(f"r{number}", prompt, 4, ignore_eos=True)
        for _ in range(number):
            harness.step()
        num_landing += any(not landing.is_done for landing in lander.in_flight)
        harness.engine.handle(Abort(f"r{number}"))
        harness.engine.check()
    assert num_landing > 5
    harness.run()
    harness.assert_idle_books()


def test_small_ones_run_beside_it_and_it_gives_way(tmp_path: Path) -> None:
    harness = small(300, tmp_path, stream_share=1.0)
    giant, others = prompt_of(LONG + 3, 5), [prompt_of(2 * GRID + i, 60 + i) for i in range(4)]
    harness.submit("giant", giant, 40, ignore_eos=True)
    while not harness.tokens[("giant", 0)]:
        harness.step()
    resident = sum(block < 11 for block in sequence_of(harness, "giant").block_table)
    for i, prompt in enumerate(others):
        harness.submit(f"s{i}", prompt, 3, ignore_eos=True)
    while ("s0", 0) not in harness.finished:
        harness.step()
    assert ("giant", 0) not in harness.finished, "the small one waited for the giant's end"
    assert sequence_of(harness, "giant").request.preemptions == 0
    assert sum(block < 11 for block in sequence_of(harness, "giant").block_table) <= resident
    harness.run()
    assert harness.tokens[("giant", 0)] == ORACLE.answer(giant, 40, stop_at_eos=False)
    for i, prompt in enumerate(others):
        assert harness.tokens[(f"s{i}", 0)] == ORACLE.answer(prompt, 3, stop_at_eos=False)
    harness.assert_idle_books()


@pytest.mark.parametrize("tier", ["host", "spill"])
def test_a_small_one_draws_a_token_in_every_step_beside_a_giant(tier: str, tmp_path: Path) -> None:
    """Between two of its tokens lies one slice of the giant's row at most, while the giant gets on."""
    harness = small(300 if tier == "host" else 0, tmp_path if tier == "spill" else None)
    harness.submit("giant", prompt_of(LONG + 3, 5), 400, ignore_eos=True)
    while not harness.tokens[("giant", 0)]:
        harness.step()
    harness.submit("small", prompt_of(BLOCK, 6), GRID, ignore_eos=True)
    while not harness.tokens[("small", 0)]:
        harness.step()
    before, steps, num_tokens = len(harness.tokens[("giant", 0)]), 0, len(harness.tokens[("small", 0)])
    while ("small", 0) not in harness.finished:
        harness.step()
        steps += 1
    assert steps == GRID - num_tokens
    assert len(harness.tokens[("giant", 0)]) > before
    assert harness.tokens[("small", 0)] == ORACLE.answer(prompt_of(BLOCK, 6), GRID, stop_at_eos=False)
    harness.engine.handle(Abort("giant"))
    harness.run()
    harness.assert_idle_books()


def test_giants_take_turns(tmp_path: Path) -> None:
    harness = small(400, tmp_path, num_blocks=24)
    names, max_tokens = ("one", "other"), 60
    for name in names:
        harness.submit(name, prompt_of(LONG + 3, len(name)), max_tokens, ignore_eos=True)
    while not all(harness.tokens[(name, 0)] for name in names):
        harness.step()
    before = [len(harness.tokens[(name, 0)]) for name in names]
    assert max(before) + GRID <= max_tokens, "one ran on while the other's prompt was computed"
    while min(len(harness.tokens[(name, 0)]) for name in names) < max(before) + GRID:
        harness.step()
        made = [len(harness.tokens[(name, 0)]) - had for name, had in zip(names, before, strict=True)]
        assert ("one", 0) in harness.finished or ("other", 0) in harness.finished or abs(made[0] - made[1]) <= 1
    harness.run()
    for name in names:
        answer = ORACLE.answer(prompt_of(LONG + 3, len(name)), max_tokens, stop_at_eos=False)
        assert harness.tokens[(name, 0)] == answer
    harness.assert_idle_books()


@pytest.mark.parametrize("seed", seeds(fraction=3, full=30))
def test_giants_and_small_ones_cancelled_at_random_return_every_count(seed: int, tmp_path: Path) -> None:
    """Each seed interleaves 20 giants with 40 small ones and cancels half of them, in any state, on slow threads."""
    rng = random.Random(seed)
    tier = rng.choice(["host", "spill", "both"])
    chunks = {"host": 400, "spill": 0, "both": rng.randint(20, 120)}[tier]
    harness = small(
        chunks,
        None if tier == "host" else tmp_path,
        num_blocks=rng.randint(11, 18),
        slow=rng,
        stream_share=rng.random(),
        store=MemoryStore() if rng.random() < 0.6 else None,
    )
    expected: dict[str, list[int]] = {}
    doomed: set[str] = set()
    waiting = [f"{kind}{i}" for i in range(20) for kind in ("giant", "small", "tiny")]
    rng.shuffle(waiting)
    while waiting or not harness.is_at_rest:
        if waiting and rng.random() < 0.3 and len(harness.engine.requests) < 5:
            name = waiting.pop()
            length = LONG // 2 + rng.randint(0, LONG // 2) if "giant" in name else rng.randint(1, 2 * GRID)
            prompt, max_tokens = prompt_of(length, rng.randrange(6)), rng.randint(1, GRID)
            expected[name] = ORACLE.answer(prompt, max_tokens, stop_at_eos=False)
            harness.submit(name, prompt, max_tokens, ignore_eos=True)
        harness.step()
        if harness.engine.requests and rng.random() < 0.04:
            name = rng.choice(list(harness.engine.requests))
            doomed.add(name)
            harness.engine.handle(Abort(name))
            harness.engine.check()
    assert doomed
    assert not harness.rejected
    for name, answer in expected.items():
        got = harness.tokens[(name, 0)]
        assert got == (answer[: len(got)] if name in doomed else answer), name
    harness.assert_idle_books()


def test_a_giant_without_resident_chunks_that_has_to_go_finds_its_prompt_again(tmp_path: Path) -> None:
    """An older one takes the last blocks: the giant's rows are replayed, its prompt comes back from what it left."""
    harness = small(0, tmp_path, num_blocks=48, store=MemoryStore(), stream_share=0.0, slice_ms=5.0)
    giant, older = prompt_of(2 * LONG + 3, 5), prompt_of(3, 6)
    harness.submit("older", older, 175, ignore_eos=True)
    harness.submit("giant", giant, 20 * GRID, ignore_eos=True)
    while not harness.tokens[("giant", 0)]:
        harness.step()
    sequence, resident = sequence_of(harness, "giant"), 0
    while not sequence.request.preemptions:
        assert ("older", 0) not in harness.finished, "there was room for both"
        resident = sum(block < harness.device.blocks.size for block in sequence.block_table)
        harness.step()
    assert resident <= 2 * GRID // BLOCK, "it had no more than its tail"
    disk, sent = harness.engine.cache.disk, len(harness.tokens[("giant", 0)])
    assert disk is not None
    assert disk.stats.reads == 0
    harness.run()
    assert disk.stats.reads == 2 * LONG // BLOCK + 1, "every block of the prompt's whole chunks, and the state"
    assert 0 < sent < 20 * GRID
    assert harness.tokens[("giant", 0)] == ORACLE.answer(giant, 20 * GRID, stop_at_eos=False)
    assert harness.tokens[("older", 0)] == ORACLE.answer(older, 175, stop_at_eos=False)
    harness.assert_idle_books()


def test_a_read_that_fails_in_the_middle_is_a_pause_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = small(0, tmp_path)
    prompt = prompt_of(LONG + 3, 5)
    harness.submit("r", prompt, 3 * GRID, ignore_eos=True)
    while len(harness.tokens[("r", 0)]) < 2 * GRID:
        harness.step()
    residency = harness.engine.cache.residency
    assert residency is not None
    spill = residency.spill
    assert spill is not None
    read, failures = spill.read, [SpillError("read: the disk is gone")]

    def failing(block: object, part: object, out: object) -> None:
        if failures:
            raise failures.pop()
        read(block, part, out)  # type: ignore[arg-type]

    monkeypatch.setattr(spill, "read", failing)
    sent = list(harness.tokens[("r", 0)])
    while failures:
        harness.step()
    assert sequence_of(harness, "r").request.preemptions == 1
    harness.run()
    assert harness.tokens[("r", 0)][: len(sent)] == sent
    assert harness.tokens[("r", 0)] == ORACLE.answer(prompt, 3 * GRID, stop_at_eos=False)
    assert not harness.rejected
    harness.assert_idle_books()


def test_a_disk_that_never_reads_again_ends_that_sequence_alone_after_a_few_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = small(0, tmp_path, num_blocks=16)
    spill = harness.engine.cache.residency.spill if harness.engine.cache.residency is not None else None
    assert spill is not None

    def gone(blocks: object, part: object, out: object) -> None:
        raise SpillError("read: the disk is gone")

    monkeypatch.setattr(spill, "read", gone)
    harness.submit("giant", prompt_of(LONG, 1), 4)
    harness.submit("small", prompt_of(5, 2), 3, ignore_eos=True)
    harness.run(limit=2000)
    assert harness.rejected["giant"].reason is ErrorReason.INTERNAL
    assert harness.tokens[("small", 0)] == ORACLE.answer(prompt_of(5, 2), 3, stop_at_eos=False)
    harness.assert_idle_books()


def test_a_disk_that_takes_no_block_ends_that_sequence_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = small(0, tmp_path, num_blocks=16)
    spill = harness.engine.cache.residency.spill if harness.engine.cache.residency is not None else None
    assert spill is not None

    def full(extent: object, images: object) -> None:
        raise SpillError("write: no space left")

    monkeypatch.setattr(spill, "write", full)
    harness.submit("giant", prompt_of(LONG, 1), 4)
    harness.submit("small", prompt_of(5, 2), 3, ignore_eos=True)
    harness.run()
    assert harness.rejected["giant"].reason is ErrorReason.NO_CAPACITY
    assert harness.tokens[("small", 0)] == ORACLE.answer(prompt_of(5, 2), 3, stop_at_eos=False)
    harness.assert_idle_books()


def test_capacity_is_exact_to_the_block() -> None:
    """The tiers below take 40 blocks: 160 tokens with the answer, and not one more."""
    for max_tokens, is_taken in ((1, True), (4, True), (5, False)):
        harness = small(40)
        prompt = prompt_of(156, 3)
        harness.submit("r", prompt, max_tokens, ignore_eos=True)
        harness.run()
        assert ("r" in harness.rejected) is not is_taken
        if is_taken:
            assert harness.tokens[("r", 0)] == ORACLE.answer(prompt, max_tokens, stop_at_eos=False)
        else:
            assert "need 41 blocks" in harness.rejected["r"].message
            assert harness.engine.steps <= 1
        harness.assert_idle_books()


def test_what_would_be_slower_than_the_floor_is_refused_with_the_figures() -> None:
    harness = small(400, min_tokens_per_s=1.0)
    harness.submit("first", prompt_of(LONG, 1), 2, ignore_eos=True)
    harness.run()
    assert harness.engine.scheduler.streaming is not None
    harness.engine.scheduler.streaming.bytes_per_s = 1000.0
    harness.submit("slow", prompt_of(LONG, 2), 2, ignore_eos=True)
    refused = harness.rejected["slow"]
    assert refused.reason is ErrorReason.NO_CAPACITY
    assert "bytes a token at 1000 bytes a second shared by 1" in refused.message
    assert refused.retry_after_s is not None
    harness.assert_idle_books()


def test_a_prefix_larger_than_the_device_is_not_warmed_and_costs_nothing() -> None:
    harness = small(200)
    ids = array("i", prompt_of(LONG, 1)).tobytes()
    harness.engine.handle(Warm("w", ids, "", TierName.HOST, pin=False, durable=False))
    assert "the device has 10" in harness.rejected["w"].message
    assert harness.engine.steps == 0
    harness.assert_idle_books()


def test_without_lower_tiers_or_a_model_that_can_it_is_refused_as_ever() -> None:
    resident = Invented()
    resident.caps = replace(resident.caps, streaming=False)
    for harness in (small(0), small(200, stream_blocks=False), small(200, model=resident)):
        harness.submit("r", prompt_of(LONG, 1), 2)
        assert "the device has 10" in harness.rejected["r"].message
        harness.assert_idle_books()
