"""Runs forwards: decode rows of many sequences at once, and one grid chunk at a time, in slices.

A chunk is alone in its forward and writes the state after it into a shadow slot, so that a chunk dropped half-way has
changed nothing that anybody reads: its rows lie in private blocks beyond `computed_len`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from daemon.batch import Batch, SequenceRows, make_batch
from daemon.engine.captured import LAST, DecodeRow, Draw
from daemon.engine.decode_step import CanaryError, Decoded, DecodeStep, Launched, takes
from daemon.engine.sequence import Sequence
from daemon.layers.steps import HostStageError
from daemon.models.base import HostStaged, Model, Steps, finish
from kernels.dispatch import choose_kernels
from tiers.pools import DevicePools
from tiers.staged import StagedPools, Stager
from tiers.streamed import Sources, StreamedPools, StreamStats

CANARY_ROWS = 16  # more than decoding has of a sequence, so that it is a chunk

log = logging.getLogger("downcore.engine")


@dataclass(slots=True)
class Chunk:
    """A forward of prompt positions [start, end), paused or done."""

    sequence: Sequence
    start: int
    end: int
    forward: Steps
    streamed: StreamStats | None  # of one whose history is partly below the device
    elapsed_s: float = 0.0


class Runner:
    """Owns the shadow slot; sequences own everything else."""

    def __init__(
        self, model: Model, pools: DevicePools, shadow_slot: int, sources: Sources | None, *, replays: bool = True
    ) -> None:
        self.model = model
        self.sources = sources
        self.pools = pools
        self.shadow_slot = shadow_slot
        move_rows = choose_kernels(model.facts.device, model.facts.dtype).move_rows
        self.stager = None if sources is None or move_rows is None else Stager(sources, move_rows)
        self._given: torch.cuda.Event | None = None  # after the latest piece of a chunk
        self.step = DecodeStep(model, pools, captures=replays) if takes(model) else None

    def prove(self, max_rows: int) -> None:
        """A chunk and steps over padding, before anybody is served: the device answers, with numbers.

        Raises:
            CanaryError: it does not.
        """
        num_rows = min(CANARY_ROWS, self.pools.layout.block_size)
        self.pools.clear_slot(0)
        try:
            logits = self._forward([SequenceRows([0] * num_rows, 0, [0], slot_in=0, slot_out=0)])
        except HostStageError as error:
            log.warning("the canary could not read part of the model: %s", error)
            return
        if not bool(logits.isfinite().all()):
            raise CanaryError("a chunk over padding gives logits that are not finite")
        if self.step is not None:
            self.step.prepare(max_rows)

    def launch(self, sequences: tuple[Sequence, ...], draws: list[Draw | None], *, ahead: bool = False) -> Launched:
        """One row of each sequence. Those of a step `ahead` of the host follow the tokens that it does not know yet.

        `draws` say how each token is drawn on the device, or that the host draws it.
        """
        assert self.step is not None
        self.step.counts.ahead += ahead
        return self.step.launch(
            [_decode_row(sequence, draw, ahead=ahead) for sequence, draw in zip(sequences, draws, strict=True)]
        )

    def decode(self, sequences: tuple[Sequence, ...]) -> Decoded:
        """One row of each sequence, for a model whose steps the device cannot run by itself."""
        return Decoded(self._decode(sequences), (None,) * len(sequences))

    def _decode(self, sequences: tuple[Sequence, ...]) -> torch.Tensor:
        rows: list[SequenceRows] = []
        for sequence in sequences:
            slot, position = _slot_of(sequence), sequence.computed_len
            rows.append(
                SequenceRows(
                    [sequence.token_ids[position]], position, sequence.block_table, slot_in=slot, slot_out=slot
                )
            )
        if self.model.caps.batched_decode:
            return self._forward(rows)
        return torch.cat([self._forward([row]) for row in rows])

    def start_chunk(self, sequence: Sequence, start: int, end: int) -> Chunk:
        """A chunk with nothing computed yet; its state goes to the shadow slot.

        It may be one row of a sequence that is past its prompt and larger than the device.
        """
        rows = SequenceRows(
            sequence.token_ids[start:end],
            start,
            sequence.block_table,
            slot_in=_slot_of(sequence),
            slot_out=self.shadow_slot,
        )
        if isinstance(self.model, HostStaged):
            following = sequence.token_ids[end : min(end + len(rows.token_ids), sequence.request.prompt_len)]
            if following:
                self.model.prefetch(sequence.token_ids[start:end], following)
        if sequence.stream is None or not sequence.stream.below:
            return Chunk(sequence, start, end, self.model.forward(self._batch([rows]), self.pools), None)
        # What stands for the pools has of them what layers use.
        assert self.sources is not None
        if self.stager is None:
            streamed = StreamedPools(self.sources, sequence.block_table, is_chunk=end - start > 1)
            forward = self.model.forward(self._batch([rows]), cast(DevicePools, streamed))
            return Chunk(sequence, start, end, forward, streamed.stats)
        size = self.pools.layout.block_size
        table = sequence.block_table[: -(-end // size)]
        staged = StagedPools(self.stager, table, start // size)
        batch = self._batch([replace(rows, block_table=list(range(len(table))))])
        forward = self.model.forward(batch, cast(DevicePools, staged))
        return Chunk(sequence, start, end, _then(forward, staged.finish), staged.stats)

    def advance(self, chunk: Chunk, slice_s: float) -> torch.Tensor | None:
        """Computes for about `slice_s` seconds; logits [1, vocab_size] once the chunk is whole, else None."""
        began = time.perf_counter()
        try:
            while True:
                next(chunk.forward)
                self._pace()
                if time.perf_counter() - began >= slice_s:
                    return None
        except StopIteration as stop:
            return stop.value
        finally:
            chunk.elapsed_s += time.perf_counter() - began

    def end(self, chunk: Chunk) -> None:
        """It is whole, or dropped half-way. What lies below the device may be written again from now on."""
        chunk.forward.close()

    def swap_shadow(self, slot: int) -> int:
        """The finished chunk's slot, in exchange for the sequence's old one, which becomes the shadow."""
        fresh, self.shadow_slot = self.shadow_slot, slot
        return fresh

    def _pace(self) -> None:
        """Lets the device catch up, but for one piece: else it would be given all pieces in the time of a slice."""
        if not self.pools.blocks.is_cuda:
            return
        event = torch.cuda.Event()
        event.record()
        if self._given is not None:
            self._given.synchronize()
        self._given = event

    def _forward(self, rows: list[SequenceRows]) -> torch.Tensor:
        return finish(self.model.forward(self._batch(rows), self.pools))

    def _batch(self, rows: list[SequenceRows]) -> Batch:
        return make_batch(rows, self.pools.layout.block_size, self.pools.blocks.device)


def _then(forward: Steps, end: Callable[[], None]) -> Steps:
    """A forward, and what is to be done when it is whole."""
    logits = yield from forward
    end()
    return logits


def _decode_row(sequence: Sequence, draw: Draw | None, *, ahead: bool) -> DecodeRow:
    position = sequence.computed_len
    if ahead:
        return DecodeRow(LAST, position + 1, sequence.block_table, _slot_of(sequence), draw)
    return DecodeRow(sequence.token_ids[position], position, sequence.block_table, _slot_of(sequence), draw)


def _slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
