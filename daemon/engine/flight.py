"""Decode steps that the device has been given and whose tokens the host has not taken yet: at most two.

While the host takes a step's tokens and plans, the device already computes the one after it: the same rows, each a
token further, whose ids it takes from its own last draws. What must hold:

- Only rows that the device draws, that have a block for one token more, and that will want it go ahead. One step of
  one batch is ahead or none of it: two groups of rows would read all weights twice.
- A sequence that turns out to have ended has computed a row too much. It went into blocks and a slot that nobody else
  had when the step was launched; whoever gets them now uses them behind that step, in the order of the stream or of a
  fence. So its row is dropped, and nothing has to be taken back.
- Nobody moves or copies the state of a sequence in flight: no sequence is preempted before its step has landed.
"""

from dataclasses import dataclass

from daemon.engine.captured import Draw
from daemon.engine.decode_step import Decoded, Launched
from daemon.engine.runner import Runner
from daemon.engine.sampler import Sampler
from daemon.engine.scheduler import Scheduler
from daemon.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Landed:
    """A step whose tokens have arrived. Some of the sequences may have ended meanwhile."""

    sequences: tuple[Sequence, ...]
    decoded: Decoded


@dataclass(frozen=True, slots=True)
class _Flight:
    sequences: tuple[Sequence, ...]
    draws: list[Draw | None]
    launched: Launched


class Flights:
    """Owns the steps under way; sequences own everything that these read and write."""

    def __init__(self, runner: Runner, sampler: Sampler, scheduler: Scheduler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._flying: _Flight | None = None

    @property
    def takes(self) -> bool:
        """Whether this model's steps run here: the device can run them by itself."""
        return self._runner.step is not None

    @property
    def is_flying(self) -> bool:
        """A step has not landed."""
        return self._flying is not None

    def start(self, sequences: tuple[Sequence, ...]) -> None:
        """Gives the device one row of each."""
        assert self._flying is None
        draws = [self._sampler.draw_of(sequence) for sequence in sequences]
        self._flying = _Flight(sequences, draws, self._runner.launch(sequences, draws))

    def land(self) -> Landed | None:
        """Waits for the step under way, if there is one, after it has launched the next where that may go ahead."""
        flying, step = self._flying, self._runner.step
        if flying is None or step is None:
            return None
        self._flying = self._ahead(flying)
        step.counts.dropped += sum(not sequence.is_running for sequence in flying.sequences)
        return Landed(flying.sequences, flying.launched.wait())

    def settle(self) -> None:
        """A step that is nobody's any more is not left under way."""
        if self._flying is not None and not any(sequence.is_running for sequence in self._flying.sequences):
            self.close()

    def close(self) -> None:
        """Waits for what is under way, and drops it."""
        flying, step = self._flying, self._runner.step
        if flying is not None and step is not None:
            step.counts.dropped += len(flying.sequences)
            flying.launched.wait()
        self._flying = None

    def _ahead(self, flying: _Flight) -> _Flight | None:
        """The step after one that is under way; None where its rows are not known to be wanted, or are not the same."""
        sequences = flying.sequences
        if None in flying.draws or self._scheduler.decoding() != list(sequences):
            return None
        if not all(self._goes_on(sequence) for sequence in sequences):
            return None
        draws = [self._sampler.draw_of(sequence, ahead=1) for sequence in sequences]
        if None in draws:
            return None
        self._scheduler.meters.decode_rows.observe(len(sequences))
        return _Flight(sequences, draws, self._runner.launch(sequences, draws, ahead=True))

    def _goes_on(self, sequence: Sequence) -> bool:
        """Its row under way draws a token, it wants another after that, and it has room for the row of that token."""
        num_tokens = len(sequence.token_ids)
        is_drawing = sequence.computed_len + 1 == num_tokens
        has_room = num_tokens < len(sequence.block_table) * self._runner.pools.layout.block_size
        return is_drawing and has_room and num_tokens + 1 < sequence.request.max_len
