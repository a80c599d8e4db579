"""One shape of decode step on an accelerator: its inputs at fixed addresses, and the graph that replays it.

A graph knows pools and ids in device tensors, and nothing of any sequence: rows and blocks beyond those of a batch are
padding, which points at block 0 and slot 0. Sampling is inside, and so are the copies in and out, so that a replay is
one launch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from daemon.batch import Batch
from kernels.sampling_rows import SamplingRows

NUM_IDS = 5  # of a row, beside its block table
NUM_FIGURES = 5  # of a draw, of 8 bytes each at most


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

    token_id: int
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


class StepInputs:
    """The tensors of one shape. `load` copies what `fill` has written; both belong to the step's own stream order."""

    def __init__(self, shape: StepShape, block_size: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        num_ids = shape.num_rows * (NUM_IDS + shape.num_blocks)
        self.shape = shape
        self.block_size = block_size
        num_words = num_ids + NUM_FIGURES * shape.num_rows  # of 8 bytes
        self._staged = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_pinned)
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._ids = self._words[:num_ids]
        self.tokens = torch.zeros(shape.num_rows, dtype=torch.int64, pin_memory=is_pinned)
        numbers = self._staged.numpy()
        self._host = numbers[: NUM_IDS * shape.num_rows].reshape(NUM_IDS, shape.num_rows)
        self._host_tables = numbers[NUM_IDS * shape.num_rows : num_ids].reshape(shape.num_rows, shape.num_blocks)
        staged = self._draws(self._staged)
        self._host_draws = tuple(
            figures.numpy() for figures in (staged.temperature, staged.top_k, staged.top_p, staged.min_p, staged.number)
        )
        self._tables: list[list[int]] = [[] for _ in range(shape.num_rows)]  # what each row's table holds now
        self.batch = self._batch()
        self.fill([])

    def fill(self, rows: list[DecodeRow]) -> None:
        """Writes a batch's rows, and padding after them. No step of this shape may be under way."""
        shape, size = self.shape, self.block_size
        assert len(rows) <= shape.num_rows
        self._host[:, len(rows) :] = 0
        for r in range(len(rows), shape.num_rows):
            self._set_table(r, [])
            self._set_draw(r, NEUTRAL)
        for r, row in enumerate(rows):
            block, offset = divmod(row.position, size)
            assert block < len(row.block_table) <= shape.num_blocks, "no room for the row"
            self._host[:, r] = (row.token_id, row.position, row.block_table[block], offset, row.slot)
            self._set_table(r, row.block_table)
            self._set_draw(r, row.draw or NEUTRAL)

    def load(self) -> None:
        """Copies what was filled in to the device."""
        self._words.copy_(self._staged, non_blocking=True)

    def sampling(self) -> SamplingRows:
        """The draws, on the device."""
        return self._draws(self._words)

    def exact_batch(self, rows: list[DecodeRow]) -> Batch:
        """The same batch for a host that lays out no more room than these rows need."""
        positions = tuple(row.position for row in rows)
        return replace(self.batch, starts=positions + (0,) * (self.shape.num_rows - len(rows)))

    def _draws(self, words: torch.Tensor) -> SamplingRows:
        """The figures that lie behind the ids."""
        num_rows = self.shape.num_rows
        temperature, top_k, *doubles = words[self._ids.shape[0] :].view(NUM_FIGURES, num_rows).unbind()
        top_p, min_p, number = (figures.view(torch.float64) for figures in doubles)
        return SamplingRows(
            temperature.view(torch.float32)[:num_rows], top_k.view(torch.int32)[:num_rows], top_p, min_p, number
        )

    def _batch(self) -> Batch:
        shape = self.shape
        ids = self._ids[: NUM_IDS * shape.num_rows].view(NUM_IDS, shape.num_rows)
        token_ids, positions, row_blocks, row_offsets, slots = ids.unbind()
        return Batch(
            token_ids=token_ids,
            positions=positions,
            row_blocks=row_blocks,
            row_offsets=row_offsets,
            block_tables=self._ids[NUM_IDS * shape.num_rows :].view(shape.num_rows, shape.num_blocks),
            slot_in=slots,
            slot_out=slots,
            row_slots=None,
            starts=(shape.num_blocks * self.block_size - 1,) * shape.num_rows,
            cu_rows=tuple(range(shape.num_rows + 1)),
            logit_rows=torch.arange(shape.num_rows, device=ids.device),
        )

    def _set_table(self, row: int, table: list[int]) -> None:
        held = self._tables[row]
        if held == table:
            return
        same = len(held) if table[: len(held)] == held else 0
        self._host_tables[row, same : len(table)] = table[same:]
        self._host_tables[row, len(table) :] = 0
        self._tables[row] = table.copy()

    def _set_draw(self, row: int, draw: Draw) -> None:
        figures = draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.number
        for held, figure in zip(self._host_draws, figures, strict=True):
            held[row] = figure


Compute = Callable[[StepInputs, Batch], StepOutput]
"""Loads the inputs, runs the forward of a batch, draws, and copies the tokens out; only gives work to the device."""


class CapturedStep:
    """A shape's graph. Made from padding alone, so that no sequence's state moves."""

    def __init__(self, inputs: StepInputs, compute: Compute, memory: Any) -> None:
        inputs.fill([])
        compute(inputs, inputs.batch)  # compiles what is not compiled yet, which a capture cannot
        torch.cuda.current_stream().synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=memory, capture_error_mode="thread_local"):
            self.output = compute(inputs, inputs.batch)

    def replay(self) -> StepOutput:
        """Runs the step with what the inputs hold now."""
        self.graph.replay()
        return self.output
