"""Whose chunk is computed next: turns between prompts, and between prompts and sequences larger than the device.

Chunks go by turns to the oldest prompt, so that none starves, and to the one nearest its end. Of several equal prompts
the oldest is both: it runs through, and the others find its blocks. Prompts that are warmed have a turn when no other
has. A sequence larger than the device computes each row in a forward of its own: rows and prompts have as much of
the time as each other, and rows go round.
"""

from collections.abc import Sequence as Many

from daemon.engine.sequence import Sequence


class Turns:
    """Owns the counts that turns are taken by. Knows no clock: what a turn took is told."""

    def __init__(self) -> None:
        self._num_started = 0
        self._prompts_s = 0.0
        self._rows_s = 0.0

    def started(self, sequence: Sequence) -> None:
        """A chunk or a row of its own is begun."""
        self._num_started += 1
        if sequence.stream is not None:
            sequence.stream.last_turn = self._num_started

    def spent(self, sequence: Sequence, elapsed_s: float) -> None:
        """It has been computed."""
        if sequence.in_prompt:
            self._prompts_s += elapsed_s
        else:
            self._rows_s += elapsed_s

    def next(self, ready: Many[Sequence]) -> Sequence | None:
        """Of running sequences whose next rows have their blocks; those that decode with others are passed over."""
        prompt = self._next_prompt([sequence for sequence in ready if sequence.in_prompt])
        rows = [(s.stream.last_turn, s.rank, s) for s in ready if s.stream is not None and not s.in_prompt]
        if prompt is None or not rows:
            self._prompts_s = self._rows_s = 0.0
        if rows and (prompt is None or self._rows_s <= self._prompts_s):
            return min(rows)[2]
        return prompt

    def _next_prompt(self, inside: list[Sequence]) -> Sequence | None:
        inside = [sequence for sequence in inside if sequence.request.warm is None] or inside
        if not inside:
            return None
        if self._num_started % 2:
            return min(inside, key=lambda s: (s.request.prompt_len - s.computed_len, s.request.order))
        return min(inside, key=lambda s: s.request.order)
