"""Long texts in which the model that ships with the project must find a note, or remember a device's last state.

A note is found in attention's history, thousands of tokens back; a state lives in the recurrent layers alone.
"""

import json
from dataclasses import dataclass

from ops.models.shipped import TINY_HYBRID

CASES = (("needle-109", "a note early in the text"), ("status-306", "a state last changed before its middle"))


@dataclass(frozen=True, slots=True)
class Recall:
    """A prompt as the model's own template writes it, the question at its end, and the only right answer."""

    what: str
    prompt: str
    question: str
    expected: str


def read_recalls() -> tuple[Recall, ...]:
    """The cases that the demo asks."""
    lines = (TINY_HYBRID / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines)}
    return tuple(Recall(what, rows[id_]["prompt"], rows[id_]["question"], rows[id_]["expected"]) for id_, what in CASES)
