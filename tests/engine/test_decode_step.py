"""Decode steps padded to a shape: what they give, and what they leave alone. Graphs themselves need an accelerator."""

import json
from pathlib import Path

import pytest
import torch

from daemon.batch import SequenceRows, make_batch
from daemon.engine.captured import LAST, DecodeRow, Draw, StepInputs, StepShape
from daemon.engine.decode_step import LEAST_BLOCKS, CanaryError, DecodeStep, bucket_rows, shape_of
from daemon.models.base import BuildOptions, Model, finish
from daemon.models.load import build_dummy
from kernels.sampling import Filters, draw
from kernels.sampling_rows import NOT_FINITE
from tiers.pools import DevicePools

CPU, BLOCK = torch.device("cpu"), 4
GREEDY, WARM = Draw(), Draw(temperature=0.8, top_k=5, top_p=0.9, number=0.37)
TABLES = [[10, 5, 2], [7, 3, 8], [6, 4, 9]]


@pytest.fixture(scope="module")
def model() -> Model:
    values = json.loads((Path(__file__).parents[1] / "exact" / "configs" / "qwen3_5_moe.json").read_text())
    return build_dummy(values, BuildOptions(torch.float32, CPU, tile=BLOCK))


def prefilled(model: Model, lengths: tuple[int, ...]) -> DevicePools:
    """Pools with the state of some sequences, in the blocks of TABLES and the slots from 2 on."""
    pools = DevicePools(model.layout(BLOCK), 12, 6, CPU)
    for s, length in enumerate(lengths):
        rows = SequenceRows([(7 * s + t) % 100 + 3 for t in range(length)], 0, TABLES[s], 2 + s, 2 + s)
        finish(model.forward(make_batch([rows], BLOCK, CPU), pools))
    return pools


def test_a_padded_step_gives_what_a_batch_of_as_many_rows_gives_and_draws_each_row_its_own_way(model: Model) -> None:
    lengths = (9, 4, 6)
    before, bare, padded = (prefilled(model, lengths) for _ in range(3))
    sequences = [SequenceRows([11], n, TABLES[s], 2 + s, 2 + s) for s, n in enumerate(lengths)]
    stranger = SequenceRows([0], 0, [11], 5, 5)  # as the step pads: experts get as many rows, sums are rounded alike
    want = finish(model.forward(make_batch([*sequences, stranger], BLOCK, CPU), bare))[:3]
    rows = [DecodeRow(11, n, TABLES[s], 2 + s, (GREEDY, None, WARM)[s]) for s, n in enumerate(lengths)]
    step = DecodeStep(model, padded, captures=False)
    got = step.run(rows)
    assert torch.equal(got.logits, want)
    filters = Filters(temperature=0.8, top_k=5, top_p=0.9)
    assert got.tokens == (int(want[0].argmax()), None, draw(want[2], filters, 0.37))
    for name, part in {**padded.planes, **padded.slot_tensors}.items():
        is_slot = name in padded.slot_tensors
        taken, spare = ([2, 3, 4], [5]) if is_slot else ([block for table in TABLES for block in table], [1, 11])
        assert torch.equal(part[taken], {**bare.planes, **bare.slot_tensors}[name][taken])
        assert torch.equal(part[spare], {**before.planes, **before.slot_tensors}[name][spare]), "padding wrote here"
    assert step.counts.eager == 1


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """Here for want of a device; the same rows, and the log has the reason once."""
    step = DecodeStep(model, prefilled(model, (9, 4)), captures=True)
    plain = DecodeStep(model, prefilled(model, (9, 4)), captures=False)
    for t in range(2):
        rows = [DecodeRow(11, n + t, TABLES[s], 2 + s, GREEDY) for s, n in enumerate((9, 4))]
        assert torch.equal(step.run(rows).logits, plain.run(rows).logits)
    assert (step.counts.eager, step.counts.replayed, step.counts.failed_captures) == (2, 0, 1)
    assert caplog.text.count("cannot be captured and runs eagerly") == 1


def test_a_row_without_numbers_says_so_and_harms_no_other(model: Model) -> None:
    pools = prefilled(model, (9, 4))
    pools.slot_tensors[model.layout(BLOCK).slots[1].name][3] = float("nan")
    got = DecodeStep(model, pools, captures=False).run(
        [DecodeRow(11, 9, TABLES[0], 2, GREEDY), DecodeRow(11, 4, TABLES[1], 3, GREEDY)]
    )
    assert got.tokens[1] == NOT_FINITE
    assert got.tokens[0] == int(got.logits[0].argmax())


def test_inputs_hold_the_rows_that_were_loaded_last_and_padding_after_them() -> None:
    inputs = StepInputs(StepShape(4, LEAST_BLOCKS), BLOCK, CPU)
    for tables in ([[5, 6, 7], [8, 9]], [[5, 6, 7, 11]], [[5, 4, 7], [2], [3, 1]], [[5], [8, 9]]):
        rows = [DecodeRow(20 + r, 4 * len(t) - 1, t, 30 + r, WARM) for r, t in enumerate(tables)]
        inputs.load(rows)
        batch, missing = inputs.batch, 4 - len(rows)
        assert batch.token_ids.tolist() == [20 + r for r in range(len(rows))] + [0] * missing
        assert batch.positions.tolist() == [4 * len(t) - 1 for t in tables] + [0] * missing
        assert batch.row_blocks.tolist() == [t[-1] for t in tables] + [0] * missing
        assert batch.row_offsets.tolist() == [3] * len(rows) + [0] * missing
        assert batch.slot_in.tolist() == [30 + r for r in range(len(rows))] + [0] * missing
        whole = [t + [0] * (LEAST_BLOCKS - len(t)) for t in [*tables, *([[]] * missing)]]
        assert batch.block_tables.tolist() == whole
        assert inputs.sampling().top_k.tolist() == [5] * len(rows) + [0] * missing


def test_shapes_have_room_for_rows_and_tables() -> None:
    assert [bucket_rows(n) for n in (1, 3, 8, 9, 65, 256, 257)] == [1, 4, 8, 16, 96, 256, 512]
    rows = [DecodeRow(0, 4 * LEAST_BLOCKS, list(range(LEAST_BLOCKS + 1)), 2, None)] * 3
    assert shape_of(rows, 4) == StepShape(4, 2 * LEAST_BLOCKS)
    with pytest.raises(AssertionError, match="no room"):
        StepInputs(StepShape(1, LEAST_BLOCKS), 4, CPU).load([DecodeRow(0, 12, [1, 2, 3], 2, None)])


def test_a_step_follows_the_tokens_of_the_one_before_it_that_the_host_has_not_seen(model: Model) -> None:
    """Also where a shape that was not there before is prepared between the two, and where rows are drawn by chance."""
    lengths, warm = (9, 4), Draw(temperature=1.0, number=0.37)
    tables = [list(range(5, 5 + LEAST_BLOCKS)), list(range(30, 33))]
    pools = [DevicePools(model.layout(BLOCK), 64, 6, CPU) for _ in range(2)]
    steps = [DecodeStep(model, pools[0], captures=True), DecodeStep(model, pools[1], captures=False)]
    for pool in pools:
        for s, length in enumerate(lengths):
            rows = SequenceRows([(7 * s + t) % 100 + 3 for t in range(length)], 0, tables[s], 2 + s, 2 + s)
            finish(model.forward(make_batch([rows], BLOCK, CPU), pool))

    def rows_of(ids: tuple[int, int], turn: int, table: list[int]) -> list[DecodeRow]:
        both = zip(ids, lengths, (table, tables[1]), strict=True)
        return [DecodeRow(id_, n + turn, t, 2 + s, (GREEDY, warm)[s]) for s, (id_, n, t) in enumerate(both)]

    longer = [*tables[0], 40]  # of a shape of its own
    first = steps[0].launch(rows_of((11, 12), 0, tables[0]))
    second = steps[0].launch(rows_of((LAST, LAST), 1, longer))
    known = steps[1].run(rows_of((11, 12), 0, tables[0])).tokens
    assert first.wait().tokens == known
    assert known[0] is not None
    assert known[1] is not None
    want = steps[1].run(rows_of((known[0], known[1]), 1, longer))
    got = second.wait()
    assert got.tokens == want.tokens
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(pools[0].slots[2:4], pools[1].slots[2:4])


def test_a_canary_that_gives_no_numbers_stops_the_start(model: Model) -> None:
    pools = prefilled(model, ())
    step = DecodeStep(model, pools, captures=False)
    step.prepare(2)
    assert step.counts.eager == 0
    head = model.forward(make_batch([SequenceRows([0], 0, [0], 0, 0)], BLOCK, CPU), pools)
    assert finish(head).isfinite().all()
    broken = DecodeStep(_Broken(model), pools, captures=False)  # type: ignore[arg-type]
    with pytest.raises(CanaryError, match="not finite"):
        broken.prepare(2)


class _Broken:
    """A model whose logits are not numbers."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.facts = model.facts

    def forward(self, batch, pools):  # type: ignore[no-untyped-def]
        logits = yield from self.model.forward(batch, pools)
        return logits * float("nan")
