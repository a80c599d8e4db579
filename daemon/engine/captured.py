"""One shape of decode step on an accelerator: its inputs at fixed addresses, and the graph that replays it.

A graph knows pools and ids in device tensors, and nothing of any sequence: rows and blocks beyond those of a batch are
padding, which points at block 0 and slot 0. Sampling is inside. The copies in and out come before and after it, since
two steps may be under way: what the host writes for one, and where its tokens arrive, the other does not use.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from daemon.batch import Batch
from kernels.sampling_rows import SamplingRows

NUM_IDS = 5  # of a row, beside its block table
NUM_FIGURES = 5  # of a draw, of 8 bytes each at most
LAST = -1  # in place of a token id: the token that the step before this one draws for the row


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's token is drawn; neutral values switch a filter off, and temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    number: float = 0.5  # in (0, 1)


NEUTRAL = Draw()


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's next row."""

    token_id: int  # or LAST
    position: int
    block_table: list[int]
    slot: int
    draw: Draw | None  # None: the host draws from the logits


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for: so many rows, and block tables so long."""

    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """On the device, overwritten by the next step of any shape."""

    logits: torch.Tensor  # [num_rows, vocab_size] float32
    tokens: torch.Tensor  # [num_rows] int64; sampling_rows.NOT_FINITE where logits are not numbers


class HostSide:
    """What the host writes for a step, and where its tokens arrive; no other step's until those are there."""

    def __init__(self, shape: StepShape, block_size: int, *, is_pinned: bool) -> None:
        self.shape = shape
        self.block_size = block_size
        self.words = torch.zeros(_num_words(shape), dtype=torch.int64, pin_memory=is_pinned)
        self.tokens = torch.zeros(shape.num_rows, dtype=torch.int64, pin_memory=is_pinned)
        num_ids = NUM_IDS * shape.num_rows
        numbers = self.words.numpy()
        self._ids = numbers[:num_ids].reshape(NUM_IDS, shape.num_rows)
        self._tables_held = numbers[num_ids : _num_ids(shape)].reshape(shape.num_rows, shape.num_blocks)
        draws = _draws(self.words, shape)
        self._draws = tuple(
            figures.numpy() for figures in (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.number)
        )
        self._tables: list[list[int]] = [[] for _ in range(shape.num_rows)]  # what each row's table holds now
        self.fill([])

    def fill(self, rows: list[DecodeRow]) -> None:
        """Writes a batch's rows, and padding after them."""
        shape, size = self.shape, self.block_size
        assert len(rows) <= shape.num_rows
        self._ids[:, len(rows) :] = 0
        for r in range(len(rows), shape.num_rows):
            self._set_table(r, [])
            self._set_draw(r, NEUTRAL)
        for r, row in enumerate(rows):
            block, offset = divmod(row.position, size)
            assert block < len(row.block_table) <= shape.num_blocks, "no room for the row"
            self._ids[:, r] = (row.token_id, row.position, row.block_table[block], offset, row.slot)
            self._set_table(r, row.block_table)
            self._set_draw(r, row.draw or NEUTRAL)

    def _set_table(self, row: int, table: list[int]) -> None:
        held = self._tables[row]
        if held == table:
            return
        same = len(held) if table[: len(held)] == held else 0
        self._tables_held[row, same : len(table)] = table[same:]
        self._tables_held[row, len(table) :] = 0
        self._tables[row] = table.copy()

    def _set_draw(self, row: int, draw: Draw) -> None:
        figures = draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.number
        for held, figure in zip(self._draws, figures, strict=True):
            held[row] = figure


class StepInputs:
    """The tensors of one shape on the device, and the host's two sides of them, which steps use in turn."""

    def __init__(self, shape: StepShape, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.block_size = block_size
        self._sides = [HostSide(shape, block_size, is_pinned=device.type == "cuda") for _ in range(2)]
        self._words = torch.zeros(_num_words(shape), dtype=torch.int64, device=device)
        self.batch = self._batch()

    def load(self, rows: list[DecodeRow]) -> HostSide:
        """Has a batch's rows, and padding after them, copied to the device.

        Returns: their side, which the step before this one does not use. The one before that has ended.
        """
        side = self._sides[0]
        self._sides.reverse()
        side.fill(rows)
        self._words.copy_(side.words, non_blocking=True)
        return side

    def follow(self, last: torch.Tensor) -> None:
        """Takes the tokens of the step before, [num_rows] at least, for the rows that say LAST."""
        ids = self.batch.token_ids
        torch.where(ids == LAST, last[: self.shape.num_rows], ids, out=ids)

    def sampling(self) -> SamplingRows:
        """The draws, on the device."""
        return _draws(self._words, self.shape)

    def exact_batch(self, rows: list[DecodeRow]) -> Batch:
        """The same batch for a host that lays out no more room than these rows need."""
        positions = tuple(row.position for row in rows)
        return replace(self.batch, starts=positions + (0,) * (self.shape.num_rows - len(rows)))

    def _batch(self) -> Batch:
        shape = self.shape
        ids = self._words[: NUM_IDS * shape.num_rows].view(NUM_IDS, shape.num_rows)
        token_ids, positions, row_blocks, row_offsets, slots = ids.unbind()
        tables = self._words[NUM_IDS * shape.num_rows : _num_ids(shape)]
        return Batch(
            token_ids=token_ids,
            positions=positions,
            row_blocks=row_blocks,
            row_offsets=row_offsets,
            block_tables=tables.view(shape.num_rows, shape.num_blocks),
            slot_in=slots,
            slot_out=slots,
            row_slots=None,
            starts=(shape.num_blocks * self.block_size - 1,) * shape.num_rows,
            cu_rows=tuple(range(shape.num_rows + 1)),
            logit_rows=torch.arange(shape.num_rows, device=ids.device),
        )


def _num_ids(shape: StepShape) -> int:
    """Words of 8 bytes for ids and tables."""
    return shape.num_rows * (NUM_IDS + shape.num_blocks)


def _num_words(shape: StepShape) -> int:
    """The same with the draws behind them."""
    return _num_ids(shape) + NUM_FIGURES * shape.num_rows


def _draws(words: torch.Tensor, shape: StepShape) -> SamplingRows:
    num_rows = shape.num_rows
    temperature, top_k, *doubles = words[_num_ids(shape) :].view(NUM_FIGURES, num_rows).unbind()
    top_p, min_p, number = (figures.view(torch.float64) for figures in doubles)
    return SamplingRows(
        temperature.view(torch.float32)[:num_rows], top_k.view(torch.int32)[:num_rows], top_p, min_p, number
    )


Compute = Callable[[StepInputs, Batch], StepOutput]
"""Runs the forward of a batch and draws; only gives work to the device."""


class CapturedStep:
    """A shape's graph. Made from padding alone, so that no sequence's state moves."""

    def __init__(self, inputs: StepInputs, compute: Compute, memory: Any) -> None:
        inputs.load([])
        compute(inputs, inputs.batch)  # compiles what is not compiled yet, which a capture cannot
        torch.cuda.current_stream().synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=memory, capture_error_mode="thread_local"):
            self.output = compute(inputs, inputs.batch)

    def replay(self) -> StepOutput:
        """Runs the step with what was loaded last."""
        self.graph.replay()
        return self.output
