"""downcore session ls, show ID, abort ID: the sequences being served."""

from collections.abc import Iterable
from typing import Annotated

import typer
from downcore.v1 import admin_pb2
from rich.table import Table

from ops.cli.app import Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import (
    as_dict,
    enum_name,
    human_bytes,
    human_seconds,
    make_console,
    make_facts,
    make_table,
    print_json,
)

app = make_app("Sequences being served.")
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A sequence id, or a request id for all of its choices.")]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "session", arguments)


@app.command("ls")
def list_sequences(
    server: ServerOption = None, timeout: TimeoutOption = 10.0, output: FormatOption = Format.TABLE
) -> None:
    """All sequences, waiting and running."""
    sequences = _fetch(server, timeout, "")
    if output is Format.JSON:
        print_json([as_dict(sequence) for sequence in sequences])
    elif sequences:
        make_console().print(_table(sequences))
    else:
        make_console(stderr=True).print("no sequences")


@app.command("show")
def show_sequence(
    sequence_id: IdArgument,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """One sequence, or all of one request. Exits 6 when there is none."""
    sequences = _fetch(server, timeout, sequence_id)
    if not sequences:
        raise CliError(ExitCode.NOT_FOUND, f"no sequence {sequence_id!r}")
    if output is Format.JSON:
        print_json([as_dict(sequence) for sequence in sequences])
        return
    console = make_console()
    for number, sequence in enumerate(sequences):
        if number:
            console.print()
        console.print(make_facts(_facts(sequence)))


@app.command("abort")
def abort_sequence(
    sequence_id: IdArgument,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """End a sequence, or all of one request. Exits 6 when there is none."""
    with connect(server) as client:
        request = admin_pb2.AbortSequenceRequest(id=sequence_id)
        answer = client.unary(f"{ADMIN}/AbortSequence", request, admin_pb2.AbortSequenceResponse, timeout)
    if not answer.aborted:
        raise CliError(ExitCode.NOT_FOUND, f"no sequence {sequence_id!r}")
    if output is Format.JSON:
        print_json(as_dict(answer))
    else:
        print(f"aborted {answer.aborted}")


def _fetch(server: str | None, timeout_s: float, sequence_id: str) -> list[admin_pb2.Sequence]:
    with connect(server) as client:
        request = admin_pb2.ListSequencesRequest(id=sequence_id)
        answer = client.unary(f"{ADMIN}/ListSequences", request, admin_pb2.ListSequencesResponse, timeout_s)
    return list(answer.sequences)


def _state(sequence: admin_pb2.Sequence) -> str:
    state = enum_name(admin_pb2.SequenceState.DESCRIPTOR, sequence.state).lower()
    return f"{state}, warming" if sequence.is_warming else state


def _table(sequences: Iterable[admin_pb2.Sequence]) -> Table:
    numeric = ("prompt", "cached", "computed", "answer", "blocks", "shared", "held", "age")
    table = make_table(("id", "state", *numeric), numeric=numeric)
    for sequence in sequences:
        table.add_row(
            sequence.id,
            _state(sequence),
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


def _facts(sequence: admin_pb2.Sequence) -> list[tuple[str, str]]:
    return [
        ("id", sequence.id),
        ("state", _state(sequence)),
        ("prompt", f"{sequence.prompt_tokens:,} tokens, {sequence.cached_tokens:,} from the cache"),
        ("computed", f"{sequence.computed_tokens:,} tokens"),
        ("answer", f"{sequence.completion_tokens:,} of at most {sequence.max_tokens:,} tokens"),
        ("blocks", f"{sequence.blocks:,}, {sequence.shared_blocks:,} of them shared"),
        ("held", human_bytes(sequence.held_bytes)),
        ("age", human_seconds(sequence.age_s)),
        ("preempted", f"{sequence.preemptions} times"),
    ]
