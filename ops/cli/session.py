"""downcore session ls, show ID, abort ID: the sequences being served."""

from typing import Annotated

import typer
from downcore.v1 import admin_pb2

from ops.cli.app import Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, connect
from ops.cli.confirm import DryRunOption, YesOption, confirm
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import as_dict, counted, human_bytes, human_seconds, make_console, make_facts, print_data
from ops.cli.sequences_view import sequence_table, state_text

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
    if output is not Format.TABLE:
        print_data([as_dict(sequence) for sequence in sequences], output)
    elif sequences:
        make_console().print(sequence_table(sequences))
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
    if output is not Format.TABLE:
        print_data([as_dict(sequence) for sequence in sequences], output)
        return
    console = make_console()
    for number, sequence in enumerate(sequences):
        if number:
            console.print()
        console.print(make_facts(_facts(sequence)))


@app.command("abort")
def abort_sequence(
    sequence_id: IdArgument,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """End a sequence, or all of one request. Asks first. Exits 6 when there is none."""
    if dry_run or not yes:
        found = _fetch(server, timeout, sequence_id)
        if not found:
            raise CliError(ExitCode.NOT_FOUND, f"no sequence {sequence_id!r}")
        what = counted(len(found), "sequence")
        if dry_run:
            print(f"would abort {what}: {', '.join(sequence.id for sequence in found)}")
            return
        confirm(f"Abort {what} of {found[0].request_id}?", yes=False)
    with connect(server) as client:
        request = admin_pb2.AbortSequenceRequest(id=sequence_id)
        answer = client.unary(f"{ADMIN}/AbortSequence", request, admin_pb2.AbortSequenceResponse, timeout)
    if not answer.aborted:
        raise CliError(ExitCode.NOT_FOUND, f"no sequence {sequence_id!r}")
    if output is not Format.TABLE:
        print_data(as_dict(answer), output)
    else:
        print(f"aborted {answer.aborted}")


def _fetch(server: str | None, timeout_s: float, sequence_id: str) -> list[admin_pb2.Sequence]:
    with connect(server) as client:
        request = admin_pb2.ListSequencesRequest(id=sequence_id)
        answer = client.unary(f"{ADMIN}/ListSequences", request, admin_pb2.ListSequencesResponse, timeout_s)
    return list(answer.sequences)


def _facts(sequence: admin_pb2.Sequence) -> list[tuple[str, str]]:
    return [
        ("id", sequence.id),
        ("state", state_text(sequence)),
        ("prompt", f"{sequence.prompt_tokens:,} tokens, {sequence.cached_tokens:,} from the cache"),
        ("computed", f"{sequence.computed_tokens:,} tokens"),
        ("answer", f"{sequence.completion_tokens:,} of at most {sequence.max_tokens:,} tokens"),
        ("blocks", f"{sequence.blocks:,}, {sequence.shared_blocks:,} of them shared"),
        ("held", human_bytes(sequence.held_bytes)),
        ("age", human_seconds(sequence.age_s)),
        ("preempted", counted(sequence.preemptions, "time")),
        *(_residency(sequence.residency) if sequence.HasField("residency") else ()),
    ]


def _residency(residency: admin_pb2.Residency) -> list[tuple[str, str]]:
    """Of a sequence larger than the device."""
    tiers = (("device", residency.device_blocks), ("host", residency.host_blocks), ("disk", residency.disk_blocks))
    rate, link = residency.streamed_bytes_per_s, residency.link_bytes_per_s
    reached = f"{human_bytes(int(rate))}/s, {rate / link:.0%} of {human_bytes(int(link))}/s" if link else "not measured"
    return [
        ("residency", ", ".join(f"{count:,} blocks {tier}" for tier, count in tiers if count)),
        ("streamed", f"{human_bytes(residency.streamed_bytes)} for the last token or chunk"),
        ("link", reached),
    ]
