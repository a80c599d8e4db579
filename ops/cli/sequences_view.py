"""How sequences look to people."""

from collections.abc import Iterable

from downcore.v1 import admin_pb2
from rich.table import Table

from ops.cli.output import enum_name, human_bytes, human_seconds, make_table


def state_text(sequence: admin_pb2.Sequence) -> str:
    """ "decoding", or "prefilling, warming"."""
    state = enum_name(admin_pb2.SequenceState.DESCRIPTOR, sequence.state).lower()
    return f"{state}, warming" if sequence.is_warming else state


def sequence_table(sequences: Iterable[admin_pb2.Sequence]) -> Table:
    """One row a sequence."""
    numeric = ("prompt", "cached", "computed", "answer", "blocks", "shared", "held", "age")
    table = make_table(("id", "state", *numeric), numeric=numeric)
    for sequence in sequences:
        table.add_row(
            sequence.id,
            state_text(sequence),
            f"{sequence.prompt_tokens:,}",
            f"{sequence.cached_tokens:,}",
            f"{sequence.computed_tokens:,}",
            f"{sequence.completion_tokens:,}/{sequence.max_tokens:,}",
            f"{sequence.blocks:,}",
            f"{sequence.shared_blocks:,}",
            human_bytes(sequence.held_bytes),
            human_seconds(sequence.age_s),
        )
    return table
