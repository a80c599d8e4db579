"""Decode steps on an accelerator: padded to a shape, replayed as its graph, or run eagerly where there is none.

Eager and replayed steps have the same rows in the same places, so they give the same bytes; which of the two ran is
counted. A shape is captured when it is first needed. Where its capture fails, it runs eagerly from then on, and the log
says so.
"""

import logging
import time
from dataclasses import dataclass

import torch

from daemon.batch import Batch
from daemon.engine.captured import CapturedStep, DecodeRow, HostSide, StepInputs, StepOutput, StepShape
from daemon.engine.faults import end_if_sticky
from daemon.models.base import Model, finish
from kernels.dispatch import choose_kernels
from kernels.host import ints
from tiers.pools import DevicePools

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_ROWS = 4096
LEAST_BLOCKS = 16  # of a table; longer ones are powers of two
MOST_REPLAYED_TOKENS = 1 << 24  # rows x tokens that tables cover: beyond it a graph would hold too much scratch

log = logging.getLogger("downcore.engine")


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step gave, a row for each sequence."""

    logits: torch.Tensor  # [num_rows, vocab_size] float32, until the next step is launched
    tokens: tuple[int | None, ...]  # drawn on the device, NOT_FINITE where there was nothing to draw; None: not drawn


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has been given."""

    rows: list[DecodeRow]
    side: HostSide
    logits: torch.Tensor
    event: "torch.cuda.Event | None"  # after its tokens; None where they are there when the launch returns

    def wait(self) -> Decoded:
        """Returns when its tokens have arrived."""
        if self.event is not None:
            self.event.synchronize()
        tokens = ints(self.side.tokens[: len(self.rows)])
        drawn = tuple(None if row.draw is None else token for row, token in zip(self.rows, tokens, strict=True))
        return Decoded(self.logits[: len(self.rows)], drawn)


@dataclass(slots=True)
class StepCounts:
    """How steps ran."""

    replayed: int = 0
    eager: int = 0
    ahead: int = 0  # of both, those launched before the tokens of the step before were known
    dropped: int = 0  # rows of those, of sequences that had ended
    captured: int = 0
    failed_captures: int = 0


class CanaryError(Exception):
    """A step over padding alone gave what it must not give."""


class DecodeStep:
    """Owns the inputs and graphs of all shapes; they share one pool of scratch memory, since steps run in turn."""

    def __init__(self, model: Model, pools: DevicePools, *, captures: bool) -> None:
        facts = model.facts
        self.model = model
        self.pools = pools
        self.captures = captures
        self.counts = StepCounts()
        self._forms = choose_kernels(facts.device, facts.dtype).rows
        self._inputs: dict[StepShape, StepInputs] = {}
        self._graphs: dict[StepShape, CapturedStep | None] = {}
        self._memory: object = None  # the graphs' scratch, from the first one on
        self._last = torch.zeros(MOST_ROWS, dtype=torch.int64, device=pools.blocks.device)  # the last step's tokens

    def launch(self, rows: list[DecodeRow]) -> Launched:
        """One row of each sequence. At most one step before it is still under way."""
        shape = shape_of(rows, self.pools.layout.block_size)
        graph = self._graph(shape)
        inputs = self._inputs_of(shape)
        side = inputs.load(rows)
        if graph is not None:
            output = graph.replay()
            self.counts.replayed += 1
        else:
            output = self._compute(inputs, inputs.exact_batch(rows))
            self.counts.eager += 1
        side.tokens.copy_(output.tokens, non_blocking=True)
        event = None
        if self.pools.blocks.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return Launched(rows, side, output.logits, event)

    def run(self, rows: list[DecodeRow]) -> Decoded:
        """The same; returns when the tokens have arrived."""
        return self.launch(rows).wait()

    def graphs(self) -> list[CapturedStep]:
        """Those that were captured."""
        return [graph for graph in self._graphs.values() if graph is not None]

    def prepare(self, max_rows: int) -> None:
        """Captures the steps of short sequences, and proves that a replay gives the bytes of an eager step.

        Raises:
            CanaryError: it does not, or gives no numbers at all.
        """
        began = time.monotonic()
        shapes = [StepShape(n, LEAST_BLOCKS) for n in ROW_BUCKETS if n <= bucket_rows(max_rows)]
        for shape in shapes:
            self._prove(shape)
        if self.captures:
            log.info("captured %d decode steps in %.1f s", self.counts.captured, time.monotonic() - began)

    def _prove(self, shape: StepShape) -> None:
        """Rows with a slot of their own each, as far as there are slots: of padding rows, which share one and write it
        side by side, nothing can be said."""
        inputs, graph = self._inputs_of(shape), self._graph(shape)
        num_own = min(shape.num_rows, self.pools.num_slots - 1)
        slots = self.pools.slots[: num_own + 1]
        inputs.load([DecodeRow(0, 0, [0], 1 + r, None) for r in range(num_own)])
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run in (lambda: self._compute(inputs, inputs.batch), *(() if graph is None else (graph.replay,))):
            slots.zero_()
            logits = run().logits[:num_own]
            found.append((logits.clone(), slots[1:].clone()))
        is_finite = bool(found[0][0].isfinite().all())
        is_equal = all(torch.equal(*both) for both in zip(found[0], found[-1], strict=True))
        slots.zero_()
        if not is_finite:
            raise CanaryError("a step over padding gives logits that are not finite")
        if not is_equal:
            raise CanaryError(f"a replayed step of {shape.num_rows} rows gives other bytes than an eager one")

    def _inputs_of(self, shape: StepShape) -> StepInputs:
        if shape not in self._inputs:
            self._inputs[shape] = StepInputs(shape, self.pools.layout.block_size, self.pools.blocks.device)
        return self._inputs[shape]

    def _graph(self, shape: StepShape) -> CapturedStep | None:
        """The shape's graph, captured now where it is new; None where it runs eagerly."""
        if not self.captures or shape.num_rows * shape.num_blocks * self.pools.layout.block_size > MOST_REPLAYED_TOKENS:
            return None
        if shape not in self._graphs:
            last = self._last.clone()
            self._graphs[shape] = self._capture(shape)
            self._last.copy_(last)  # a capture computes with padding
        return self._graphs[shape]

    def _capture(self, shape: StepShape) -> CapturedStep | None:
        try:
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            graph = CapturedStep(self._inputs_of(shape), self._compute, self._memory)
        except RuntimeError as error:
            end_if_sticky(error, self.pools.blocks.device)
            self.counts.failed_captures += 1
            log.warning(
                "a step of %d rows over %d blocks cannot be captured and runs eagerly: %s",
                shape.num_rows, shape.num_blocks, error,
            )  # fmt: skip
            return None
        self.counts.captured += 1
        return graph

    def _compute(self, inputs: StepInputs, batch: Batch) -> StepOutput:
        inputs.follow(self._last)
        logits = finish(self.model.forward(batch, self.pools))
        tokens = self._forms.draw(logits, inputs.sampling())
        self._last[: inputs.shape.num_rows].copy_(tokens)
        return StepOutput(logits, tokens)


def takes(model: Model) -> bool:
    """Whether a model's decode steps run here: its form and its layers read the device alone."""
    facts, caps = model.facts, model.caps
    replays = choose_kernels(facts.device, facts.dtype).replays
    return replays and caps.graph_capture and caps.no_host_stage and caps.batched_decode


def bucket_rows(num_rows: int) -> int:
    """The rows of the shape that so many rows are padded to."""
    return next((n for n in ROW_BUCKETS if n >= num_rows), -(-num_rows // ROW_BUCKETS[-1]) * ROW_BUCKETS[-1])


def shape_of(rows: list[DecodeRow], block_size: int) -> StepShape:
    """The shape that these rows are padded to."""
    most = max(max(len(row.block_table), row.position // block_size + 1) for row in rows)
    num_blocks = LEAST_BLOCKS
    while num_blocks < most:
        num_blocks *= 2
    return StepShape(bucket_rows(len(rows)), num_blocks)
